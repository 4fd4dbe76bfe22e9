"""Wire formats in float64, from their definitions: what a receiver gets, and what a sender keeps.

Nothing here calls nnlo. The network's 26 parameters are one row of int8.
"""

from __future__ import annotations

import numpy as np

from tests.equations.network import SIZE, Array

__all__ = ["Wire"]


def rounded(y: Array, bits: int) -> Array:
    """The nearest number of so many significant bits."""
    part, power = np.frexp(y)
    return np.ldexp(np.sign(part) * np.floor(np.abs(part) * 2**bits + 0.5), power - bits)


def in_steps(y: Array) -> Array:
    """The nearest multiple of a 127th of the largest."""
    step = np.abs(y).max() / 127
    return np.rint(y / step) * step if step else 0 * y


class Wire:
    """All that the workers and the centre know of what the others have.

    Args:
        name: the format.
        wrapper: the algorithm.
    """

    def __init__(self, name: str, wrapper: str) -> None:
        self.name = name
        self.elastic, self.replaced = wrapper in ("EASGD", "EAMSGD"), wrapper == "LocalSGD"
        self.kept: dict[tuple[str, int], Array] = {}  # e, by direction and worker
        self.known: dict[tuple[str, int], Array] = {}  # r
        self.replied: dict[int, Array] = {}  # c when the worker was answered last

    def begin(self, worker: int, c: Array) -> None:
        """A worker has the centre."""
        for way in ("up", "down"):
            self.kept[way, worker], self.known[way, worker] = np.zeros(SIZE), c.copy()
        self.replied[worker] = c.copy()

    def up(self, worker: int, v: Array) -> Array:
        """What the centre gets of a contribution."""
        if self.elastic:
            return self._followed(("up", worker), v)
        start = self.known["down", worker] if self.replaced else np.zeros(SIZE)
        moved = self._stepped(("up", worker), v - start)
        return self.replied[worker] + moved if self.replaced else moved

    def down(self, worker: int, v: Array) -> Array:
        """What a worker gets of a reply."""
        self.replied[worker] = v.copy()
        way = self._stepped if self.elastic else self._followed
        return way(("down", worker), v)

    def _stepped(self, way: tuple[str, int], v: Array) -> Array:
        y = v + self.kept[way]
        q = self._q(y)
        self.kept[way] = y - q
        return q

    def _followed(self, way: tuple[str, int], v: Array) -> Array:
        self.known[way] = self.known[way] + self._q(v - self.known[way])
        return self.known[way].copy()

    def _q(self, y: Array) -> Array:
        if self.name == "bfloat16":
            return rounded(y, 8)
        if self.name == "float16":
            return rounded(y, 11)
        return in_steps(y)
