"""Public names: classes and functions say the module that users import them from."""

from __future__ import annotations

import contextlib
import sys
import typing
from collections.abc import Iterable

__all__ = ["say_public_module"]


def say_public_module(package: str, names: Iterable[str], public: str = "") -> None:
    """Let classes and functions say their public module, so that help and errors name what users write.

    What another public package has claimed stays as it is, such as errors of the core in a front end.
    Annotations of a class are resolved first: Python looks for their names in the module that the class says.

    Args:
        package: the public package, which has been imported up to here.
        names: its public names; those that it imports later are left alone.
        public: the module to say, if users import these from another one.

    Example:
        >>> from nnlo_common import Downpour
        >>> Downpour
        <class 'nnlo_common.Downpour'>
    """
    things = vars(sys.modules[package])
    for thing in (things[name] for name in names if name in things):
        if "._" not in getattr(thing, "__module__", "") or things.get(thing.__name__) is not thing:
            continue
        if isinstance(thing, type) and "__annotations__" in vars(thing):
            with contextlib.suppress(NameError):  # of a name that only type checkers import
                hints = typing.get_type_hints(thing, include_extras=True)
                thing.__annotations__.update({one: hints[one] for one in thing.__annotations__})
        thing.__module__ = public or package
