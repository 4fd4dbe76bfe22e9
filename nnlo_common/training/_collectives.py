"""Collectives of a training, apart from its exchanges: the whole model, means, and broadcasts.

The query service of the first server answers them; the centre's parameters come from all servers.
Buffers such as running statistics never go through an optimizer: each worker sends its own at the end of its
epoch, with their update counts, and any rank can ask for the combined buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import FlatVector, Layout, Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol import QUERY_NUMBERS, Moves, Moving
from nnlo_common.protocol._query_messages import AverageQuery, BroadcastQuery, LastRoundQuery, MeanQuery
from nnlo_common.training._rank_parts import TeamPart

__all__ = [
    "BufferCounts",
    "Buffers",
    "Collectives",
    "Model",
    "Options",
    "Trained",
    "unwired",
    "vectors_in_turn",
    "wired",
]

# -- protocols that framework packages implement: a model's numbers in flat vectors ---------------------

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


# -- collectives of a training, apart from its exchanges: the whole model, means, and broadcasts --------

#: The buffers of a model, and the update counts of their layers.
BufferCounts: TypeAlias = tuple[Vector, npt.NDArray[np.float64]]

# The numbers that fit into one query, leaving room for its JSON.
_PIECE = QUERY_NUMBERS - 64


class Collectives:
    """Collectives as one rank sees them.

    Attributes:
        part: this rank's part, which sends the queries.
        views: how often all ranks have viewed the centre together; later buffers belong to the next view.

    Args:
        part: this rank's part, which sends the queries.
        model: this rank's model.
        buffers: the model's buffers, if it has any.
        speaks: returns whether this rank is the source of broadcasts.
    """

    def __init__(
        self, part: TeamPart, model: Model, buffers: Buffers | None, *, speaks: Callable[[], bool]
    ) -> None:
        self.part, self._model, self._buffers, self._speaks = part, model, buffers, speaks
        self.views = 0

    def meet(self) -> None:
        """Wait for all ranks."""
        self.part.ask(MeanQuery(values={}, weight=0))

    def agree_on_last_round(self, gathered: int) -> bool:
        """Return whether any rank has steps that no round has had; all ranks call it."""
        return bool(self.part.ask(LastRoundQuery(values={"gathered": gathered}, weight=1)).means["gathered"])

    def end_last_round(self) -> None:
        """Wait until all workers have made the last round."""
        self.part.ask(LastRoundQuery(values={}, weight=0))

    def mean(self, values: Mapping[str, float], weight: float, epochs: int) -> dict[str, float]:
        """Return the means over all ranks after `epochs` epochs; all ranks get the same."""
        return dict(self.part.ask(MeanQuery(values=dict(values), weight=weight, epochs=epochs)).means)

    def copied(self, values: Mapping[str, Any], vector: Vector | None) -> dict[str, Any]:
        """Return the first server's values and copy its numbers into `vector` (collective)."""
        brought = dict(self.part.ask(BroadcastQuery(values=dict(values))).values)
        for start in range(0, 0 if vector is None else vector.size, _PIECE):
            assert vector is not None  # the range is empty without it
            piece = vector[start : start + _PIECE]
            query = BroadcastQuery(values={}, numbers=piece) if self._speaks() else BroadcastQuery(values={})
            np.copyto(piece, self.part.ask(query).numbers)
        return brought

    def tell_start(self) -> None:
        """Send this rank's statistics before its first update."""
        if self._buffers is not None and self._buffers.layers:
            self._bring(self._buffers, weight=0, start=True)

    def bring_buffers(self, weight: float, epoch: int = 0, *, instead: bool = False) -> None:
        """Send this rank's buffers to be averaged; with `instead` they replace the average for all ranks."""
        if self._buffers is not None and weight:
            self._bring(self._buffers, weight=weight, epoch=epoch, instead=instead)

    def take_buffers(self) -> None:
        """Load the averaged buffers into the model, to train on from them."""
        if self._buffers is not None:
            buffers, counts = self._averages(takes=True)
            self._write(self._buffers, buffers)
            self._buffers.mark(counts)

    def counted_from_here(self) -> BufferCounts | None:
        """Return the model's buffers as they are now and their update counts, and count from here."""
        if self._buffers is None:
            return None
        self._buffers.gather()
        self._buffers.mark()
        return self._buffers.flat.vector, self._buffers.moves().total

    def state(self) -> State:
        """Return what this rank's next contribution depends on besides its buffers."""
        since = np.zeros(0) if self._buffers is None else self._buffers.moves().since
        return {"moves": since.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        require("the buffers", state, moves=self.state()["moves"])
        if self._buffers is not None:
            self._buffers.set_since(state["moves"])

    def take_center(self) -> Vector:
        """Load the current centre into the model; return a copy of its parameters."""
        self.part.look(self._model.parameters.vector)
        center = self._model.parameters.vector.copy()
        self._model.publish()
        self.take_buffers()
        return center

    @contextmanager
    def lent(self, center: Vector) -> Iterator[None]:
        """Put these parameters and the averaged buffers into the model for a `with` block.

        A worker that begins to serve meanwhile has the centre in its model from then on.
        """
        own, part = self._model.parameters.vector.copy(), self.part
        try:
            self._swap(center)
            with self._lent_buffers():
                yield
        finally:
            if self.part is part:
                self._swap(own)

    def _swap(self, vector: Vector) -> None:
        np.copyto(self._model.parameters.vector, vector)
        self._model.publish()

    @contextmanager
    def _lent_buffers(self) -> Iterator[None]:
        """Put the averaged buffers into the model for a `with` block."""
        if self._buffers is None:
            yield
            return
        self._buffers.gather()
        own, since, part = self._buffers.flat.vector.copy(), self._buffers.moves().since, self.part
        self._write(self._buffers, self._averages()[0])
        try:
            yield
        finally:
            if self.part is part:
                self._write(self._buffers, own)
                self._buffers.set_since(since)

    def _bring(self, buffers: Buffers, **facts: Any) -> None:
        buffers.gather()
        numbers = np.concatenate([buffers.flat.vector, buffers.moves().wired()])
        self.part.ask(AverageQuery(views=self.views, numbers=numbers, **facts))
        buffers.mark()

    def _averages(self, *, takes: bool = False) -> tuple[Vector, npt.NDArray[np.float64]]:
        """Return the averaged buffers and the update counts of their statistics."""
        assert self._buffers is not None  # callers check it
        numbers = self.part.ask(AverageQuery(views=self.views, takes=takes)).numbers
        size = self._buffers.flat.vector.size
        return numbers[:size], numbers[size:].copy().view(np.float64)

    def _write(self, buffers: Buffers, vector: Vector) -> None:
        np.copyto(buffers.flat.vector, vector)
        buffers.scatter()
