"""Exact saving and loading of objects as plain trees of numbers, text and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np

from nnlo_common.base._errors import ConfigurationError

__all__ = ["State", "Stateful", "require"]

State: TypeAlias = dict[str, Any]


def require(owner: str, state: object, **patterns: object) -> None:
    """Refuse a saved `state` whose entries do not match `patterns`, name by name.

    A pattern is a type; an array, for its shape and dtype; a list with one pattern for all its items; or
    any other value, for exactly that value.

    Raises:
        ConfigurationError: an entry does not match; the message names it.

    Example:
        >>> require("a worker", {"clock": 3, "sum": np.zeros(2)}, clock=int, sum=np.zeros(2))
    """
    if not isinstance(state, Mapping) or set(state) != set(patterns):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise ConfigurationError(
            f"the saved state of {owner} must have {sorted(patterns)}, but it has {found}; resume with the "
            "algorithm and version that saved it, or from an earlier checkpoint if this one is damaged"
        )
    for name, pattern in patterns.items():
        if not _fits(state[name], pattern):
            raise ConfigurationError(
                f"{name} in the saved state of {owner} must be {_described(pattern)}, but it is "
                f"{_described(state[name])}; resume with the model, algorithm and number of ranks that "
                "saved it"
            )


class Stateful:
    """Gives a class an exact `state()` and `load()` from the names of its attributes.

    An attribute may be a number, an array (copied; loaded in place, so that views of it stay valid), a
    list of arrays, or an object with its own `state()` and `load()`.

    Attributes:
        saved: the names of the attributes that make up the state.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Return a copy of everything that the next step depends on: the attributes in `saved`."""
        return {"type": type(self).__name__} | {name: _copied(getattr(self, name)) for name in self.saved}

    def check(self, state: object) -> None:
        """Refuse a state that `load` cannot use; change nothing.

        Raises:
            ConfigurationError: it is of another class, or a number or an array in it does not match.
        """
        owner = type(self).__name__
        patterns = {name: _pattern(getattr(self, name)) for name in self.saved}
        require(f"a {owner}", state, type=owner, **patterns)
        assert isinstance(state, Mapping)  # checked by require
        for name in self.saved:
            mine = getattr(self, name)
            if self._ours(name):
                mine.check(state[name])

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore exactly the object that returned `state`.

        Raises:
            ConfigurationError: see `check`; nothing has changed then.
        """
        self.check(state)
        # Foreign optimizers have no `check` and may still refuse, so they load first.
        others = {name: hasattr(getattr(self, name), "load") and not self._ours(name) for name in self.saved}
        for name in sorted(self.saved, key=lambda name: not others[name]):
            mine = getattr(self, name)
            if hasattr(mine, "load"):
                mine.load(state[name])
            elif isinstance(mine, np.ndarray):
                np.copyto(mine, state[name])
            else:
                setattr(self, name, _copied(state[name]))

    def _ours(self, name: str) -> bool:
        return isinstance(getattr(self, name), Stateful)


def _pattern(value: Any) -> object:
    """Return the pattern that a saved value must match to replace `value`."""
    if isinstance(value, np.ndarray):
        return value
    return Mapping if hasattr(value, "load") else type(value)


def _fits(value: object, pattern: object) -> bool:
    if isinstance(pattern, np.ndarray):
        return isinstance(value, np.ndarray) and value.shape == pattern.shape and value.dtype == pattern.dtype
    if isinstance(pattern, list):
        return isinstance(value, list | tuple) and all(_fits(item, pattern[0]) for item in value)
    if isinstance(pattern, type):
        return isinstance(value, pattern)
    return bool(value == pattern)


def _described(thing: object) -> str:
    if isinstance(thing, np.ndarray):
        return f"{thing.dtype}{list(thing.shape)}"
    if isinstance(thing, type):
        return f"a {thing.__name__}"
    if isinstance(thing, list):
        return f"a list, each item {_described(thing[0])}" if thing else "an empty list"
    return f"a {type(thing).__name__}" if isinstance(thing, Mapping) else repr(thing)


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.state() if hasattr(value, "state") else value
