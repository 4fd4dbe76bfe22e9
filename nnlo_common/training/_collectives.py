"""Collectives of a training beside its exchanges: the whole model, means, and copies.

All of it comes from the query service of the first server, but for the centre's parameters, which lie on
all servers.
Running statistics and the like never go through an optimizer: each worker brings its own at the end of its
epoch, with how often it has moved them, and whoever wants those of the centre gets what all come to together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol import QUERY_NUMBERS
from nnlo_common.protocol._query_messages import AverageQuery, BroadcastQuery, LastRoundQuery, MeanQuery
from nnlo_common.training._model_vectors import Buffers, Model
from nnlo_common.training._roles import TeamPart

__all__ = ["Collectives"]

# As many numbers as fit into one question, with a few words before them.
_PIECE = QUERY_NUMBERS - 64


class Collectives:
    """What one rank brings to the others, and gets from them.

    Attributes:
        part: what this rank asks by.
        views: how often all have seen the centre together; what is brought from then on is not of it.

    Args:
        part: what this rank asks by.
        model: this rank's.
        buffers: the model's, if it has any.
        speaks: whether it is this rank's copies that all get.
    """

    def __init__(self, part: TeamPart, model: Model, buffers: Buffers | None, *, speaks: bool) -> None:
        self.part, self._model, self._buffers, self._speaks = part, model, buffers, speaks
        self.views = 0

    def meet(self) -> None:
        """Wait for all ranks."""
        self.part.ask(MeanQuery(values={}, weight=0))

    def agree_on_last_round(self, gathered: int) -> bool:
        """Return whether any rank has steps that no round has had; all ranks call it."""
        return bool(self.part.ask(LastRoundQuery(values={"gathered": gathered}, weight=1)).means["gathered"])

    def end_last_round(self) -> None:
        """Wait until all workers have made it."""
        self.part.ask(LastRoundQuery(values={}, weight=0))

    def mean(self, values: Mapping[str, float], weight: float, epochs: int) -> dict[str, float]:
        """Return the means over all ranks after so many epochs; each gets the same."""
        return dict(self.part.ask(MeanQuery(values=dict(values), weight=weight, epochs=epochs)).means)

    def copied(self, values: Mapping[str, Any], vector: Vector | None) -> dict[str, Any]:
        """Return the first server's values, and let `vector` hold its numbers; all ranks call it alike."""
        brought = dict(self.part.ask(BroadcastQuery(values=dict(values))).values)
        for start in range(0, 0 if vector is None else vector.size, _PIECE):
            assert vector is not None  # or there would be no piece
            piece = vector[start : start + _PIECE]
            query = BroadcastQuery(values={}, numbers=piece) if self._speaks else BroadcastQuery(values={})
            np.copyto(piece, self.part.ask(query).numbers)
        return brought

    def tell_start(self) -> None:
        """Say what this rank's statistics are before it moves them."""
        if self._buffers is not None and self._buffers.layers:
            self._bring(self._buffers, weight=0, start=True)

    def bring_buffers(self, weight: float, epoch: int = 0, *, instead: bool = False) -> None:
        """Let this rank's buffers count in those of all, or be what all get instead."""
        if self._buffers is not None and weight:
            self._bring(self._buffers, weight=weight, epoch=epoch, instead=instead)

    def take_buffers(self) -> None:
        """Give the model the buffers of all, to go on from them."""
        if self._buffers is not None:
            buffers, counts = self._averages(takes=True)
            self._write(self._buffers, buffers)
            self._buffers.mark(counts)

    def state(self) -> State:
        """Return what this rank's next contribution depends on beside its buffers."""
        since = np.zeros(0) if self._buffers is None else self._buffers.moves().since
        return {"moves": since.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was returned."""
        require("the buffers", state, moves=self.state()["moves"])
        if self._buffers is not None:
            self._buffers.set_since(state["moves"])

    def take_center(self) -> Vector:
        """Give the model the centre as it is now; return a copy of its parameters."""
        self.part.look(self._model.parameters.vector)
        center = self._model.parameters.vector.copy()
        self._model.publish()
        self.take_buffers()
        return center

    @contextmanager
    def lent(self, center: Vector) -> Iterator[None]:
        """Let the model have these parameters, and the buffers of all, for the length of a block."""
        own = self._model.parameters.vector.copy()
        try:
            self._swap(center)
            with self._lent_buffers():
                yield
        finally:
            self._swap(own)

    def _swap(self, vector: Vector) -> None:
        np.copyto(self._model.parameters.vector, vector)
        self._model.publish()

    @contextmanager
    def _lent_buffers(self) -> Iterator[None]:
        """Let the model have the buffers of all for the length of a block."""
        if self._buffers is None:
            yield
            return
        self._buffers.gather()
        own, since = self._buffers.flat.vector.copy(), self._buffers.moves().since
        self._write(self._buffers, self._averages()[0])
        try:
            yield
        finally:
            self._write(self._buffers, own)
            self._buffers.set_since(since)

    def _bring(self, buffers: Buffers, **facts: Any) -> None:
        buffers.gather()
        numbers = np.concatenate([buffers.flat.vector, buffers.moves().wired()])
        self.part.ask(AverageQuery(views=self.views, numbers=numbers, **facts))
        buffers.mark()

    def _averages(self, *, takes: bool = False) -> tuple[Vector, npt.NDArray[np.float64]]:
        """Return the buffers of all, and how often layers have moved their statistics."""
        assert self._buffers is not None  # or there would be no averages
        numbers = self.part.ask(AverageQuery(views=self.views, takes=takes)).numbers
        size = self._buffers.flat.vector.size
        return numbers[:size], numbers[size:].copy().view(np.float64)

    def _write(self, buffers: Buffers, vector: Vector) -> None:
        np.copyto(buffers.flat.vector, vector)
        buffers.scatter()
