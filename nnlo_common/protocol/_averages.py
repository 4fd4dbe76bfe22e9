"""Averages of vectors that workers send, such as the running statistics of their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._queries import Answers, Handlers
from nnlo_common.protocol._query_messages import AverageAnswer, AverageQuery

__all__ = ["Averages", "Moves", "Moving", "MovingAverages", "weighted"]

# -- moving and cumulative averages of batches, combined as if one rank had seen all batches -----------
# A normalising layer updates its statistics with each batch, m <- rho m + (1 - rho) x, or keeps the mean
# of all batches so far. Each of W workers makes 1/W of the updates, so a plain mean of their statistics
# would lag as if only 1/W of the batches had been seen. But an update has two separable parts: the old
# value decays, and a new one is added. Starting at m0, n updates give m = d m0 + (1 - d) b, with d =
# rho^n, or t/(t+n) for a mean over t earlier batches. So b = (m - d m0) / (1 - d) is the mean of the new
# part. To combine the workers, multiply their decays (or count all their batches), and average their b,
# weighted by updates.

_Numbers = npt.NDArray[np.float64]

# A variance's new part that is negative by more than this fraction of the old value proves a wrong count.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Moving:
    """Places of one layer's statistics in the vector; both move together.

    Attributes:
        mean: the place of the mean.
        variance: the place of the variance; never negative.
    """

    mean: slice
    variance: slice


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Update counts of each layer's statistics.

    Attributes:
        since: updates since this rank last sent or took statistics; nan: unknown.
        decay: the factor on the old value in one update; nan: the layer keeps the mean of all batches.
        total: all updates, if the layer counts them; else 0.
    """

    since: _Numbers
    decay: _Numbers
    total: _Numbers

    @classmethod
    def none(cls, layers: int) -> Moves:
        """Return the counts of `layers` layers without any update."""
        return cls(np.zeros(layers), np.ones(layers), np.zeros(layers))

    @classmethod
    def unwired(cls, wired: Vector) -> Moves:
        """Return the counts that `wired` packed."""
        return cls(*wired.copy().view(np.float64).reshape(3, -1))

    def wired(self) -> Vector:
        """Return the float64 counts reinterpreted as float32, to send them behind a vector."""
        return np.concatenate([self.since, self.decay, self.total]).view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Brought:
    """One rank's part of a round: its statistics, with the updates and the decay of each layer.

    An unknown decay is nan.
    """

    weight: float
    since: _Numbers
    decay: _Numbers
    cumulative: npt.NDArray[np.bool_]
    vector: Vector
    start: Vector


class MovingAverages:
    """Statistics as if one rank had seen all batches.

    Parts are combined in rounds; each rank counts once per round. A round starts from the result of the
    previous one, and its own result does not depend on the order of arrival. If the updates of a layer are
    unknown, or contradict its statistics, the layer gets the weighted mean of the round.

    Args:
        start: the whole vector that holds the statistics, before the first part arrives.
        layers: the places of the statistics.
        totals: earlier updates of each layer.
    """

    def __init__(self, start: Vector, layers: Sequence[Moving], totals: _Numbers | None = None) -> None:
        owner = np.full(start.size, -1)
        variances = np.zeros(start.size, np.bool_)
        for index, layer in enumerate(layers):
            owner[layer.mean] = owner[layer.variance] = index
            variances[layer.variance] = True
        self.places: npt.NDArray[np.int64] = np.flatnonzero(owner >= 0)
        self._owner, self._variances = owner[self.places], variances[self.places]
        self._values: _Numbers = start[self.places].astype(np.float64)
        self._totals: _Numbers = np.zeros(len(layers)) if totals is None else np.array(totals, np.float64)
        self._round: dict[int, _Brought] = {}
        self._epoch = 0  # of the round

    def add(self, rank: int, epoch: int, weight: float, brought: tuple[Vector, Moves], start: Vector) -> None:
        """Add a rank's statistics of an epoch, which it reached from `start`."""
        if rank in self._round or epoch > self._epoch:
            self._close()
        vector, moves = brought
        vector, start = vector[self.places], start[self.places]
        decay = self._decay(moves, vector, start)
        self._round[rank] = _Brought(weight, moves.since, decay, np.isnan(moves.decay), vector, start)
        self._epoch = max(epoch, self._epoch)

    def replace(self, vector: Vector, totals: _Numbers) -> None:
        """Drop the round and set the statistics."""
        self._round.clear()
        self._values, self._totals = vector[self.places].astype(np.float64), np.array(totals)

    def result(self) -> tuple[_Numbers, _Numbers]:
        """Return the statistics and the number of updates of each layer."""
        parts = [self._round[rank] for rank in sorted(self._round)]
        if not parts:
            return self._values, self._totals
        with np.errstate(all="ignore"):  # a diverged training sends nan and inf
            return self._combined(parts)

    def state(self) -> State:
        """Return all that the next result depends on."""
        parts = {
            str(rank): [part.weight, part.since, part.decay, part.cumulative, part.vector, part.start]
            for rank, part in self._round.items()
        }
        totals = self._totals.copy()
        return {"values": self._values.copy(), "totals": totals, "epoch": self._epoch, "round": parts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        require("moving averages", state, values=self._values, totals=self._totals, epoch=int, round=Mapping)
        self._values, self._totals = state["values"].copy(), state["totals"].copy()
        self._epoch = state["epoch"]
        self._round = {int(rank): _Brought(*part) for rank, part in state["round"].items()}

    def _close(self) -> None:
        self._values, self._totals = self.result()
        self._round = {}

    def _decay(self, moves: Moves, vector: Vector, start: Vector) -> _Numbers:
        """Return each layer's decay since the rank's start; nan where it is unknown."""
        since, before = moves.since, moves.total - moves.since
        with np.errstate(all="ignore"):
            counted = np.where(since > 0, before / moves.total, 1.0)
            decay = np.where(np.isnan(moves.decay), counted, moves.decay**since)
            least = decay[self._owner] * start - _ROUNDING * np.abs(start)
            odd = (since[self._owner] == 0) & (vector != start)
            odd |= self._variances & (vector < least)
        known = (since >= 0) & (decay >= 0) & (decay <= 1)
        known[self._owner[odd]] = False
        return np.where(known, decay, np.nan)

    def _combined(self, parts: Sequence[_Brought]) -> tuple[_Numbers, _Numbers]:
        decays = np.array([part.decay for part in parts])
        since = np.array([part.since for part in parts])
        cumulative = np.array([part.cumulative for part in parts])
        # Updates without decay add nothing new.
        counts = np.where(decays < 1, since, 0.0)
        total, owner = counts.sum(axis=0), self._owner
        left = np.where(cumulative[0], self._totals / (self._totals + total), decays.prod(axis=0))
        unknown = np.isnan(decays).any(axis=0) | (cumulative != cumulative[0]).any(axis=0)
        new = np.zeros(self._values.size)
        for part, count in zip(parts, counts, strict=True):
            new += np.where(count[owner] > 0, count[owner] * self._new(part), 0.0)
        values = left[owner] * self._values + (1 - left[owner]) * (new / total[owner])
        values = np.where(total[owner] > 0, values, self._values)
        if unknown.any():
            plain = weighted([(part.weight, part.vector) for part in parts])
            values = np.where(unknown[owner], plain, values)
        if len(parts) == 1:  # exact to the bit where the only part started from the common value
            values = np.where(self._values == parts[0].start, parts[0].vector, values)
        return values, self._totals + np.where(since > 0, since, 0.0).sum(axis=0)

    def _new(self, part: _Brought) -> _Numbers:
        """Return the mean of a part's new batches."""
        decay = part.decay[self._owner]
        new: _Numbers = (part.vector - decay * part.start) / (1 - decay)
        return np.maximum(new, 0, out=new, where=self._variances)


def weighted(parts: Sequence[tuple[float, Vector]]) -> _Numbers:
    """Return the weighted mean, in float64 so that the mean of equal numbers is that number."""
    total = sum(weight for weight, _ in parts)
    mean = np.full(parts[0][1].size, -0.0)  # -0.0 keeps the sign of zeros: 0.0 + -0.0 would be 0.0
    for weight, vector in parts:
        mean += weight / total * vector.astype(np.float64)
    return mean


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

    def renamed(self, state: State, names: Mapping[int, int]) -> State:
        """Return a `state` in which each rank's part is another's: {rank: other}."""
        parts = {
            one: {str(names.get(int(rank), int(rank))): part for rank, part in state[one].items()}
            for one in ("last", "begun")
        }
        moving = state["moving"]
        round_ = {str(names.get(int(rank), int(rank))): part for rank, part in moving["round"].items()}
        return {**state, **parts, "moving": {**moving, "round": round_}}

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
