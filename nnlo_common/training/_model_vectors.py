"""Protocols that framework packages implement: a model's numbers in flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.base._layout import Layout
from nnlo_common.protocol import Moves, Moving

__all__ = ["Buffers", "Model", "Options", "Trained", "unwired", "vectors_in_turn", "wired"]

# Models with at least this many numbers do not fit the cache.
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
        """Copy the gradients into their vector."""

    @property
    def gradients(self) -> Sequence[FlatVector]:
        """The vectors that hold gradients in turn; only one if gradients are copied to be sent."""

    def turn(self) -> bool:
        """Use another vector for the next gradient if possible; return whether it is."""

    def check(self) -> None:
        """Raise if the model cannot be exchanged; called in place of `collect` if gradients are not sent."""

    def absorb(self) -> None:
        """Copy the parameters into their vector."""

    def absorb_changes(self) -> None:
        """Copy into the vector what was changed in the parameters since `publish`; keep its bits elsewhere.

        Parameters of 16 bits cannot hold the vector's numbers.
        """

    def publish(self) -> None:
        """Copy the vector into the parameters."""


class Buffers(Protocol):
    """Buffers of a model: averaged, never stepped by an optimizer."""

    @property
    def flat(self) -> FlatVector:
        """The buffers."""

    @property
    def layers(self) -> Sequence[Moving]:
        """The places of the statistics that each batch moves, by layer."""

    def moves(self) -> Moves:
        """Return the update counts of these layers."""

    def mark(self, totals: npt.NDArray[np.float64] | None = None) -> None:
        """Count updates from here; `totals` sets the counts of layers that keep one."""

    def set_since(self, since: npt.NDArray[np.float64]) -> None:
        """Restore the number of updates since the last `mark`."""

    def gather(self) -> None:
        """Copy the buffers into their vector."""

    def scatter(self) -> None:
        """Copy the vector into the buffers."""


class Options(Protocol):
    """Options of an optimizer that schedulers change."""

    def read(self) -> tuple[float, ...]:
        """Return their current values."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a framework brings to a training: a model, and what moves it.

    Attributes:
        model: the model.
        buffers: its buffers, if it has any.
        options: the options of the user's optimizer.
        center_optimizer: makes the optimizer of the given part of the centre.
        local_step: moves the parameters in each step; None: nothing does, or the framework by itself. Without
            servers it makes each step.
        moved_outside: the framework moves the parameters by itself between steps.
        given_sums: the model's gradient is the sum over all steps since the last contribution.
    """

    model: Model
    buffers: Buffers | None
    options: Options
    center_optimizer: Callable[[slice], VectorOptimizer]
    local_step: Callable[[], object] | None = None
    moved_outside: bool = False
    given_sums: bool = False


def wired(numbers: tuple[float, ...]) -> Vector:
    """Return float64 numbers reinterpreted as pairs of float32."""
    vector: Vector = np.array(numbers, np.float64).view(np.float32)
    return vector


def unwired(vector: Vector) -> list[float]:
    """Return the numbers that `wired` packed."""
    numbers: list[float] = np.ascontiguousarray(vector).view(np.float64).tolist()
    return numbers


def vectors_in_turn(layout: Layout, lag: int) -> int:
    """Return the best number of gradient vectors to use in turn while earlier ones are being sent.

    For a model larger than the cache, several vectors cost less than a copy; for a smaller one the copy stays
    in the cache, and several vectors would evict each other.
    """
    return 1 + lag if layout.size >= _BEYOND_CACHE else 1
