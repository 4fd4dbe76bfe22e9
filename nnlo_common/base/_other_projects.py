"""Errors for changed private parts of other projects; they name the project, its version and the part.

Only modules called `_compat.py` use such parts, one for each of our packages.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from nnlo_common.base._errors import ConfigurationError

__all__ = ["OtherProject"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class OtherProject:
    """Another project whose private parts we use.

    Args:
        package: its import name.
        compat: our file that uses those parts.

    Example:
        >>> numpy = OtherProject("numpy", "example.py")
        >>> @numpy.uses("_size")
        ... def size_of(array):
        ...     return array._size
        >>> size_of(())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        nnlo_common.ConfigurationError: numpy ... has changed: tuple has no _size any more, ...
    """

    def __init__(self, package: str, compat: str) -> None:
        self._package, self._compat = package, compat

    def changed(self, what: str) -> ConfigurationError:
        """Return the error for `what` has changed."""
        version = getattr(sys.modules.get(self._package), "__version__", "of an unknown version")
        return ConfigurationError(
            f"{self._package} {version} has changed: {what}, which {self._compat} needs; install a version "
            f"of {self._package} that nnlo's requirements allow, or a later nnlo"
        )

    def uses(self, *parts: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
        """Decorate a function that reads these private attributes: it raises `changed` if one is missing.

        Args:
            parts: their names. Any other AttributeError passes, as it may come from the user's code.
        """

        def guard(function: Callable[_P, _R]) -> Callable[_P, _R]:
            @functools.wraps(function)
            def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
                try:
                    return function(*args, **kwargs)
                except AttributeError as error:
                    if error.name not in parts:
                        raise
                    raise self.changed(f"{_named(error.obj)} has no {error.name} any more") from error

            guarded.parts = parts  # type: ignore[attr-defined]
            return guarded

        return guard


def _named(owner: Any) -> str:
    if isinstance(owner, type | ModuleType):
        return owner.__name__
    return type(owner).__name__
