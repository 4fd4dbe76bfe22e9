"""Save and restore the global random generators of Python and NumPy, which user scripts draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["check_random", "load_random", "random_states", "seed_random"]


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
