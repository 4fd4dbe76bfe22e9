"""Names of columns as users write them: one, several beside each other, or a pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data.formats._format import shown

__all__ = ["NamedColumns", "requests"]

_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """The columns of one name.

    Attributes:
        names: of the columns.
        stacked: whether they are one input, side by side.
    """

    names: tuple[str, ...]
    stacked: bool = False


def requests(side: str, asked: Any, known: Callable[[], Sequence[str]]) -> list[NamedColumns]:
    """Return the columns that each name stands for.

    Args:
        side: the option that names them.
        asked: a name, or several.
        known: returns the names that the first file has.

    Raises:
        ConfigurationError: it is not a name, or a pattern that matches nothing.

    Example:
        >>> found = requests("features", ["pt,eta", "hits_*"], lambda: ["pt", "eta", "hits_x", "hits_y"])
        >>> [one.names for one in found]
        [('pt', 'eta'), ('hits_x', 'hits_y')]
    """
    names: list[Any] = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    if not names or not all(isinstance(name, str) and name.strip("/") and "\0" not in name for name in names):
        raise ConfigurationError(
            f"{side}={asked!r}: give the name of a dataset or a group in the files, or several names"
        )
    return [_request(side, name, known) for name in names]


def _request(side: str, name: str, known: Callable[[], Sequence[str]]) -> NamedColumns:
    if "," not in name and not _PATTERN & set(name):
        return NamedColumns((name,))
    there = known()
    if name in there:  # also with such a character
        return NamedColumns((name,))
    found: list[str] = []
    for part in map(str.strip, name.split(",")):
        matching = [part]
        if _PATTERN & set(part):
            matching = fnmatch.filter(there, part)
        if not part or not matching:
            raise ConfigurationError(
                f"{side}={name!r}: {part!r} names no column; the first file has {shown(there)}"
            )
        found += matching
    if twice := [one for index, one in enumerate(found) if one in found[:index]]:
        raise ConfigurationError(f"{side}={name!r} names {twice[0]!r} twice; name each column once")
    return NamedColumns(tuple(found), stacked=True)
