"""Worker requests that a server cannot answer yet, by what they wait for."""

from __future__ import annotations

from collections.abc import Iterator

from nnlo_common.algorithms import CenterRule
from nnlo_common.protocol._events import Received
from nnlo_common.protocol._pauses import Pauses
from nnlo_common.protocol._worker_records import Peers

__all__ = ["WaitingRequests"]


class WaitingRequests:
    """Unanswered requests.

    Attributes:
        contributions: wait for the contributions of others; in order of arrival.
        joins: wait to be let in (warm start).
        locks: wait for the lock.
        views: wait until others end the epoch.
        pauses: wait until others reach a batch boundary.

    Args:
        peers: all workers.
    """

    def __init__(self, peers: Peers) -> None:
        self.contributions: list[Received] = []
        self.joins: list[Received] = []
        self.locks: list[Received] = []
        self.views: list[Received] = []
        self.pauses = Pauses(peers)

    def __iter__(self) -> Iterator[Received]:
        for requests in self._all():
            yield from requests

    def drop(self, rank: int) -> list[Received]:
        """Remove and return all requests of a dead worker."""
        gone = [event for event in self if event.message.sender == rank]
        for requests in self._all():
            requests[:] = [event for event in requests if event.message.sender != rank]
        return gone

    def take_ready(self, rule: CenterRule, peers: Peers) -> list[Received]:
        """Remove and return the contributions of the next commit, by rank; none if some are still missing."""
        chosen = self.ready(rule, peers)
        if chosen:
            self.contributions = [event for event in self.contributions if event not in chosen]
        return chosen

    def ready(self, rule: CenterRule, peers: Peers) -> list[Received]:
        """Like `take_ready`, without removing them.

        A worker already in the next epoch does not block this commit; its own contribution waits. So the last
        step of an epoch, which some workers lack, is made by the workers that have it.
        """
        behind = peers.behind()
        heads = [event for event in self._heads() if event.message.sender in behind]
        needed = rule.quorum(len(behind))
        if not heads or len(heads) < needed:
            return []
        return sorted(heads[:needed], key=lambda event: event.message.sender)

    def take_late(self, rule: CenterRule) -> list[Received]:
        """Remove and return the contributions that are staler than the rule allows."""
        limit = rule.max_staleness
        if limit is None:
            return []
        late = [event for event in self.contributions if rule.clock - event.message.pulled_at > limit]
        self.contributions = [event for event in self.contributions if event not in late]
        return late

    def _heads(self) -> list[Received]:
        """The oldest contribution of each worker, in order of arrival."""
        heads: dict[int, Received] = {}
        for event in self.contributions:
            heads.setdefault(event.message.sender, event)
        return list(heads.values())

    def _all(self) -> tuple[list[Received], ...]:
        return self.contributions, self.joins, self.locks, self.views, self.pauses.waiting
