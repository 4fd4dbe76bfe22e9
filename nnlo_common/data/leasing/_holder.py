"""Record of one worker in the ledger of leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from nnlo_common.base._state_tree import State, require
from nnlo_common.data.leasing._lease import Lease

__all__ = ["Holder"]


@dataclass(slots=True)
class Holder:
    """The ledger's record of a living worker.

    Attributes:
        epoch: the epoch it asked about last.
        leases: its leases, in the order of use.
        used: positions it has used in this epoch. The last lease counts in full, the one before by half, and
            so on, so that a worker that becomes slow soon shows.
        seen: positions that all workers together used during its leases, weighted alike. `used / seen` is its
            share of the work, measured without a clock.

    Example:
        >>> worker = Holder(epoch=1, used=30, seen=90)
        >>> worker.most(120, unit=4), worker.most(600, unit=4)  # half of its third; 3/2 of what it used
        (20, 44)
        >>> worker.take(Lease(1, 0, 20))
        >>> worker.state()
        {'epoch': 1, 'leases': [[1, 0, 20]], 'used': 15, 'seen': 45}
    """

    epoch: int = 0
    leases: list[Lease] = field(default_factory=list)
    used: int = 0
    seen: int = 0

    @property
    def size(self) -> int:
        """The number of positions in its leases."""
        return sum(lease.size for lease in self.leases)

    def turn_to(self, epoch: int) -> None:
        """Record the epoch that it asks about; a new epoch resets its counts."""
        # Old counts mislead: while a worker uses the last leases of an epoch, the others are idle.
        if epoch != self.epoch:
            self.epoch, self.used, self.seen = epoch, 0, 0

    def most(self, left: int, unit: int) -> int:
        """Return the size of its next lease, in whole units: one unit, before it has used any."""
        # Guided self-scheduling (Polychronopoulos and Kuck, 1987), with the measured share for 1/p. The share
        # is halved because others' leases count only when they end: even if it is twice the true share, no
        # worker is late. Small leases measure it badly, so a lease may only about double the last one; then
        # none takes much longer than all before it, however slow the worker is.
        half = min(left * self.used // max(self.seen, 1), 3 * self.used) // 2
        return max(half // unit, 1) * unit

    def take(self, lease: Lease) -> None:
        """Add a lease, and halve the counts; rounded up, so that small counts do not vanish."""
        self.leases.append(lease)
        self.used, self.seen = (self.used + 1) // 2, (self.seen + 1) // 2

    def holds_of(self, epoch: int) -> bool:
        """Return whether any of its leases is of this epoch or an earlier one."""
        return any(lease.epoch <= epoch for lease in self.leases)

    def state(self) -> State:
        """Return the record, for a checkpoint."""
        leases = [list(astuple(lease)) for lease in self.leases]
        return {"epoch": self.epoch, "leases": leases, "used": self.used, "seen": self.seen}

    @classmethod
    def of(cls, owner: str, state: Mapping[str, Any]) -> Holder:
        """Return the holder that returned `state`."""
        require(owner, state, epoch=int, leases=[[int]], used=int, seen=int)
        leases = [Lease(*lease) for lease in state["leases"]]
        return cls(state["epoch"], leases, state["used"], state["seen"])
