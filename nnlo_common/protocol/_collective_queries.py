"""Collective queries: means over ranks, means over workers, broadcasts from the first server, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    """Weighted means of named numbers over all ranks; the answer waits until every rank has sent its part.

    Parts are added in rank order, so the result is the same to the bit on every run.

    Args:
        members: the ranks that take part.
        kind: the type of query to answer.
    """

    def __init__(self, members: Iterable[int], kind: type[MeanQuery] = MeanQuery) -> None:
        self.handlers: Handlers = {kind: self.ask}
        self._members = set(members)
        self._parts: dict[int, MeanQuery] = {}

    @property
    def waiting(self) -> Mapping[int, MeanQuery]:
        """The parts received so far, by rank."""
        return self._parts

    def ask(self, rank: int, query: MeanQuery) -> Answers:
        """Take one rank's part."""
        for other, part in self._parts.items():
            # A rank without samples may not know the names it would have measured: it sends none.
            here, there = sorted(query.values), sorted(part.values)
            if here and there and here != there:
                raise ConfigurationError(
                    f"rank {rank} asked for the means of {here}, but rank {other} asked for the means of "
                    f"{there}; use the same names on all ranks"
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
    """Weighted means of the workers' values at each epoch's end; the answer waits for all workers.

    A worker with fewer epochs announces its end, so the others do not wait for it. Servers send no values, so
    a long validation on a server does not delay the workers.

    Args:
        workers: the ranks that send values.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.handlers: Handlers = {EpochMeanQuery: self.ask}
        self._workers = frozenset(workers)
        self._expected = set(self._workers)
        self._parts: dict[int, dict[int, EpochMeanQuery]] = {}
        self._means: dict[int, MeanAnswer] = {}
        self._waiting: dict[int, int] = {}  # the epoch that each rank waits for

    def ask(self, rank: int, query: EpochMeanQuery) -> Answers:
        """Take the part if the rank is a worker; answer once all workers have sent theirs."""
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
    """Broadcasts from the source to all ranks; the answer waits until every rank has asked.

    Args:
        members: the ranks that take part.
        source: the rank that sends the values.
    """

    def __init__(self, members: Iterable[int], source: int) -> None:
        self.handlers: Handlers = {BroadcastQuery: self.ask}
        self._members, self._source = set(members), source
        self._asked: dict[int, BroadcastQuery] = {}

    def ask(self, rank: int, query: BroadcastQuery) -> Answers:
        """Take one rank's query; ignore values from any rank but the source."""
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
    """Weighted means of the named numbers that workers note per epoch; no query waits for another rank."""

    def __init__(self) -> None:
        self.handlers: Handlers = {NoteQuery: self.ask}
        self._notes: dict[int, dict[int, NoteQuery]] = {}  # by rank and epoch

    def ask(self, rank: int, query: NoteQuery) -> Answers:
        """Store the note unless it is empty, and return the means up to that epoch.

        Each worker counts with its last note; notes of later epochs are left out.
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
        """Keep the worker's notes."""
        return []

    def _by_rank(self) -> list[dict[int, NoteQuery]]:
        return [self._notes[rank] for rank in sorted(self._notes)]

    def _forget_before(self, epoch: int) -> None:
        """Drop notes that no later query can ask for."""
        for by_epoch in self._by_rank():
            last = _last(by_epoch, epoch)
            for old in [one for one in by_epoch if last is not None and one < last]:
                del by_epoch[old]


def _last(by_epoch: Mapping[int, object], epoch: int) -> int | None:
    return max((one for one in by_epoch if one <= epoch), default=None)


def _weighted(parts: Sequence[MeanQuery | EpochMeanQuery]) -> MeanAnswer:
    """Return the means, and the sum of the weights."""
    # A mean over no samples may be NaN, and NaN times its weight of 0 is NaN: skip it.
    counted = [part for part in parts if part.weight]
    weight = sum(part.weight for part in counted)
    names = sorted({name for part in parts for name in part.values})
    sums = {name: sum(part.weight * part.values.get(name, 0.0) for part in counted) for name in names}
    means = {name: total / weight if weight else float("nan") for name, total in sums.items()}
    return MeanAnswer(means=means, weight=weight)
