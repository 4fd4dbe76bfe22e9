"""Leases of an epoch's samples by query: the ledgers on the first server, and the client of each sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._state_tree import State
from nnlo_common.data import WAIT, Lease, Leases
from nnlo_common.protocol._queries import Answers, Handlers
from nnlo_common.protocol._query_messages import (
    Answer,
    AnswerT,
    GiveBackQuery,
    HeldLeasesAnswer,
    HeldLeasesQuery,
    LeaseAnswer,
    LeaseQuery,
    LedgerAnswer,
    LoadLedgerQuery,
    Query,
    ReadLedgerQuery,
    SampledData,
)

__all__ = ["LedgerClient", "Leasing"]


class Leasing:
    """Leases parts of epochs to workers, from one ledger for each sampler; see `nnlo_common.data.Leases`.

    Args:
        workers: the ranks that may ask.
        patient: have workers wait for what others may still leave behind.
    """

    def __init__(self, workers: Iterable[int], *, patient: bool) -> None:
        self._workers, self._patient, self._may_wait = set(workers), patient, patient
        self._ledgers: dict[str, Leases] = {}
        self.handlers: Handlers = {
            LeaseQuery: self._take,
            GiveBackQuery: self._give_back,
            HeldLeasesQuery: self._held,
            ReadLedgerQuery: self._read,
            LoadLedgerQuery: self._load,
        }

    def let_wait(self, *, may_wait: bool) -> Answers:
        """Say whether workers may wait: who waits cannot pause, so while all are to pause nobody does."""
        self._may_wait = may_wait and self._patient
        for ledger in self._ledgers.values():
            ledger.patient = self._may_wait
        return [answer for ledger in self._ledgers.values() for answer in _ready(ledger)]

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Give what `rank` had to the others."""
        if rank not in self._workers:
            return []
        self._workers.discard(rank)
        for ledger in self._ledgers.values():
            if lost:
                ledger.lost(rank)
            else:
                ledger.leave(rank)
        return [answer for ledger in self._ledgers.values() for answer in _ready(ledger)]

    def _take(self, rank: int, query: LeaseQuery) -> Answers:
        ledger = self._ledger(query.data)
        lease = ledger.ask(rank, query.epoch, query.unused)
        now: Answers = [] if lease is WAIT else [(rank, LeaseAnswer(lease=lease))]
        return [*now, *_ready(ledger)]

    def _give_back(self, rank: int, query: GiveBackQuery) -> Answers:
        ledger = self._ledger(query.data)
        ledger.give_back(rank, sum(lease.size for lease in ledger.held(rank)) - query.left)
        return [(rank, Answer()), *_ready(ledger)]

    def _held(self, rank: int, query: HeldLeasesQuery) -> Answers:
        return [(rank, HeldLeasesAnswer(leases=self._ledger(query.data).held(rank)))]

    def _read(self, rank: int, query: ReadLedgerQuery) -> Answers:
        return [(rank, LedgerAnswer(state=self._ledger(query.data).state()))]

    def _load(self, rank: int, query: LoadLedgerQuery) -> Answers:
        self._ledger(query.data).load(query.state)
        return [(rank, Answer())]

    def _ledger(self, data: SampledData) -> Leases:
        ledger = self._ledgers.get(data.sampler)
        if ledger is None:
            ledger = Leases(
                data.size, self._workers, unit=data.unit, patient=self._may_wait, order=data.order
            )
            self._ledgers[data.sampler] = ledger
        if (ledger.size, ledger.unit, ledger.order) != (data.size, data.unit, data.order):
            raise ConfigurationError(
                f"a sampler divides {data.size} samples ({data.order}, unit {data.unit}) on one rank, but "
                f"{ledger.size} ({ledger.order}, unit {ledger.unit}) on another; give all ranks the same "
                "data set and seed"
            )
        return ledger


class Asks(Protocol):
    """A way to the query service."""

    def __call__(self, query: Query[AnswerT], /) -> AnswerT:
        """Ask, and wait for the answer."""


class LedgerClient:
    """Asks the ledger of a sampler for one rank.

    Args:
        ask: the way to the query service.
        data: what the sampler divides.
    """

    def __init__(self, ask: Asks, data: SampledData) -> None:
        self._ask, self._data = ask, data

    def take(self, epoch: int, unused: int = 0) -> Lease | None:
        """Return the next lease of this epoch; `unused` positions of the last ones are yet to be used."""
        return self._ask(LeaseQuery(data=self._data, epoch=epoch, unused=unused)).lease

    def held(self) -> tuple[Lease, ...]:
        """Return the leases that this rank has."""
        return self._ask(HeldLeasesQuery(data=self._data)).leases

    def give_back(self, left: int) -> None:
        """Leave to others what is left of them."""
        self._ask(GiveBackQuery(data=self._data, left=left))

    def state(self) -> State:
        """Return the ledger's state; on the first server."""
        return dict(self._ask(ReadLedgerQuery(data=self._data)).state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the ledger go on from there; on the first server, before any rank leases."""
        self._ask(LoadLedgerQuery(data=self._data, state=state))


def _ready(ledger: Leases) -> Answers:
    return [(rank, LeaseAnswer(lease=lease)) for rank, lease in ledger.answers()]
