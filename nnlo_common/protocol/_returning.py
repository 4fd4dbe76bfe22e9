"""Queries when the query service has died: what each rank tells the one that takes over.

The ranks make collective queries in one order, so at most one of them was answered for some and not for
others. Whoever has the last answer brings it along; then nobody waits for a part that another rank will not
send again. What the dead service knew of leases, its workers know together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any, Protocol, runtime_checkable

from nnlo_common.base._limited_formats import content_of, message_of
from nnlo_common.data import Lease
from nnlo_common.data._ledger import Ranges
from nnlo_common.protocol._query_messages import (
    Answer,
    BroadcastAnswer,
    BroadcastQuery,
    EpochMeanQuery,
    GiveBackQuery,
    GoodbyeQuery,
    HeldLeasesAnswer,
    LastRoundQuery,
    LeaseAnswer,
    LeaseQuery,
    LeaveQuery,
    LedgerQuery,
    MeanAnswer,
    MeanQuery,
    Query,
    ReturnQuery,
    SampledData,
)

__all__ = ["Record", "Returned", "Returns"]

#: Queries that are answered once every rank has asked.
_COLLECTIVE = (MeanQuery, LastRoundQuery, BroadcastQuery)
#: Epochs whose used leases a worker tells: a lease is rarely of an earlier one.
_EPOCHS_TOLD = 2


@runtime_checkable
class Returned(Protocol):
    """A handler of queries that takes up what a rank tells."""

    def returned(self, rank: int, told: ReturnQuery) -> None:
        """Take up what a rank tells after the death of the former query service."""


class _LeasesHad:
    """What one rank has had of a sampler's ledger.

    Args:
        data: what the sampler divides.
    """

    def __init__(self, data: SampledData) -> None:
        self._data, self._epoch = data, 0
        self._used: dict[int, Ranges] = {}
        self._held: list[Lease] = []

    def take(self, query: LedgerQuery[Any], answer: Answer) -> None:
        """Note an answered query."""
        if isinstance(query, LeaseQuery) and isinstance(answer, LeaseAnswer):
            here = query.epoch == self._epoch
            self._use(self._size - query.unused if here else 0, keeps=query.unused > 0)
            self._epoch = query.epoch
            self._used = {one: had for one, had in self._used.items() if one > self._epoch - _EPOCHS_TOLD}
            self._held += [] if answer.lease is None else [answer.lease]
        elif isinstance(query, GiveBackQuery):
            self._use(self._size - query.left, keeps=False)
        elif isinstance(answer, HeldLeasesAnswer):
            self._held = list(answer.leases)

    def told(self) -> dict[str, Any]:
        """Return it for a `ReturnQuery`."""
        used = {str(epoch): [list(one) for one in had] for epoch, had in sorted(self._used.items())}
        held = [list(astuple(lease)) for lease in self._held]
        return {"data": list(astuple(self._data)), "epoch": self._epoch, "used": used, "held": held}

    @property
    def _size(self) -> int:
        return sum(lease.size for lease in self._held)

    def _use(self, used: int, *, keeps: bool) -> None:
        held, self._held = self._held, []
        for lease in held:
            middle = min(lease.start + used, lease.stop)
            used -= middle - lease.start
            self._used.setdefault(lease.epoch, Ranges()).put(lease.start, middle)
            if keeps and middle < lease.stop:
                self._held.append(Lease(lease.epoch, middle, lease.stop))


class Record:
    """What a rank's query client tells a service that takes over: the answers it has had.

    Attributes:
        saves: how often the rank has saved together with all ranks between two epochs.
    """

    def __init__(self) -> None:
        self.saves = 0
        self._collective = 0  # collective queries answered
        self._last: Answer | None = None  # the last of their answers
        self._means: dict[int, Answer] = {}  # by epoch
        self._ended = self._left = False
        self._leases: dict[str, _LeasesHad] = {}

    def take(self, query: Query[Any], answer: Answer) -> None:
        """Note an answered query."""
        if isinstance(query, _COLLECTIVE):
            self._collective += 1
            self._last = answer
        elif isinstance(query, EpochMeanQuery):
            if query.epoch is None:
                self._ended = True
            else:
                self._means[query.epoch] = answer
        elif isinstance(query, LedgerQuery):
            self._leases.setdefault(query.data.sampler, _LeasesHad(query.data)).take(query, answer)
        self._left |= isinstance(query, LeaveQuery | GoodbyeQuery)

    def told(self) -> ReturnQuery:
        """Return what to tell."""
        numbers = {"numbers": self._last.numbers} if isinstance(self._last, BroadcastAnswer) else {}
        return ReturnQuery(
            answered=self._collective,
            last=None if self._last is None else content_of(self._last, beside=["numbers"]),
            means={str(epoch): content_of(answer) for epoch, answer in self._means.items()},
            ended=self._ended,
            left=self._left,
            leases={name: had.told() for name, had in self._leases.items()},
            saves=self.saves,
            **numbers,
        )


class Returns:
    """What all ranks tell the service that takes over; until then it answers nothing.

    Args:
        ranks: those that will tell.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.awaited = set(ranks)
        self.told: dict[int, ReturnQuery] = {}
        self._missed: dict[int, Answer] = {}  # by rank: the answer that others have had

    def take(self, rank: int, told: ReturnQuery) -> None:
        """Note what a rank tells."""
        self.told[rank] = told
        self.forget(rank)

    def forget(self, rank: int) -> None:
        """Wait no more for a rank; the answer that some have had goes to those that have not."""
        self.awaited.discard(rank)
        newest = max(self.told.values(), key=lambda one: one.answered, default=None)
        if self.awaited or newest is None or newest.last is None:
            return
        kinds = (MeanAnswer, BroadcastAnswer)
        answer = message_of(kinds, dict(newest.last), "an earlier answer", {"numbers": newest.numbers})
        for other, one in self.told.items():
            if one.answered < newest.answered and not one.left:
                self._missed[other] = answer

    def missed(self, rank: int, query: Query[Any]) -> Answer | None:
        """Return the answer that this rank waits for and others have had; None: there is none."""
        return self._missed.pop(rank, None) if isinstance(query, _COLLECTIVE) else None


def means_told(told: ReturnQuery) -> dict[int, MeanAnswer]:
    """Return the means of epochs that a rank has had."""
    return {
        int(epoch): message_of((MeanAnswer,), dict(means), "earlier means")
        for epoch, means in told.means.items()
    }


def leases_told(
    told: ReturnQuery, rank: int
) -> Iterable[tuple[SampledData, int, Mapping[int, list[tuple[int, int]]], list[Lease]]]:
    """Give for each sampler its data, the rank's epoch, the positions it has used, and its leases."""
    for name, one in told.leases.items():
        data = SampledData(*one["data"])
        used = {int(epoch): [(start, stop) for start, stop in had] for epoch, had in one["used"].items()}
        held = [Lease(*lease) for lease in one["held"]]
        assert data.sampler == name, f"rank {rank} tells of {data.sampler!r} as {name!r}"
        yield data, int(one["epoch"]), used, held
