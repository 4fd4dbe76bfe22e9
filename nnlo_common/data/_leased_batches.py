"""Batches of leased windows; each window is read while the worker uses the batches of the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from nnlo_common.data._batches import Batches
from nnlo_common.data._ledger import Lease

__all__ = ["LeasedBatches"]


class Ledger(Protocol):
    """A worker's access to the ledger of leases; `nnlo_common.protocol.LedgerClient` reaches a server's."""

    def take(self, epoch: int, unused: int) -> Lease | None:
        """Return the worker's next lease of this epoch; `unused` positions of its earlier ones are left."""

    def held(self) -> Sequence[Lease]:
        """Return the worker's leases."""

    def give_back(self, left: int) -> None:
        """Return the last `left` positions of its leases to the ledger."""


class LeasedBatches:
    """The batches of an epoch that one worker gets under dynamic assignment.

    Leases are whole windows of `Batches`, or the rest of one. The next lease is requested at the start of the
    last window of the present one, so that it is read in time. A batch counts as used when the next one is
    requested. If a worker dies, its whole lease goes to others, including the used part.

    Where a group leases together, fewer samples than it has ranks are left over in an epoch: the group that
    had the last lease gets them in a batch of its own, which on the other ranks repeats a sample and has the
    size 0.

    Args:
        batches: of all positions.
        ledger: the worker's access to the server's ledger.
        rests: hand out what is left over; not where an epoch takes several passes, since the others' next
            leases come with the next batch.

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

    def __init__(self, batches: Batches, ledger: Ledger, *, rests: bool = True) -> None:
        self._batches, self._ledger, self._rests = batches, ledger, rests
        self._rest: tuple[Any, int] | None = None  # the batch that is left over, once all others are taken
        self._last_lease: int | None = None  # the epoch whose last positions this worker has
        self._held: deque[Lease] = deque()  # leased positions whose batches were not returned yet
        self._ready: Iterator[Any] = iter(())  # the remaining batches of the present window
        self._may_hold = False  # whether the ledger may have leases of this worker

    def more(self, epoch: int) -> bool:
        """Return whether this epoch has another batch; the batch taken before counts as used."""
        return bool(self._held) or self._lease(epoch) or self._left_over(epoch)

    def take(self, epoch: int) -> tuple[Any, int]:
        """Return the next batch and its number of samples; call `more` first."""
        if not self._held and self._rest is not None:
            rest, self._rest, self._last_lease = self._rest, None, None
            return rest
        batch = next(self._ready, None)
        if batch is None:
            first = self._cut(self._held[0])
            self._ready = iter(self._batches.leased(first, self._following(epoch, first)))
            batch = next(self._ready)
        lease = self._held.popleft()
        middle = min(lease.start + self._batches.batch_size, self._cut(lease).stop)
        if middle < lease.stop:
            self._held.appendleft(Lease(lease.epoch, middle, lease.stop))
        return batch, middle - lease.start

    def left(self) -> list[list[int]]:
        """Return the leased positions not taken yet, for `resume`; an empty range: those left over."""
        held = [[lease.epoch, lease.start, lease.stop] for lease in self._held]
        if self._last_lease is not None:
            held.append([self._last_lease, self._batches.leasable, self._batches.leasable])
        return held

    def resume(self, left: Sequence[Sequence[int]]) -> None:
        """Resume with the positions `left` when the ledger was saved, unless others got them since."""
        held = self._ledger.held()
        wanted = deque(Lease(*lease) for lease in left if lease[1] < lease[2])
        over = [lease[0] for lease in left if lease[1] == lease[2]]
        self._last_lease, self._rest = over[0] if over else None, None
        self._held, self._may_hold = wanted, bool(held)
        self._ready = iter(())
        if wanted != _last(held, self._left()):
            self._held = deque(held)
            self.give_back()

    def give_back(self) -> None:
        """Return the positions not taken to the ledger: the loop has ended, or its epoch is over."""
        if self._may_hold:
            self._ledger.give_back(self._left())
            if self._held:
                self._last_lease = None
        self._held.clear()
        self._ready = iter(())
        self._may_hold, self._rest = False, None

    def _left(self) -> int:
        return sum(lease.size for lease in self._held)

    def _lease(self, epoch: int) -> bool:
        """Request one more lease; return whether there is one."""
        lease = self._ledger.take(epoch, self._left())
        self._may_hold = lease is not None or bool(self._held)
        if lease is not None:
            self._held.append(lease)
            if self._rests and self._batches.left_over and lease.stop == self._batches.leasable:
                self._last_lease = lease.epoch
        return lease is not None

    def _left_over(self, epoch: int) -> bool:
        """Return whether a batch is left over for this worker, with the last positions of an epoch."""
        if self._last_lease != epoch:
            return False
        if self._rest is None:
            self._rest = self._batches.rest(epoch)
        return True

    def _cut(self, lease: Lease) -> Lease:
        """Return the part of a lease that lies in its first window."""
        size = self._batches.window_size
        return Lease(lease.epoch, lease.start, min(lease.stop, (lease.start // size + 1) * size))

    def _following(self, epoch: int, first: Lease) -> list[Lease]:
        """Return the parts to read after `first`: of the same lease or of the next one, if there is one."""
        lease = self._held[0]
        if first.stop < lease.stop:
            size = self._batches.window_size
            starts = [first.stop, *range((first.stop // size + 1) * size, lease.stop, size)]
            return [self._cut(Lease(lease.epoch, start, lease.stop)) for start in starts]
        if len(self._held) > 1 or self._lease(epoch):
            return [self._cut(self._held[1])]
        return []


def _last(leases: Sequence[Lease], size: int) -> deque[Lease]:
    """Return the last `size` positions of leases."""
    found: deque[Lease] = deque()
    for lease in reversed(leases):
        start = max(lease.start, lease.stop - size)
        if start < lease.stop:
            found.appendleft(Lease(lease.epoch, start, lease.stop))
        size -= lease.stop - start
    return found
