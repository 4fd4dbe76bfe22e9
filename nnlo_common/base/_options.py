"""Declarations of options: type, default, range, help, and how the wrappers take them; each is made once.

A field of an algorithm, or of `RankOptions`, declares all of it by `option`. What needs it reads it from
there: the checks of these classes, the wrappers of both frameworks, `nnlo train`, the stubs for editors, and
the tables of the docs.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal

import numpy as np

from nnlo_common.base._arguments import is_number, is_whole

__all__ = ["FROM_OPTIMIZER", "Declared", "declared", "option"]

#: Why no wrapper takes an option that its optimizer has.
FROM_OPTIMIZER: Final = "taken from your optimizer"


def option(
    default: Any = MISSING,
    help: str = "",  # noqa: A002
    **facts: Any,
) -> Any:
    """Return a dataclass field that declares an option.

    Args:
        default: its value if it is not given; without one it must be given.
        help: what it does, in a few words that `nnlo train --help` and the wrappers' docstrings show.
        facts: what else `Declared` has of it, e.g. `least=1`.

    Example:
        >>> from nnlo_common import EASGD
        >>> EASGD.wrapper_options()["every"].expected
        'a whole number of at least 1'
    """
    return field(default=default, metadata={"help": help, **facts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """An option of an algorithm, or of ranks.

    Attributes:
        name: in wrappers and in `nnlo train`.
        field: in the algorithm; empty if it has no such field, but makes others of it.
        type: of its value in the algorithm.
        default: its value if it is not given; MISSING: the algorithm needs it.
        help: what it does.
        least: the smallest number.
        above: a real number must be above this, if it has no `least`.
        below: a real number must be below this.
        unset: wrappers have the default None, which stands for "not given".
        local: whether it moves a worker's weights between exchanges: "rate": wrappers take a learning rate,
            and without one that of their optimizer; "optimizer": they take an optimizer, too, and without it
            nothing moves them.
        absent: why no wrapper takes it; empty: they take it.
        fixed: its value in wrappers, which do not take it; None: its default.
        replaces: an option that has no effect beside this one, and the equation for that.
        elsewhere: why other algorithms do not have it, for people who ask for it there. It is one of a few
            that are left out of configurations and descriptions at their defaults.
        quiet: it is left out of configurations and descriptions at its default.
    """

    name: str
    type: Any
    default: Any
    help: str
    field: str = ""
    least: float | None = None
    above: float = 0
    below: float = math.inf
    unset: bool = False
    local: Literal["", "rate", "optimizer"] = ""
    absent: str = ""
    fixed: Any = None
    replaces: tuple[str, str] | None = None
    elsewhere: str = ""
    quiet: bool = False

    @property
    def wrapper_default(self) -> Any:
        """Its default in wrappers."""
        return None if self.unset or self.local or self.default is MISSING else self.default

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be; empty: it is no text."""
        return _parts(self.type)[1]

    @property
    def expected(self) -> str:
        """The values that it may have."""
        kind, texts, _ = _parts(self.type)
        if kind is int:
            return "a whole number" + ("" if self.least is None else f" of at least {self.least}")
        if kind is float:
            low = f"above {self.above}" if self.least is None else f"at least {self.least}"
            return low + (", finite" if self.below == math.inf else f" and below {self.below}")
        if kind is str:
            return "a text"
        return "True or False" if kind is bool else " or ".join(map(repr, texts))

    def holds(self, value: object) -> bool:
        """Whether it may have this value; values of a type of your own are not checked."""
        kind, texts, optional = _parts(self.type)
        if (value is None and optional) or (isinstance(value, str) and value in texts):
            return True
        if kind is int:
            return is_whole(value, -math.inf if self.least is None else self.least)
        if kind is float:
            low = is_number(value) and (value > self.above if self.least is None else value >= self.least)
            return low and is_number(value) and bool(value < self.below)
        if kind is str:
            return isinstance(value, str)
        return isinstance(value, bool | np.bool_) if kind is bool else not texts

    def exact(self, value: Any) -> Any:
        """Return a value that it may have in its own type, so that equal options have equal descriptions."""
        kind, texts, _ = _parts(self.type)
        return value if value is None or value in texts or kind is None else kind(value)


@functools.cache
def declared(holder: type) -> Mapping[str, Declared]:
    """Return the declarations of a class by its fields; what all algorithms have is last."""
    hints, found = typing.get_type_hints(holder), dict[str, Declared]()
    base = next(one for one in reversed(holder.__mro__) if is_dataclass(one))
    of_all = {one.name for one in fields(base)}
    for one in sorted(fields(holder), key=lambda one: one.name in of_all):
        facts = {"help": "", **one.metadata}
        name = facts.pop("called", one.name)
        found[one.name] = Declared(
            name=name, field=one.name, type=hints[one.name], default=one.default, **facts
        )
    return found


@functools.cache
def _parts(annotation: Any) -> tuple[type | None, tuple[str, ...], bool]:
    """Return the type of values that an annotation allows, the texts, and whether None is one."""
    union = typing.get_origin(annotation) in (UnionType, typing.Union)
    kinds = typing.get_args(annotation) if union else (annotation,)
    texts = tuple(text for one in kinds if typing.get_origin(one) is Literal for text in typing.get_args(one))
    kind = next((one for one in kinds if one in (int, float, bool, str)), None)
    return kind, texts, NoneType in kinds
