"""Batches of what a worker leases: windows, each read while the batches of the one before are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from nnlo_common.data._batches import Batches
from nnlo_common.data.leasing._lease import Lease

__all__ = ["LeasedBatches"]


class Ledger(Protocol):
    """What a worker asks of the ledger of leases; over ranks `nnlo_common.protocol.LedgerClient` does."""

    def take(self, epoch: int, unused: int) -> Lease | None:
        """Return its next lease of this epoch, while `unused` positions of the last ones are left."""

    def held(self) -> Sequence[Lease]:
        """Return the leases that it has."""

    def give_back(self, left: int) -> None:
        """Take back what is left of them."""


class LeasedBatches:
    """The batches of an epoch that one worker gets where speed decides the shares.

    Leases are whole windows of `Batches`, but for what is left of one. When the last window of a lease is
    begun the next lease is asked for, so that it is read in time. A batch counts as used when the next one
    is asked for; what a worker dies with is given out again, the used part of its lease too.

    Args:
        batches: of all positions.
        ledger: asks the server's.

    Example:
        >>> import numpy as np
        >>> from nnlo_common.data import Arrays, Batches, Leases
        >>> class Alone(Leases):
        ...     def take(self, epoch, unused):
        ...         return self.ask(1, epoch, unused)
        >>> batches = Batches(Arrays(np.arange(3)), batch_size=1, window=2)
        >>> mine = LeasedBatches(batches, Alone(3, [1], unit=2))
        >>> while mine.more(epoch=0):
        ...     print(mine.take(epoch=0))
        ((array([0]),), 1)
        ((array([1]),), 1)
        ((array([2]),), 1)
    """

    def __init__(self, batches: Batches, ledger: Ledger) -> None:
        self._batches, self._ledger = batches, ledger
        self._held: deque[Lease] = deque()  # what was not handed out
        self._ready: deque[Any] = deque()  # the batches of a window that is begun
        self._booked = False  # whether the ledger may have something for this worker

    def more(self, epoch: int) -> bool:
        """Whether there is another batch in this epoch; what was taken before has been used."""
        return bool(self._held) or self._lease(epoch)

    def take(self, epoch: int) -> tuple[Any, int]:
        """Return the next batch, if there is `more`, and how many samples it has."""
        if not self._ready:
            first = self._cut(self._held[0])
            self._ready.extend(self._batches.leased(first, self._following(epoch, first)))
        lease = self._held.popleft()
        middle = min(lease.start + self._batches.batch_size, self._cut(lease).stop)
        if middle < lease.stop:
            self._held.appendleft(Lease(lease.epoch, middle, lease.stop))
        return self._ready.popleft(), middle - lease.start

    def left(self) -> list[list[int]]:
        """Return what this worker has and has not taken, for `resume`."""
        return [[lease.epoch, lease.start, lease.stop] for lease in self._held]

    def resume(self, left: Sequence[Sequence[int]]) -> None:
        """Go on with what was `left` when the ledger was saved, unless that was given to others since."""
        held = self._ledger.held()
        wanted = deque(Lease(*lease) for lease in left)
        self._held, self._booked = wanted, bool(held)
        self._ready.clear()
        if wanted != _last(held, self._left()):
            self._held = deque(held)
            self.give_back()

    def give_back(self) -> None:
        """Leave to others what was not taken: the loop was left, or its epoch is over."""
        if self._booked:
            self._ledger.give_back(self._left())
        self._held.clear()
        self._ready.clear()
        self._booked = False

    def _left(self) -> int:
        return sum(lease.size for lease in self._held)

    def _lease(self, epoch: int) -> bool:
        """Ask for one more lease."""
        lease = self._ledger.take(epoch, self._left())
        self._booked = lease is not None or bool(self._held)
        if lease is not None:
            self._held.append(lease)
        return lease is not None

    def _cut(self, lease: Lease) -> Lease:
        """The part of a lease that lies in its first window."""
        size = self._batches.window_size
        return Lease(lease.epoch, lease.start, min(lease.stop, (lease.start // size + 1) * size))

    def _following(self, epoch: int, first: Lease) -> Lease | None:
        """What is used after a window, as far as that is known."""
        lease = self._held[0]
        if first.stop < lease.stop:
            return self._cut(Lease(lease.epoch, first.stop, lease.stop))
        if len(self._held) > 1 or self._lease(epoch):
            return self._cut(self._held[1])
        return None


def _last(leases: Sequence[Lease], size: int) -> deque[Lease]:
    """The last positions of leases."""
    found: deque[Lease] = deque()
    for lease in reversed(leases):
        start = max(lease.start, lease.stop - size)
        if start < lease.stop:
            found.appendleft(Lease(lease.epoch, start, lease.stop))
        size -= lease.stop - start
    return found
