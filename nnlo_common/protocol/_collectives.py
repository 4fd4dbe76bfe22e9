"""Collective queries: means over all ranks, notes, and what all get from the first server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.protocol._queries import Answers, Handlers
from nnlo_common.protocol._query_messages import (
    BroadcastAnswer,
    BroadcastQuery,
    EpochMeanQuery,
    MeanAnswer,
    MeanQuery,
    NoteQuery,
)

__all__ = ["Broadcasts", "EpochMeans", "Means", "Notes"]


class Means:
    """Weighted means of named numbers over all ranks: everybody brings its part and waits for the others'.

    The parts are added in the order of the ranks, so that the result is the same to the bit on every run.

    Args:
        members: the ranks that take part.
        kind: of the queries.
    """

    def __init__(self, members: Iterable[int], kind: type[MeanQuery] = MeanQuery) -> None:
        self.handlers: Handlers = {kind: self.ask}
        self._members = set(members)
        self._parts: dict[int, MeanQuery] = {}

    @property
    def waiting(self) -> Mapping[int, MeanQuery]:
        """What those have brought who wait for the others, by rank."""
        return self._parts

    def ask(self, rank: int, query: MeanQuery) -> Answers:
        """Take one rank's part."""
        for other, part in self._parts.items():
            # Who has no samples may not know the names of what it would have measured.
            here, there = sorted(query.values), sorted(part.values)
            if here and there and here != there:
                raise ConfigurationError(
                    f"rank {rank} asked for the means of {here}, but rank {other} for those of "
                    f"{there}; give the same names on all ranks"
                )
        self._parts[rank] = query
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Wait for `rank` no more; what it brought before it died does not count."""
        self._members.discard(rank)
        if lost:
            self._parts.pop(rank, None)
        return self._ready()

    def _ready(self) -> Answers:
        if not self._parts or not self._members <= self._parts.keys():
            return []
        ranks, answer = sorted(self._parts), _weighted([self._parts[rank] for rank in sorted(self._parts)])
        self._parts = {}
        return [(rank, answer) for rank in ranks]


class EpochMeans:
    """Weighted means of what workers name at the end of each of their epochs; they wait for each other's.

    Whoever ends earlier says so, and keeps nobody waiting. Servers only listen, so a long validation keeps no
    worker waiting either.

    Args:
        workers: who brings something.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.handlers: Handlers = {EpochMeanQuery: self.ask}
        self._workers = frozenset(workers)
        self._expected = set(self._workers)
        self._parts: dict[int, dict[int, EpochMeanQuery]] = {}
        self._means: dict[int, MeanAnswer] = {}
        self._waiting: dict[int, int] = {}  # for which epoch each rank waits

    def ask(self, rank: int, query: EpochMeanQuery) -> Answers:
        """Take one worker's part, if it is one, and answer when all have brought theirs."""
        if query.epoch is None:
            return [(rank, MeanAnswer(means={}, weight=0)), *self.gone(rank, lost=False)]
        if rank in self._workers:
            self._parts.setdefault(query.epoch, {})[rank] = query
        self._waiting[rank] = query.epoch
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Wait for `rank` no more; what it brought before it died does not count."""
        self._expected.discard(rank)
        if lost:
            self._waiting.pop(rank, None)
            for parts in self._parts.values():
                parts.pop(rank, None)
        return self._ready()

    def _ready(self) -> Answers:
        for epoch in sorted(set(self._waiting.values()) - self._means.keys()):
            parts = self._parts.get(epoch, {})
            if self._expected <= parts.keys():
                self._means[epoch] = _weighted([parts[rank] for rank in sorted(parts)])
                self._parts.pop(epoch, None)
        ready = [rank for rank, epoch in sorted(self._waiting.items()) if epoch in self._means]
        return [(rank, self._means[self._waiting.pop(rank)]) for rank in ready]


class Broadcasts:
    """What the first server brings, all get: everybody asks, and waits for the others.

    Args:
        members: the ranks that take part.
        source: the one who brings it.
    """

    def __init__(self, members: Iterable[int], source: int) -> None:
        self.handlers: Handlers = {BroadcastQuery: self.ask}
        self._members, self._source = set(members), source
        self._asked: dict[int, BroadcastQuery] = {}

    def ask(self, rank: int, query: BroadcastQuery) -> Answers:
        """Take one rank's query; what others than the source bring does not count."""
        self._asked[rank] = query
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Wait for `rank` no more."""
        self._members.discard(rank)
        if lost:
            self._asked.pop(rank, None)
        return self._ready()

    def _ready(self) -> Answers:
        if self._source not in self._asked or not self._members <= self._asked.keys():
            return []
        brought, ranks = self._asked[self._source], sorted(self._asked)
        self._asked = {}
        return [(rank, BroadcastAnswer(values=brought.values, numbers=brought.numbers)) for rank in ranks]


class Notes:
    """The weighted means of named numbers that workers have noted for an epoch; nobody waits for anybody."""

    def __init__(self) -> None:
        self.handlers: Handlers = {NoteQuery: self.ask}
        self._notes: dict[int, dict[int, NoteQuery]] = {}  # by rank and epoch

    def ask(self, rank: int, query: NoteQuery) -> Answers:
        """Take a note, if it holds anything, and return the means of all up to that epoch.

        Of each worker its last note counts; what one notes that is an epoch ahead does not count yet.
        """
        if query.values:
            self._notes.setdefault(rank, {})[query.epoch] = query
        else:
            self._forget_before(query.epoch)
        notes = [
            by_epoch[last]
            for by_epoch in self._by_rank()
            if (last := _last(by_epoch, query.epoch)) is not None
        ]
        means = {}
        for name in sorted({name for note in notes for name in note.values}):
            having = [note for note in notes if name in note.values]
            total = sum(note.weight for note in having)
            means[name] = sum(note.weight * note.values[name] for note in having) / total
        return [(rank, MeanAnswer(means=means, weight=sum(note.weight for note in notes)))]

    def gone(self, rank: int, *, lost: bool) -> Answers:  # noqa: ARG002 - a handler's
        """Keep what a worker has noted."""
        return []

    def _by_rank(self) -> list[dict[int, NoteQuery]]:
        return [self._notes[rank] for rank in sorted(self._notes)]

    def _forget_before(self, epoch: int) -> None:
        """Keep no more than is asked for from now on."""
        for by_epoch in self._by_rank():
            last = _last(by_epoch, epoch)
            for old in [one for one in by_epoch if last is not None and one < last]:
                del by_epoch[old]


class _Weighted(Protocol):
    @property
    def values(self) -> Mapping[str, float]: ...

    @property
    def weight(self) -> float: ...


def _last(by_epoch: Mapping[int, object], epoch: int) -> int | None:
    return max((one for one in by_epoch if one <= epoch), default=None)


def _weighted(parts: Sequence[_Weighted]) -> MeanAnswer:
    """Return the means, and the sum of the weights."""
    # A mean over no samples may be NaN, so it must not be multiplied with its weight of 0.
    counted = [part for part in parts if part.weight]
    weight = sum(part.weight for part in counted)
    names = sorted({name for part in parts for name in part.values})
    sums = {name: sum(part.weight * part.values.get(name, 0.0) for part in counted) for name in names}
    means = {name: total / weight if weight else float("nan") for name, total in sums.items()}
    return MeanAnswer(means=means, weight=weight)
