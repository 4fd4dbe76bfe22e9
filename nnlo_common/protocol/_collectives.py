"""Collective queries: means over all ranks, copies, notes, and what a checkpoint needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.protocol._queries import Answer, Query

__all__ = ["Copies", "EpochMeans", "Means", "Notes", "Told"]


class Means:
    """Weighted means of named numbers over all ranks: everybody brings its part and waits for the others'.

    The parts are added in the order of the ranks, so that the result is the same to the bit on every run.

    Args:
        members: the ranks that take part.
    """

    def __init__(self, members: Iterable[int]) -> None:
        self._members = set(members)
        self._parts: dict[int, Mapping[str, Any]] = {}

    @property
    def waiting(self) -> Mapping[int, Mapping[str, Any]]:
        """What those have brought who wait for the others, by rank."""
        return self._parts

    def ask(self, question: Query) -> list[Answer]:
        """Take one rank's part."""
        content = question.content
        for rank, part in self._parts.items():
            # Who has no samples may not know the names of what it would have measured.
            here, there = sorted(content["values"]), sorted(part["values"])
            if here and there and here != there:
                raise ConfigurationError(
                    f"rank {question.rank} asked for the means of {here}, but rank {rank} for those of "
                    f"{there}; give the same names on all ranks"
                )
        self._parts[question.rank] = content
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:
        """Wait for `rank` no more; what it brought before it died does not count."""
        self._members.discard(rank)
        if lost:
            self._parts.pop(rank, None)
        return self._ready()

    def _ready(self) -> list[Answer]:
        if not self._parts or not self._members <= self._parts.keys():
            return []
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        weight, means = _weighted(parts)
        answers = [Answer(rank, {"means": means, "weight": weight}) for rank in sorted(self._parts)]
        self._parts = {}
        return answers


class EpochMeans:
    """Weighted means of what workers name at the end of each of their epochs; they wait for each other's.

    `epoch` counts the epochs of this training, from 0, and -1 says that no more will come: whoever ends
    earlier keeps nobody waiting. Servers only listen, so a long validation keeps no worker waiting either.

    Args:
        workers: who brings something.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._workers = frozenset(workers)
        self._expected = set(self._workers)
        self._parts: dict[int, dict[int, Mapping[str, Any]]] = {}
        self._means: dict[int, Mapping[str, float]] = {}
        self._waiting: dict[int, int] = {}  # for which epoch each rank waits

    def ask(self, question: Query) -> list[Answer]:
        """Take one worker's part, if it is one, and answer when all have brought theirs."""
        rank, epoch = question.rank, question.content["epoch"]
        if epoch < 0:
            return [Answer(rank, {"means": {}}), *self.gone(rank, lost=False)]
        if rank in self._workers:
            self._parts.setdefault(epoch, {})[rank] = question.content
        self._waiting[rank] = epoch
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:
        """Wait for `rank` no more; what it brought before it died does not count."""
        self._expected.discard(rank)
        if lost:
            self._waiting.pop(rank, None)
            for parts in self._parts.values():
                parts.pop(rank, None)
        return self._ready()

    def _ready(self) -> list[Answer]:
        for epoch in sorted(set(self._waiting.values()) - self._means.keys()):
            parts = self._parts.get(epoch, {})
            if self._expected <= parts.keys():
                self._means[epoch] = _weighted([parts[rank] for rank in sorted(parts)])[1]
                self._parts.pop(epoch, None)
        ready = [rank for rank, epoch in sorted(self._waiting.items()) if epoch in self._means]
        return [Answer(rank, {"means": self._means[self._waiting.pop(rank)]}) for rank in ready]


class Copies:
    """What the first server brings, all get: everybody asks, and waits for the others.

    Args:
        members: the ranks that take part.
        source: the one who brings it.
    """

    def __init__(self, members: Iterable[int], source: int) -> None:
        self._members, self._source = set(members), source
        self._asked: dict[int, Query] = {}

    def ask(self, question: Query) -> list[Answer]:
        """Take one rank's question; what others than the source bring does not count."""
        self._asked[question.rank] = question
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:
        """Wait for `rank` no more."""
        self._members.discard(rank)
        if lost:
            self._asked.pop(rank, None)
        return self._ready()

    def _ready(self) -> list[Answer]:
        if self._source not in self._asked or not self._members <= self._asked.keys():
            return []
        brought = self._asked[self._source]
        values = {"values": brought.content["values"]}
        answers = [Answer(rank, values, brought.numbers) for rank in sorted(self._asked)]
        self._asked = {}
        return answers


class Told:
    """Questions that are answered at once, by whoever has taken that on.

    Attributes:
        call: returns the answer to a rank's question.
    """

    def __init__(self) -> None:
        self.call: Callable[[int, Mapping[str, Any]], Mapping[str, Any]] | None = None

    def ask(self, question: Query) -> list[Answer]:
        """Answer; with nothing where nobody has taken it on."""
        content = {} if self.call is None else self.call(question.rank, question.content)
        return [Answer(question.rank, content)]

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:  # noqa: ARG002 - a counter's
        """Nobody waits."""
        return []


class Notes:
    """The weighted means of named numbers that workers have noted for an epoch; nobody waits for anybody."""

    def __init__(self) -> None:
        self._notes: dict[int, dict[int, Mapping[str, Any]]] = {}  # by rank and epoch

    def ask(self, question: Query) -> list[Answer]:
        """Take a note, if it holds anything, and return the means of all up to that epoch.

        Of each worker its last note counts; what one notes that is an epoch ahead does not count yet.
        """
        epoch = question.content["epoch"]
        if question.content["values"]:
            self._notes.setdefault(question.rank, {})[epoch] = question.content
        else:
            self._forget_before(epoch)
        notes = [
            by_epoch[last] for by_epoch in self._by_rank() if (last := _last(by_epoch, epoch)) is not None
        ]
        means = {}
        for name in sorted({name for note in notes for name in note["values"]}):
            having = [note for note in notes if name in note["values"]]
            total = sum(note["weight"] for note in having)
            means[name] = sum(note["weight"] * note["values"][name] for note in having) / total
        return [Answer(question.rank, {"means": means})]

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:  # noqa: ARG002 - a counter's
        """Keep what a worker has noted."""
        return []

    def _by_rank(self) -> list[dict[int, Mapping[str, Any]]]:
        return [self._notes[rank] for rank in sorted(self._notes)]

    def _forget_before(self, epoch: int) -> None:
        """Keep no more than is asked for from now on."""
        for by_epoch in self._by_rank():
            last = _last(by_epoch, epoch)
            for old in [one for one in by_epoch if last is not None and one < last]:
                del by_epoch[old]


def _last(by_epoch: Mapping[int, object], epoch: int) -> int | None:
    return max((one for one in by_epoch if one <= epoch), default=None)


def _weighted(parts: list[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """Return the sum of the weights, and the means."""
    # A mean over no samples may be NaN, so it must not be multiplied with its weight of 0.
    counted = [part for part in parts if part["weight"]]
    weight = sum(part["weight"] for part in counted)
    names = sorted({name for part in parts for name in part["values"]})
    sums = {name: sum(part["weight"] * part["values"].get(name, 0.0) for part in counted) for name in names}
    return weight, {name: total / weight if weight else float("nan") for name, total in sums.items()}
