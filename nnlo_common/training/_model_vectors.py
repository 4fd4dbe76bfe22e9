"""Protocols that a framework package fulfils: its model's numbers in flat vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.base._layout import Layout
from nnlo_common.protocol import Moves, Moving

__all__ = ["Buffers", "Model", "Options", "unwired", "vectors_in_turn", "wired"]

# From so many numbers on.
_BEYOND_CACHE = 1 << 19


class Model(Protocol):
    """A model's parameters and gradients as flat vectors."""

    @property
    def parameters(self) -> FlatVector:
        """The parameters."""

    @property
    def gradient(self) -> FlatVector:
        """The gradients."""

    def collect(self) -> None:
        """Bring the gradients into their vector."""

    @property
    def gradients(self) -> Sequence[FlatVector]:
        """All vectors that gradients are made in, in turn; only one where they are copied to be sent."""

    def turn(self) -> bool:
        """Make the next gradient in another vector, if that is possible; say whether it is."""

    def check(self) -> None:
        """Refuse what could not be exchanged, where gradients are not."""

    def absorb(self) -> None:
        """Bring the parameters into their vector."""

    def publish(self) -> None:
        """Bring the vector into the parameters."""


class Buffers(Protocol):
    """What is averaged and never goes through an optimizer."""

    @property
    def flat(self) -> FlatVector:
        """The buffers."""

    @property
    def layers(self) -> Sequence[Moving]:
        """The layers whose statistics are moved by each batch, and where these lie."""

    def moves(self) -> Moves:
        """Return how often each of these layers has moved its statistics."""

    def mark(self, totals: npt.NDArray[np.float64] | None = None) -> None:
        """Count from here, with these counts of all updates where layers keep one."""

    def set_since(self, since: npt.NDArray[np.float64]) -> None:
        """Go on where so many updates had been made since the last `mark`."""

    def gather(self) -> None:
        """Copy the buffers into their vector."""

    def scatter(self) -> None:
        """Copy the vector into the buffers."""


class Options(Protocol):
    """The numbers of an optimizer that schedulers set."""

    def read(self) -> tuple[float, ...]:
        """Return them."""


def wired(numbers: tuple[float, ...]) -> Vector:
    """Return numbers in full precision, as pairs of what only looks like float32."""
    vector: Vector = np.array(numbers, np.float64).view(np.float32)
    return vector


def unwired(vector: Vector) -> list[float]:
    """Return what was `wired`."""
    numbers: list[float] = np.ascontiguousarray(vector).view(np.float64).tolist()
    return numbers


def vectors_in_turn(layout: Layout, lag: int) -> int:
    """Return in how many vectors gradients are best made in turn, while earlier ones travel.

    For a model beyond the cache that costs less than to copy what is sent; below, the copy is in the cache
    and several vectors would drive each other out of it.
    """
    return 1 + lag if layout.size >= _BEYOND_CACHE else 1
