"""Workers that wait at a batch boundary for all others to be at one: then nothing is under way."""

from __future__ import annotations

import math
from collections.abc import Collection

from nnlo_common.protocol._events import Received
from nnlo_common.protocol._worker_records import Peers, Standing

__all__ = ["Pauses"]


class Pauses:
    """Decides when all workers are at a batch boundary of one and the same epoch.

    Others may wait for a worker where they cannot pause: for its contribution to a commit, for the end of
    its epoch. So it is sent on if it owes a contribution that others have made, or is behind by an epoch
    (also behind those who have left). Who has not been let in yet (warm start) has nothing under way and is
    not waited for.

    Attributes:
        wanted: workers are to pause; replies say so.
        made: how many pauses all have made together.
        waiting: the requests to pause that are not answered.
        before_epoch: all may pause only while not all have finished so many epochs: where the server is at
            the place of the script where those are who ask. A death, too, lets all pause only there.

    Args:
        peers: all workers.
    """

    def __init__(self, peers: Peers) -> None:
        self.wanted, self.made = False, 0
        self.waiting: list[Received] = []
        self.before_epoch = math.inf
        self._peers = peers

    def called_off(self, contributed: Collection[int]) -> list[Received]:
        """Return, once, the requests of those that are to go on first.

        Args:
            contributed: whose contributions wait for those of others.
        """
        latest = self._peers.latest_epoch()
        sent_on = []
        for event in self.waiting:
            rank = event.message.sender
            epoch = self._peers[rank].epochs  # those of an earlier one do not wait for it
            waited_for = any(self._peers[other].epochs == epoch for other in contributed)
            if epoch < latest or (waited_for and rank not in contributed):
                sent_on.append(event)
        self.waiting = [event for event in self.waiting if event not in sent_on]
        return sent_on

    def complete(self) -> list[Received]:
        """Return, once, the requests of all, when all wait and may pause."""
        ranks = {event.message.sender for event in self.waiting}
        others = [rank for rank in self._peers.awaited() if rank not in ranks]
        waits = all(self._peers[rank].standing is Standing.QUEUING for rank in others)
        if not ranks or not waits or self._peers.have_finished(self.before_epoch):
            return []
        done, self.waiting, self.wanted = self.waiting, [], False
        self.made += 1
        return done
