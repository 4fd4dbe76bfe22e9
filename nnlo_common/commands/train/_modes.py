"""The algorithms by name, and their options: those of the dataclasses, as far as the wrappers take them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nnlo_common import algorithms
from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._described import options_of
from nnlo_common.base._arguments import whole_number
from nnlo_common.commands.train._options import Kind, Option

__all__ = ["LEFT_OUT", "MODES", "Mode", "algorithm_of", "mode_options"]

GROUP = "Algorithm"
_SAID = "your optimizer says it"
#: Options of the algorithms that no wrapper takes, with the reason.
LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "downpour": {"schedule": "always aligned"},
    "eamsgd": {"learning_rate": _SAID, "momentum": _SAID, "order": "always the paper's"},
    "gem": {
        "learning_rate": _SAID,
        "momentum": _SAID,
        "epsilon": "for study",
        "gradient_at": "for study",
    },
}
# What the wrappers call otherwise, and what is another's by default there.
_CALLED = {("downpour", "local_learning_rate"): "local"}
_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "downpour": {
        "n_push": "steps between pushes, if not --every",
        "n_fetch": "steps between fetches, if not --every",
        "local": "learning rate of a worker's own steps between fetches; else it makes none",
    },
}
_EVERY = "steps between exchanges"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """An algorithm as `--mode` names it.

    Attributes:
        algorithm: its class; both plug-ins have a wrapper of that name.
        options: by name.
    """

    algorithm: type[Algorithm]
    options: Mapping[str, Option]


def _found() -> dict[str, Mode]:
    classes = [getattr(algorithms, name) for name in algorithms.__all__]
    return {
        one.__name__.lower(): Mode(algorithm=one, options=_options(one))
        for one in sorted(classes, key=lambda one: one.__name__.lower())
        if issubclass(one, Algorithm) and not inspect.isabstract(one)
    }


def _options(algorithm: type[Algorithm]) -> dict[str, Option]:
    """The options of one algorithm."""
    mode = algorithm.__name__.lower()
    left_out, otherwise = LEFT_OUT.get(mode, {}), _OTHERWISE.get(mode, {})
    options = {}
    if mode == "downpour":  # it has two in place of the wrappers' one
        options["every"] = Option(name="every", group=GROUP, kind=Kind.WHOLE, help=_EVERY, default=1)
    for one in options_of(algorithm):
        if one.name not in left_out:
            name = _CALLED.get((mode, one.name), one.name)
            kind, choices = _kind(one.type)
            default = None if name in otherwise else one.default
            text = otherwise.get(name, one.help)
            options[name] = Option(
                name=name, group=GROUP, kind=kind, help=text, default=default, choices=choices
            )
    return options


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    if typing.get_origin(annotation) is Literal:
        return Kind.WORD, typing.get_args(annotation)
    if annotation is bool:
        return Kind.FLAG, ()
    return (Kind.WHOLE if annotation is int else Kind.REAL), ()


MODES: Mapping[str, Mode] = _found()


def mode_options() -> dict[str, Option]:
    """Return an option for each name that any algorithm has, with what it means for each of them."""
    names = dict.fromkeys(name for mode in MODES.values() for name in mode.options)
    return {name: _joined(name) for name in sorted(names)}


def _joined(name: str) -> Option:
    meanings: dict[str, list[str]] = {}
    for mode, facts in MODES.items():
        if name in facts.options:
            option = facts.options[name]
            value = option.default
            if option.kind is Kind.FLAG:
                value = "yes" if value else "no"
            default = "" if value is None else f" ({value})"
            meanings.setdefault(option.help, []).append(f"{mode}{default}")
    every_mode = sum(map(len, meanings.values())) == len(MODES)
    usual = max(meanings, key=lambda meaning: len(meanings[meaning]))  # of all modes but those named
    text = "; ".join(
        meaning if every_mode and meaning == usual else f"{', '.join(modes)}: {meaning}"
        for meaning, modes in meanings.items()
    )
    one = next(mode.options[name] for mode in MODES.values() if name in mode.options)
    metavar = "|".join(one.choices) or {Kind.WHOLE: "N", Kind.FLAG: ""}.get(one.kind, "X")
    return Option(name=name, group=GROUP, kind=one.kind, help=text, metavar=metavar, choices=one.choices)


def algorithm_of(mode: str, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm with these options; it refuses those that are not possible.

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
    # The wrappers take the optimizer's.
    if mode == "agn":
        named.setdefault("local_learning_rate", 0.0)
    if mode == "eamsgd":
        named["learning_rate"] = 1.0
    return MODES[mode].algorithm(**named)
