"""Save and restore the global random generators of Python and NumPy, which user scripts draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["load_random", "random_states", "seed_random"]


def seed_random(number: int) -> None:
    """Seed the global generators of Python and NumPy."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - user code draws from it


def random_states() -> dict[str, Any]:
    """Return the states of the global generators of Python and NumPy.

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
    return {"python": [version, list(numbers), gauss], "numpy": [kind, keys.tolist(), *rest]}


def load_random(states: Mapping[str, Any]) -> None:
    """Restore what `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))  # noqa: NPY002 - user code draws from it
