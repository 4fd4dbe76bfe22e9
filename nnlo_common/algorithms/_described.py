"""Options of an algorithm, read once from its dataclass: names, types, defaults and a line of help."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, get_type_hints

from nnlo_common.algorithms._rule import Algorithm

__all__ = ["AlgorithmOption", "options_of"]


@dataclass(frozen=True, slots=True)
class AlgorithmOption:
    """One option of an algorithm.

    Attributes:
        name: as the dataclass has it.
        type: its annotation.
        default: None also where it has to be given.
        help: the first sentence that the docstring of the algorithm says of it.
    """

    name: str
    type: Any
    default: Any
    help: str


@cache
def options_of(algorithm: type[Algorithm]) -> tuple[AlgorithmOption, ...]:
    """Return the options of an algorithm, in the order of its dataclass.

    Example:
        >>> from nnlo_common.algorithms import DynSGD
        >>> [(one.name, one.default, one.help) for one in options_of(DynSGD)][1]
        ('every', 1, 'steps between pushes')
    """
    types, help_of = get_type_hints(algorithm), dict[str, str]()
    for one in reversed(algorithm.__mro__[:-1]):
        text = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, meaning in re.findall(r"^ {4}(\w+): ((?:.|\n {8})*)", text, re.MULTILINE):
            help_of[name] = re.split(r"[.;] | \(|: \"|\.$", " ".join(meaning.split()))[0]
    return tuple(
        AlgorithmOption(
            field.name,
            types[field.name],
            None if field.default is MISSING else field.default,
            help_of[field.name],
        )
        for field in fields(algorithm)
    )
