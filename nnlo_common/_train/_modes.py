"""The algorithms by name, and their options: those of the dataclasses, as far as the wrappers take them."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from nnlo_common import algorithms
from nnlo_common._train._options import Kind, Option
from nnlo_common.algorithms import Algorithm

__all__ = ["MODES", "ONLY_TORCH", "Mode", "algorithm_of", "mode_options"]

GROUP = "Algorithm"
#: What only the wrappers of PyTorch take.
ONLY_TORCH = frozenset({"order", "warm_start"})
# What no wrapper takes: the optimizer says it, or it is for study.
_LEFT_OUT: Mapping[str, frozenset[str]] = {
    "downpour": frozenset({"n_fetch", "schedule", "local_learning_rate"}),
    "easgd": frozenset({"beta_per", "synchronous"}),
    "gem": frozenset({"learning_rate", "momentum", "clip", "epsilon", "primed", "gradient_at"}),
}
_CALLED = {"n_push": "every"}
# One that no plug-in has, for its optimizer would be none of the framework's.
_NOT_WRAPPED = (algorithms.EAMSGD,)


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
        if issubclass(one, Algorithm) and not inspect.isabstract(one) and one not in _NOT_WRAPPED
    }


def _options(algorithm: type[Algorithm]) -> dict[str, Option]:
    """The options of one algorithm."""
    types, told = typing.get_type_hints(algorithm), _explained(algorithm)
    left_out = _LEFT_OUT.get(algorithm.__name__.lower(), frozenset())
    options = {}
    for field in fields(algorithm):
        if field.name in left_out:
            continue
        name = _CALLED.get(field.name, field.name)
        kind, choices = _kind(types[field.name])
        options[name] = Option(
            name=name,
            group=GROUP,
            kind=kind,
            help=told[field.name],
            default=None if field.default is MISSING else field.default,
            choices=choices,
        )
    return options


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    if typing.get_origin(annotation) is Literal:
        return Kind.WORD, typing.get_args(annotation)
    return (Kind.WHOLE if annotation is int else Kind.REAL), ()


def _explained(algorithm: type[Algorithm]) -> dict[str, str]:
    """What the docstrings say of each option: the first sentence."""
    told: dict[str, str] = {}
    for one in reversed(algorithm.__mro__[:-1]):
        text = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, meaning in re.findall(r"^ {4}(\w+): ((?:.|\n {8})*)", text, re.MULTILINE):
            told[name] = re.split(r"[.;] | \(|: \"|\.$", " ".join(meaning.split()))[0]
    return told


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
            default = "" if option.default is None else f" ({option.default})"
            meanings.setdefault(option.help, []).append(f"{mode}{default}")
    every_mode = sum(map(len, meanings.values())) == len(MODES)
    text = "; ".join(
        meaning if every_mode else f"{', '.join(modes)}: {meaning}" for meaning, modes in meanings.items()
    )
    if name in ONLY_TORCH:
        text += " (PyTorch only)"
    one = next(mode.options[name] for mode in MODES.values() if name in mode.options)
    metavar = "|".join(one.choices) if one.choices else "N" if one.kind is Kind.WHOLE else "X"
    return Option(name=name, group=GROUP, kind=one.kind, help=text, metavar=metavar, choices=one.choices)


def algorithm_of(mode: str, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm with these options; it refuses those that are not possible.

    Example:
        >>> algorithm_of("easgd", {"every": 5}).every
        5
    """
    named = {**options}
    if mode == "downpour" and "every" in named:
        named["n_push"] = named["n_fetch"] = named.pop("every")
    if mode == "agn":
        named.setdefault("local_learning_rate", 0.0)  # the wrappers take the optimizer's
    return MODES[mode].algorithm(**named)
