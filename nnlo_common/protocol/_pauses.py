"""Pauses of all workers at a batch boundary, with nothing under way."""

from __future__ import annotations

import math
from collections.abc import Collection

from nnlo_common.protocol._events import Received
from nnlo_common.protocol._worker_records import Peers, Standing

__all__ = ["Pauses"]


class Pauses:
    """Decides when all workers are at a batch boundary of the same epoch.

    Other workers may be blocked on a worker that asks to pause: they need its contribution to a commit, or
    the end of its epoch. Its pause is cancelled if it owes a contribution that others have made, or if it is
    an epoch behind (also behind workers that have left). Workers that still queue to join (warm start) have
    nothing under way, so a pause does not wait for them.

    Attributes:
        wanted: replies ask workers to pause.
        made: number of pauses that all workers have made together.
        waiting: the unanswered requests to pause.
        before_epoch: a pause may complete only until all have finished this many epochs, so that the server
            is at the same place of the script as the workers; also if a death completes the pause.

    Args:
        peers: all workers.
    """

    def __init__(self, peers: Peers) -> None:
        self.wanted, self.made = False, 0
        self.waiting: list[Received] = []
        self.before_epoch = math.inf
        self._peers = peers

    def cancelled(self, contributed: Collection[int]) -> list[Received]:
        """Remove and return the requests of workers that must continue before they can pause.

        Args:
            contributed: workers whose contributions wait for those of others.
        """
        latest = self._peers.latest_epoch()
        cancelled = []
        for event in self.waiting:
            rank = event.message.sender
            epoch = self._peers[rank].epochs  # workers of an earlier epoch do not wait for this one
            waited_for = any(self._peers[other].epochs == epoch for other in contributed)
            if epoch < latest or (waited_for and rank not in contributed):
                cancelled.append(event)
        self.waiting = [event for event in self.waiting if event not in cancelled]
        return cancelled

    def ready(self) -> bool:
        """Whether all workers wait and may pause."""
        ranks = {event.message.sender for event in self.waiting}
        others = [rank for rank in self._peers.awaited() if rank not in ranks]
        waits = all(self._peers[rank].standing is Standing.QUEUING for rank in others)
        return bool(ranks) and waits and not self._peers.have_finished(self.before_epoch)

    def complete(self) -> list[Received]:
        """Remove and return all requests once all workers wait and may pause."""
        if not self.ready():
            return []
        done, self.waiting, self.wanted = self.waiting, [], False
        self.made += 1
        return done
