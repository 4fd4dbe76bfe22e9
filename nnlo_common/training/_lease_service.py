"""Handler of the query service for parts of epochs: one ledger of leases for each sampler that asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data import WAIT, Lease, Leases
from nnlo_common.protocol import Answer, Query

__all__ = ["Leasing"]

_FACTS = ("size", "unit", "order")


class Leasing:
    """Leases parts of epochs to workers; see `nnlo_common.data.Leases`.

    Questions name their sampler and what it divides; the first that names one opens its ledger. `do` says
    what is asked: "take" the next lease, "give back" what is `left` of it, which one is "held"; "read" or
    "write" the ledger's state.

    Args:
        workers: the ranks that may ask.
        patient: have workers wait for what others may still leave behind.
    """

    def __init__(self, workers: Iterable[int], *, patient: bool) -> None:
        self._workers, self._patient, self._may_wait = set(workers), patient, patient
        self._books: dict[str, Leases] = {}

    def ask(self, question: Query) -> list[Answer]:
        """Take a question."""
        content, rank = question.content, question.rank
        ledger = self._ledger(content)
        if content["do"] == "read":
            return [Answer(rank, {"state": ledger.state()})]
        if content["do"] == "write":
            ledger.load(content["state"])
            return [Answer(rank, {})]
        if content["do"] == "give back":
            ledger.give_back(rank, sum(lease.size for lease in ledger.held(rank)) - content["left"])
            return [Answer(rank, {}), *_told(ledger)]
        if content["do"] == "held":
            return [Answer(rank, {"leases": [list(astuple(lease)) for lease in ledger.held(rank)]})]
        answer = ledger.ask(rank, content["epoch"], content.get("unused", 0))
        now = [] if answer is WAIT else [_answer(rank, answer)]
        return [*now, *_told(ledger)]

    def let_wait(self, *, may_wait: bool) -> list[Answer]:
        """Say whether workers may wait: who waits cannot pause, so while all are to pause nobody does."""
        self._may_wait = may_wait and self._patient
        for ledger in self._books.values():
            ledger.patient = self._may_wait
        return [answer for ledger in self._books.values() for answer in _told(ledger)]

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:
        """Give what `rank` had to the others."""
        if rank not in self._workers:
            return []
        self._workers.discard(rank)
        for ledger in self._books.values():
            if lost:
                ledger.lost(rank)
            else:
                ledger.leave(rank)
        return [answer for ledger in self._books.values() for answer in _told(ledger)]

    def _ledger(self, content: Mapping[str, Any]) -> Leases:
        name = content["sampler"]
        size, unit, order = (content[fact] for fact in _FACTS)
        ledger = self._books.get(name)
        if ledger is None:
            ledger = Leases(size, self._workers, unit=unit, patient=self._may_wait, order=order)
            self._books[name] = ledger
        found = {"size": ledger.size, "unit": ledger.unit, "order": ledger.order}
        if found != {fact: content[fact] for fact in _FACTS}:
            raise ConfigurationError(
                f"a sampler divides {size} samples ({order}, unit {unit}) on one rank, but {ledger.size} "
                f"({ledger.order}, unit {ledger.unit}) on another; give all ranks the same data set and seed"
            )
        return ledger


def _told(ledger: Leases) -> list[Answer]:
    return [_answer(rank, lease) for rank, lease in ledger.answers()]


def _answer(rank: int, lease: object) -> Answer:
    if isinstance(lease, Lease):
        return Answer(rank, {"lease": list(astuple(lease))})
    return Answer(rank, {"lease": None})
