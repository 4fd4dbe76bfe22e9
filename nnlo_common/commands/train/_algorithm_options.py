"""Options of the algorithms: the fields of their dataclasses that the wrappers take."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from nnlo_common import algorithms
from nnlo_common.algorithms import Algorithm
from nnlo_common.base._arguments import whole_number
from nnlo_common.commands.train._option import Option, OptionKind, kind_of

__all__ = ["GROUP", "LEFT_OUT", "MODES", "MODE_OPTIONS", "AlgorithmMode", "algorithm_of"]

GROUP = "Algorithm"
#: Help of each option: of all algorithms that have it, or of the algorithm named before the dot.
_HELP: Mapping[str, str] = {
    "alpha": "the moving rate",
    "backup": "number of slowest workers that a commit does not wait for",
    "beta": "p alpha for p workers",
    "beta_per": "whether beta is for an exchange or a step",
    "clip": "upper bound of pi",
    "every": "steps of a worker between exchanges",
    "gem.every": "batches whose gradients are averaged for one step",
    "kappa": "limit of the collective's energy, in units of the proxy's",
    "lag": "exchanges that may be under way while the worker trains on",
    "gem.lag": "delay of the gradients, in steps",
    "local": "learning rate of a worker's local steps between fetches; without it there are none",
    "local_learning_rate": "eta of the local steps",
    "n_fetch": "steps between fetches, if not --every",
    "n_push": "steps between pushes, if not --every",
    "order": "whether the exchange or the step comes first",
    "outer_learning_rate": "of the outer SGD",
    "outer_momentum": "of the outer SGD",
    "primed": "take the first centre as the first stale centre",
    "sub_alpha": "the moving rate of sub-servers, with the top server; else from beta",
    "sub_every": "exchanges of a sub-server's workers between two of its own",
    "sub_servers": "servers between the top server and the workers; host: one on each host",
    "synchronous": "wait for all workers at each exchange",
    "warm_start": "commits of the first worker before the others join",
    "warmup": "number of first steps that are each averaged",
}
_FROM_OPTIMIZER = "taken from your optimizer"
#: Options of the algorithms that no wrapper takes, or none of `nnlo train`, with the reason.
LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "downpour": {"schedule": "always aligned"},
    "eamsgd": {
        "learning_rate": _FROM_OPTIMIZER,
        "momentum": _FROM_OPTIMIZER,
        "order": "always the paper's",
    },
    "gem": {
        "learning_rate": _FROM_OPTIMIZER,
        "momentum": _FROM_OPTIMIZER,
        "epsilon": "for study",
        "gradient_at": "for study",
    },
}
# Options with other names in the wrappers, and options that default to another option there.
_RENAMED = {("downpour", "local_learning_rate"): "local"}
_UNSET = ("n_push", "n_fetch", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmMode:
    """An algorithm that `--mode` names.

    Attributes:
        algorithm: its class; both plug-ins have a wrapper of that name.
        options: by name.
    """

    algorithm: type[Algorithm]
    options: Mapping[str, Option]


def _options(algorithm: type[Algorithm]) -> dict[str, Option]:
    """The options of one algorithm."""
    mode, hints = algorithm.__name__.lower(), typing.get_type_hints(algorithm)
    options = {}
    if mode == "downpour":  # the algorithm has n_push and n_fetch, the wrapper also `every` for both
        options["every"] = Option(
            name="every", group=GROUP, kind=OptionKind.WHOLE, help=_HELP["every"], default=1
        )
    for field in fields(algorithm):
        if field.name not in LEFT_OUT.get(mode, {}):
            name = _RENAMED.get((mode, field.name), field.name)
            text = _HELP.get(f"{mode}.{name}") or _HELP[name]
            default = None if field.default is MISSING or name in _UNSET else field.default
            kind = kind_of(hints[field.name])
            options[name] = Option(name=name, group=GROUP, help=text, default=default, **kind)
    return options


#: The algorithms by name.
MODES: Mapping[str, AlgorithmMode] = {
    one.__name__.lower(): AlgorithmMode(algorithm=one, options=_options(one))
    for one in (getattr(algorithms, name) for name in sorted(algorithms.__all__, key=str.lower))
    if issubclass(one, Algorithm) and not inspect.isabstract(one)
}


def _joined(name: str) -> Option:
    """Merge an option of several algorithms into one, with the meaning and default for each."""
    having = {mode: facts.options[name] for mode, facts in MODES.items() if name in facts.options}
    meanings: dict[str, list[str]] = {}
    for mode, one in having.items():
        default = {True: "yes", False: "no"}[one.default] if one.kind is OptionKind.FLAG else one.default
        meanings.setdefault(one.help, []).append(mode if default is None else f"{mode} ({default})")
    text = "; ".join(
        meaning if meaning == _HELP[name] and len(having) == len(MODES) else f"{', '.join(modes)}: {meaning}"
        for meaning, modes in meanings.items()
    )
    return replace(one, help=text, default=None, metavar="|".join(one.choices))


#: An option for each name that any algorithm has.
MODE_OPTIONS: Mapping[str, Option] = {
    name: _joined(name) for name in sorted({name for mode in MODES.values() for name in mode.options})
}


def algorithm_of(mode: str, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm with these options; it refuses invalid ones.

    Example:
        >>> algorithm_of("easgd", {"every": 5}).every
        5
    """
    named = {**options}
    if mode == "downpour":
        every = named.pop("every", 1)
        whole_number("every", every, 1)
        named = {"n_push": every, "n_fetch": every, **named}
        if "local" in named:
            named["local_learning_rate"] = named.pop("local")
    # The wrappers take these from the optimizer.
    if mode == "agn":
        named.setdefault("local_learning_rate", 0.0)
    if mode == "eamsgd":
        named["learning_rate"] = 1.0
    return MODES[mode].algorithm(**named)
