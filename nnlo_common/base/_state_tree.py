"""Exact saving and loading of objects as plain trees of numbers, text and arrays."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np

from nnlo_common.base._errors import ConfigurationError

__all__ = [
    "State",
    "Stateful",
    "check_random",
    "load_random",
    "random_states",
    "require",
    "seed_random",
]

# -- save and restore the global random generators of Python and NumPy, which user scripts draw from ----


def seed_random(number: int) -> None:
    """Seed the global generators of Python and NumPy."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - user code draws from it


def random_states() -> dict[str, Any]:
    """Return the states of the global generators of Python and NumPy.

    Their numbers are arrays: a checkpoint copies and writes each at once, not number by number.

    Example:
        >>> states = random_states()
        >>> first = random.random()
        >>> load_random(states)
        >>> random.random() == first
        True
    """
    version, numbers, gauss = random.getstate()
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 - user code draws from it
    kind, keys, *rest = of_numpy
    return {
        "python": [version, np.array(numbers, np.int64), gauss],
        "numpy": [kind, keys.astype(np.int64), *rest],
    }


def load_random(states: Mapping[str, Any]) -> None:
    """Restore what `random_states` returned.

    Raises:
        ValueError: see `check_random`; nothing has changed then.
    """
    of_python, of_numpy = check_random(states)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002 - user code draws from it


def check_random(states: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the states for Python's and NumPy's generators, after trying them on generators of its own.

    Raises:
        ValueError: a generator cannot have such a state.
    """
    try:
        version, numbers, gauss = states["python"]
        of_python = version, tuple(np.asarray(numbers).tolist()), gauss
        random.Random().setstate(of_python)
        kind, keys, place, has_gauss, cached = states["numpy"]
        # NumPy does not check the place, and would read beyond its numbers.
        if type(place) is not int or not 0 <= place <= len(keys):
            raise ValueError(f"the place {place!r:.60} in NumPy's random numbers")
        of_numpy = kind, np.array(keys, np.uint32), place, has_gauss, float(cached)
        np.random.RandomState().set_state(of_numpy)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"a random state in it cannot be one ({error})") from error
    return of_python, of_numpy


# -- exact saving and loading of objects as plain trees of numbers, text and arrays ---------------------

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
