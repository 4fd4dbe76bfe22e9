"""Moving and cumulative averages of batches, combined as if one rank had seen the batches of all.

A layer that normalises moves its statistics by each batch it is given, m <- rho m + (1 - rho) x, or keeps
the mean of all batches so far. W workers make 1/W of these updates each, so the mean of what they have got
would be as far behind as if W times fewer batches had been seen. But an update does two things, which can be
told apart: it lets what was there before decay, and it adds something new. From m0, with which a worker
began, n updates make m = d m0 + (1 - d) b, with d = rho^n, or t/(t+n) for a mean over t batches before. So
b = (m - d m0) / (1 - d) is the mean of what was new. Together the workers have made all updates: their decays
are multiplied, or all their batches counted, and the new is the mean of all b, weighted by updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State, require

__all__ = ["Moves", "Moving", "MovingAverages", "weighted"]

_Numbers = npt.NDArray[np.float64]

# A variance that seems to be negative by more of what it was than rounding explains: the count is wrong.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Moving:
    """Where the statistics of one layer lie, which are moved together.

    Attributes:
        mean: the part of the vector that is the mean.
        variance: the part of the vector that is the variance; never negative.
    """

    mean: slice
    variance: slice


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """How often the statistics of each layer have been moved.

    Attributes:
        since: updates since this rank last brought or took statistics; nan: not known.
        decay: what one update leaves of what was there before; nan: the mean of all batches is kept.
        total: updates in all, where the layer counts them; else 0.
    """

    since: _Numbers
    decay: _Numbers
    total: _Numbers

    @classmethod
    def none(cls, layers: int) -> Moves:
        """Return that nothing has been moved."""
        return cls(np.zeros(layers), np.ones(layers), np.zeros(layers))

    @classmethod
    def unwired(cls, wired: Vector) -> Moves:
        """Return what was `wired`."""
        return cls(*wired.copy().view(np.float64).reshape(3, -1))

    def wired(self) -> Vector:
        """Return it as what only looks like float32."""
        return np.concatenate([self.since, self.decay, self.total]).view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Brought:
    """What a rank has brought to a round: of each layer the updates and the decay, and the statistics.

    A decay that is not known is nan.
    """

    weight: float
    since: _Numbers
    decay: _Numbers
    cumulative: npt.NDArray[np.bool_]
    vector: Vector
    start: Vector


class MovingAverages:
    """What the statistics would be if one rank had seen all batches.

    What ranks bring is combined in rounds, in which each counts once. A round begins with what came of those
    before, and its result does not depend on the order of arrival. Where the updates of a layer are not
    known, or what was brought cannot come of them, its statistics are the weighted mean of a round.

    Args:
        start: the statistics and whatever else lies in their vector, before anybody has brought anything.
        layers: where they lie.
        totals: how many updates each layer has had before.
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
        """Take what a rank has made, in an epoch, of what it began with."""
        if rank in self._round or epoch > self._epoch:
            self._close()
        vector, moves = brought
        vector, start = vector[self.places], start[self.places]
        decay = self._decay(moves, vector, start)
        self._round[rank] = _Brought(weight, moves.since, decay, np.isnan(moves.decay), vector, start)
        self._epoch = max(epoch, self._epoch)

    def replace(self, vector: Vector, totals: _Numbers) -> None:
        """Forget what ranks have brought: these are the statistics."""
        self._round.clear()
        self._values, self._totals = vector[self.places].astype(np.float64), np.array(totals)

    def result(self) -> tuple[_Numbers, _Numbers]:
        """Return what the statistics are, and how many updates have been made."""
        parts = [self._round[rank] for rank in sorted(self._round)]
        if not parts:
            return self._values, self._totals
        with np.errstate(all="ignore"):  # a training that has diverged brings numbers that are none
            return self._combined(parts)

    def state(self) -> State:
        """Return everything that the next result depends on."""
        parts = {
            str(rank): [part.weight, part.since, part.decay, part.cumulative, part.vector, part.start]
            for rank, part in self._round.items()
        }
        totals = self._totals.copy()
        return {"values": self._values.copy(), "totals": totals, "epoch": self._epoch, "round": parts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` returned."""
        require("moving averages", state, values=self._values, totals=self._totals, epoch=int, round=Mapping)
        self._values, self._totals = state["values"].copy(), state["totals"].copy()
        self._epoch = state["epoch"]
        self._round = {int(rank): _Brought(*part) for rank, part in state["round"].items()}

    def _close(self) -> None:
        self._values, self._totals = self.result()
        self._round = {}

    def _decay(self, moves: Moves, vector: Vector, start: Vector) -> _Numbers:
        """Return what is left, in each layer, of what a rank began with; nan where that is not known."""
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
        # Updates that leave everything as it is say nothing new.
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
        if len(parts) == 1:  # to the bit, where that one began with what all had
            values = np.where(self._values == parts[0].start, parts[0].vector, values)
        return values, self._totals + np.where(since > 0, since, 0.0).sum(axis=0)

    def _new(self, part: _Brought) -> _Numbers:
        """Return the mean of what was new."""
        decay = part.decay[self._owner]
        new: _Numbers = (part.vector - decay * part.start) / (1 - decay)
        return np.maximum(new, 0, out=new, where=self._variances)


def weighted(parts: Sequence[tuple[float, Vector]]) -> _Numbers:
    """Return the weighted mean, in float64, so that the mean of equal numbers is that number."""
    total = sum(weight for weight, _ in parts)
    mean = np.full(parts[0][1].size, -0.0)  # to which -0 can be added and stays what it is
    for weight, vector in parts:
        mean += weight / total * vector.astype(np.float64)
    return mean
