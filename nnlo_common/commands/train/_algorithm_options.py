"""Options of the algorithms, as they declare them, for `nnlo train`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._found import ALGORITHMS
from nnlo_common.commands.train._option import Option, OptionKind, kind_of

__all__ = ["GROUP", "MODES", "MODE_OPTIONS", "MOMENTUM_MODES", "AlgorithmMode", "algorithm_of"]

GROUP = "Algorithm"


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
    return {
        name: Option(name=name, group=GROUP, help=one.help, default=one.wrapper_default, **kind_of(one.type))
        for name, one in algorithm.wrapper_options().items()
    }


#: The algorithms by name.
MODES: Mapping[str, AlgorithmMode] = {
    name: AlgorithmMode(algorithm=one, options=_options(one)) for name, one in ALGORITHMS.items()
}
#: The algorithms that take an SGD with momentum only.
MOMENTUM_MODES = tuple(name for name, one in ALGORITHMS.items() if one.made_of)


def _joined(name: str) -> Option:
    """Merge an option of several algorithms into one, with the meaning and default for each."""
    having = {mode: facts.options[name] for mode, facts in MODES.items() if name in facts.options}
    (usual, _), *_ = Counter(one.help for one in having.values()).most_common(1)
    meanings: dict[str, list[str]] = {}
    for mode, one in having.items():
        default = {True: "yes", False: "no"}[one.default] if one.kind is OptionKind.FLAG else one.default
        meanings.setdefault(one.help, []).append(mode if default is None else f"{mode} ({default})")
    text = "; ".join(
        meaning if meaning == usual and len(having) == len(MODES) else f"{', '.join(modes)}: {meaning}"
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
    return MODES[mode].algorithm.of_options(options)
