"""Leases of an epoch's samples by query: ledgers on the first server, and a client for each sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
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
    ReturnQuery,
    SampledData,
)
from nnlo_common.protocol._returning import leases_told

__all__ = ["Leasing", "LedgerClient"]


class Leasing:
    """Leases parts of epochs to workers, with one ledger per sampler; see `nnlo_common.data.Leases`.

    Args:
        workers: the ranks that may ask.
        patient: a worker waits while others may still give samples back.

    Attributes:
        saved_as: returns whose leases each worker's are in a checkpoint: a spare's are those of the worker it
            replaces.
    """

    def __init__(self, workers: Iterable[int], *, patient: bool) -> None:
        self._workers, self._patient, self._may_wait = set(workers), patient, patient
        self.saved_as: Callable[[], Mapping[int, int]] = lambda: {rank: rank for rank in self._workers}
        self._ledgers: dict[str, Leases] = {}
        self._data: dict[str, SampledData] = {}
        self._retired = set[int]()  # workers that serve by now
        self._passing: set[str] = set()  # those whose epochs take several passes, which nobody waits between
        self.handlers: Handlers = {
            LeaseQuery: self._take,
            GiveBackQuery: self._give_back,
            HeldLeasesQuery: self._held,
            ReadLedgerQuery: self._read,
            LoadLedgerQuery: self._load,
        }

    def let_wait(self, *, may_wait: bool) -> Answers:
        """Set whether workers may wait for a lease; they must not during a pause, as waiting blocks it."""
        self._may_wait = may_wait and self._patient
        for name, ledger in self._ledgers.items():
            ledger.patient = self._may_wait and name not in self._passing
        return [answer for ledger in self._ledgers.values() for answer in _ready(ledger)]

    def admit(self, rank: int) -> None:
        """Lease to one more rank from now on: to a spare in the place of a dead worker."""
        self._workers.add(rank)
        for ledger in self._ledgers.values():
            ledger.admit(rank)

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Return the leases of `rank` to the ledgers."""
        if rank not in self._workers:
            return []
        self._workers.discard(rank)
        for ledger in self._ledgers.values():
            if lost:
                ledger.lost(rank)
            else:
                ledger.leave(rank)
        return [answer for ledger in self._ledgers.values() for answer in _ready(ledger)]

    def retire(self, rank: int) -> Answers:
        """Lease no more to a worker that serves by now; what it asks for, or has asked, it does not get."""
        waiting = any(rank in ledger.waiting for ledger in self._ledgers.values())
        self._retired.add(rank)
        answers: Answers = [(rank, LeaseAnswer(lease=None))] if waiting else []
        return [*answers, *self.gone(rank, lost=True)]

    def state(self) -> State:
        """Return all ledgers, and what each divides, for a rank that takes over."""
        return {name: [astuple(data), self._ledgers[name].state()] for name, data in self._data.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over from another rank's leasing, from its `state`, which may be old."""
        for data, ledger in state.values():
            self._ledger(SampledData(*data)).restore(ledger)

    def returned(self, rank: int, told: ReturnQuery) -> None:
        """Take up what a worker has had of the ledgers that are lost."""
        for data, epoch, used, held in leases_told(told, rank):
            self._ledger(data).know(rank, epoch, used, held)

    def _take(self, rank: int, query: LeaseQuery) -> Answers:
        if rank in self._retired:
            return [(rank, LeaseAnswer(lease=None))]
        ledger = self._ledger(query.data)
        lease = ledger.ask(rank, query.epoch, query.unused)
        now: Answers = [] if lease is WAIT else [(rank, LeaseAnswer(lease=lease))]
        return [*now, *_ready(ledger)]

    def _give_back(self, rank: int, query: GiveBackQuery) -> Answers:
        if rank in self._retired:
            return [(rank, Answer())]
        ledger = self._ledger(query.data)
        ledger.give_back(rank, sum(lease.size for lease in ledger.held(rank)) - query.left)
        return [(rank, Answer()), *_ready(ledger)]

    def _held(self, rank: int, query: HeldLeasesQuery) -> Answers:
        return [(rank, HeldLeasesAnswer(leases=self._ledger(query.data).held(rank)))]

    def _read(self, rank: int, query: ReadLedgerQuery) -> Answers:
        state, names = self._ledger(query.data).state(), self.saved_as()
        workers = {str(names[int(one)]): had for one, had in state["workers"].items() if int(one) in names}
        waiting = [names[one] for one in state["waiting"]]
        return [(rank, LedgerAnswer(state={**state, "workers": workers, "waiting": waiting}))]

    def _load(self, rank: int, query: LoadLedgerQuery) -> Answers:
        self._ledger(query.data).load(query.state)
        return [(rank, Answer())]

    def _ledger(self, data: SampledData) -> Leases:
        ledger = self._ledgers.get(data.sampler)
        if ledger is None:
            if data.passes:
                self._passing.add(data.sampler)
            patient = self._may_wait and not data.passes
            ledger = Leases(data.size, self._workers, unit=data.unit, patient=patient, order=data.order)
            self._ledgers[data.sampler], self._data[data.sampler] = ledger, data
        if (ledger.size, ledger.unit, ledger.order) != (data.size, data.unit, data.order):
            raise ConfigurationError(
                f"sampler {data.sampler!r} divides {data.size} samples ({data.order}, unit {data.unit}) on "
                f"one rank, but {ledger.size} ({ledger.order}, unit {ledger.unit}) on another; give all "
                "ranks the same data set and seed"
            )
        return ledger


class Asks(Protocol):
    """Function that sends a query to the query service."""

    def __call__(self, query: Query[AnswerT], /) -> AnswerT:
        """Ask, and wait for the answer."""


class LedgerClient:
    """One rank's client of a sampler's ledger.

    Args:
        ask: sends a query to the query service.
        data: what the sampler divides.
    """

    def __init__(self, ask: Asks, data: SampledData) -> None:
        self._ask, self._data = ask, data

    def take(self, epoch: int, unused: int = 0) -> Lease | None:
        """Return the next lease of this epoch; `unused` positions of earlier leases are still to be used."""
        return self._ask(LeaseQuery(data=self._data, epoch=epoch, unused=unused)).lease

    def held(self) -> tuple[Lease, ...]:
        """Return the leases that this rank holds."""
        return self._ask(HeldLeasesQuery(data=self._data)).leases

    def give_back(self, left: int) -> None:
        """Give back the last `left` positions of this rank's leases."""
        self._ask(GiveBackQuery(data=self._data, left=left))

    def state(self) -> State:
        """Return the ledger's state; call it on the first server."""
        return dict(self._ask(ReadLedgerQuery(data=self._data)).state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the ledger's state; call it on the first server, before any rank leases."""
        self._ask(LoadLedgerQuery(data=self._data, state=state))


def _ready(ledger: Leases) -> Answers:
    return [(rank, LeaseAnswer(lease=lease)) for rank, lease in ledger.answers()]
