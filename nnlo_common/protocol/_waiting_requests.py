"""Worker requests that a server cannot answer yet, by what they wait for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from nnlo_common.algorithms import CenterRule, Contribution
from nnlo_common.base._errors import DroppedError
from nnlo_common.protocol._events import Action, Received, Release, Send
from nnlo_common.protocol._messages import ONE_WAY, Kind, Message
from nnlo_common.protocol._worker_records import Peer, Peers, Standing

__all__ = ["Pauses", "WaitingRequests", "contributions", "count_commit", "heed", "refusal"]

# -- pauses of all workers at a batch boundary, with nothing under way ---------------------------------


class Pauses:
    """Decides when all workers are at a batch boundary of the same epoch.

    Other workers may be blocked on a worker that asks to pause: they need its contribution to a commit, or
    the end of its epoch. Its pause is cancelled if it owes a contribution that others have made, or if it is
    an epoch behind (also behind workers that have left, or serve by now), or while another one of its epoch
    may still queue on another server. Workers that still queue to join (warm start), and spares that will,
    have nothing under way, so a pause does not wait for them. Who queues is not the same on all servers at
    all times: the first one tells how many pause.

    Attributes:
        wanted: replies ask workers to pause.
        made: the number of the last pause that all workers have made together.
        completed: how many of them were completed here; others had replaced a dead server's.
        waiting: the unanswered requests to pause.
        before_epoch: a pause may complete only until all that ask have finished this many epochs, so that the
            server is at the same place of the script as they are; also if a death completes the pause, or
            nobody waits for a spare that will join.
        passed: the epochs that workers had finished which serve by now.

    Args:
        peers: all workers.
    """

    def __init__(self, peers: Peers) -> None:
        self.passed = 0
        self.wanted, self.made, self.completed = False, 0, 0
        self.waiting: list[Received] = []
        self.before_epoch = math.inf
        self._peers = peers

    def cancelled(self, contributed: Collection[int]) -> list[Received]:
        """Remove and return the requests of workers that must continue before they can pause.

        Args:
            contributed: workers whose contributions wait for those of others.
        """
        latest = max(self._peers.latest_epoch(), self.passed)
        cancelled = []
        for event in self.waiting:
            rank = event.message.sender
            epoch = self._peers[rank].epochs  # workers of an earlier epoch do not wait for this one
            waited_for = any(self._peers[other].epochs == epoch for other in contributed)
            queues = any(peer.may_queue and peer.epochs == epoch for peer in self._peers.values())
            if epoch < latest or queues or (waited_for and rank not in contributed):
                cancelled.append(event)
        self.waiting = [event for event in self.waiting if event not in cancelled]
        return cancelled

    def ready(self, *, all_numbered: bool = False) -> bool:
        """Whether all workers wait and may pause; see `over`."""
        ranks = {event.message.sender for event in self.waiting}
        others = [rank for rank in self._peers.awaited() if rank not in ranks]
        granted = max((event.message.pausing for event in self.waiting if all_numbered), default=0)
        waits = 0 < granted <= len(ranks) or all(self._may_miss(self._peers[rank]) for rank in others)
        return waits and any(self._peers[rank].epochs < self.before_epoch for rank in ranks)

    def _may_miss(self, peer: Peer) -> bool:
        """Whether a pause does not wait for a worker: it joins later, or joined after the first server's."""
        number = max((event.message.pauses for event in self.waiting), default=0)
        return peer.standing in (Standing.CALLED, Standing.QUEUING) or number <= peer.pauses

    def complete(self, *, all_numbered: bool = False) -> list[Received]:
        """Remove and return all requests once all workers wait and may pause; see `over`."""
        if not self.ready(all_numbered=all_numbered):
            return []
        done, self.waiting, self.wanted = self.waiting, [], False
        self.made = max(self.made + 1, *(event.message.pauses for event in done))
        self.completed += 1
        return done

    def over(self, *, all_numbered: bool) -> list[Received]:
        """Remove and return the requests for pauses that a dead server has granted to others.

        Args:
            all_numbered: all requests have the first server's number; else those do that are sent again.
        """
        done = [
            event
            for event in self.waiting
            if event.message.pauses <= self.made and (all_numbered or event.message.again)
        ]
        self.waiting = [event for event in self.waiting if event not in done]
        return done


# -- counts of commits: how stale each contribution was, and what each worker has contributed ----------


def contributions(
    events: Iterable[Received], rule: CenterRule, peers: Peers, staleness: Counter[int]
) -> list[Contribution]:
    """Return the contributions of the next commit, counted by staleness; the optimizer gets their options."""
    found = []
    for event in events:
        message = event.message
        assert message.vector is not None  # refused() has seen to it
        if (options := peers[message.sender].options) is not None:
            rule.configure(options)
        stale = rule.clock - message.pulled_at
        sample = peers[message.sender].sample
        found.append(Contribution(message.sender, message.vector, stale, message.share, sample))
        staleness[stale] += 1
        peers[message.sender].staleness[stale] += 1
    return found


def count_commit(events: Iterable[Received], rule: CenterRule, peers: Peers) -> None:
    """Note for each worker that its contribution is in the commit just made."""
    for event in events:
        peer = peers[event.message.sender]
        peer.commits += 1
        peer.last_commit = rule.clock
        peer.count_round()


# -- dropped workers: what a server answers when one speaks again, and what the worker makes of it -----


def refusal(event: Received, server: int, after_s: float) -> Action:
    """Return the answer to a request of a worker that was dropped; a one-way message gets none.

    Args:
        event: the request.
        server: the rank that answers.
        after_s: how long the worker had been silent.
    """
    request = event.message
    if request.kind in ONE_WAY:
        return Release(request.sender, event.frame)
    answer = Message(Kind.DROPPED, server, request.sequence, scalar=after_s, shard=request.shard)
    return Send(request.sender, answer, event.frame)


def heed(message: Message, rank: int) -> None:
    """Raise `DroppedError` if a reply to `rank` says that it was dropped."""
    if message.kind is Kind.DROPPED:
        raise DroppedError(rank, message.sender, message.silence_s)


class WaitingRequests:
    """Unanswered requests.

    Attributes:
        contributions: wait for the contributions of others; in order of arrival.
        joins: wait to be let in (warm start).
        locks: wait for the lock.
        views: wait until others end the epoch.
        pauses: wait until others reach a batch boundary.
        done: workers that have contributed to the last round, perhaps on a server that has died since.

    Args:
        peers: all workers.
    """

    def __init__(self, peers: Peers) -> None:
        self.done: set[int] = set()
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
        behind = peers.in_next_round([rank for rank in peers.behind() if rank not in self.done])
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
