"""Averages of vectors that workers send, such as the running statistics of their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._moving import Moves, Moving, MovingAverages, weighted
from nnlo_common.protocol._queries import Answers, Handlers
from nnlo_common.protocol._query_messages import AverageAnswer, AverageQuery

__all__ = ["Averages"]


class Averages:
    """Average of the vectors that workers send; no query waits for another rank.

    Statistics of layers that count their updates are combined as if one rank had seen all batches
    (`MovingAverages`). Everything else is the weighted mean of each worker's latest vector.

    `views` counts how often a rank has viewed the centre together with all others. After a view, a fast
    worker may send its next vector before a slow one has asked for the average; the slow one gets the
    earlier average.

    Args:
        start: the average before the first vector arrives.
        layers: the parts of it that are statistics which layers move.
        totals: earlier updates of each of these layers.
    """

    def __init__(
        self,
        start: Vector,
        layers: Sequence[Moving] = (),
        totals: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self.handlers: Handlers = {AverageQuery: self.ask}
        self._start: Vector = start.copy()
        self._layers = len(layers)
        self._moving = MovingAverages(start, layers, totals)
        self._last: dict[int, tuple[float, Vector]] = {}  # each rank's latest weight and vector
        self._begun: dict[int, Vector] = {}  # the vector that each rank continued from
        # The answer for ranks with fewer views than the latest sender.
        self._views, self._earlier = 0, self._start
        self._answer: Vector | None = None  # cached until a vector arrives

    def ask(self, rank: int, query: AverageQuery) -> Answers:
        """Take the query's vector, if it has one, and return the average."""
        if query.numbers.size:
            vector = query.numbers[: self._start.size].copy()
            if query.start:
                self._begun[rank] = vector
            else:
                self._take(rank, query, vector)
        answer = self._current() if query.views >= self._views else self._earlier
        if query.takes:
            self._begun[rank] = answer[: self._start.size]
        return [(rank, AverageAnswer(numbers=answer))]

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Keep the vector of a worker that left; of one that died, keep only the updates it has sent."""
        if lost:
            self._begun.pop(rank, None)
        if lost and rank in self._last:
            if len(self._last) == 1:  # no other vector to average: keep this average until one arrives
                self._start = self._current()[: self._start.size].copy()
            del self._last[rank]
            self._answer = None
        return []

    def state(self) -> State:
        """Return the averages and their parts; call it when all ranks have equally many views."""
        return {
            "value": self._current()[: self._start.size].copy(),
            "last": {str(rank): [weight, vector] for rank, (weight, vector) in self._last.items()},
            "begun": {str(rank): vector for rank, vector in self._begun.items()} if self._layers else {},
            "moving": self._moving.state(),
        }

    def load(self, state: Mapping[str, Any], *, others: bool = False) -> None:
        """Restore what `state` returned.

        Args:
            state: the state.
            others: resume with other workers: keep only the averages, not each worker's part.
        """
        require("the averages", state, value=self._start, last=Mapping, begun=Mapping, moving=Mapping)
        self._start, self._answer = state["value"].copy(), None
        self._moving.load(state["moving"])
        last, begun = ({} if others else state[name] for name in ("last", "begun"))
        self._last = {int(rank): (weight, vector) for rank, (weight, vector) in last.items()}
        self._begun = {int(rank): vector for rank, vector in begun.items()}
        if others:
            self._moving.replace(self._start, self._moving.result()[1])

    def restart(self, start: Vector, totals: npt.NDArray[np.float64]) -> None:
        """Begin anew.

        Args:
            start: the average before the first vector arrives.
            totals: earlier updates of each layer.
        """
        self._start, self._answer = start.copy(), None
        self._earlier = self._start
        self._last.clear()
        self._begun.clear()
        self._moving.replace(start, totals)

    def _take(self, rank: int, query: AverageQuery, vector: Vector) -> None:
        if query.views > self._views:
            self._views, self._earlier = query.views, self._current()
        wired = query.numbers[self._start.size :]
        moves = Moves.unwired(wired) if wired.size else Moves.none(self._layers)
        if query.instead:  # replaces all other vectors
            self._last.clear()
            self._moving.replace(vector, moves.total)
        elif self._layers:
            start = self._begun.get(rank, self._start)
            self._moving.add(rank, query.epoch, query.weight, (vector, moves), start)
        self._last[rank] = query.weight, vector
        self._begun[rank] = vector
        self._answer = None

    def _current(self) -> Vector:
        """Return the averages, followed by the update counts."""
        if self._answer is None:
            answer, last = self._start.copy(), [self._last[rank] for rank in sorted(self._last)]
            if last:
                answer[:] = weighted(last)
            values, totals = self._moving.result()
            with np.errstate(over="ignore"):
                answer[self._moving.places] = values
            self._answer = np.concatenate([answer, totals.view(np.float32)]) if self._layers else answer
        return self._answer
