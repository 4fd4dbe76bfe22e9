"""A worker in the ledger of leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from nnlo_common.base._state_tree import State, require
from nnlo_common.data.leasing._lease import Lease

__all__ = ["Holder"]


@dataclass(slots=True)
class Holder:
    """What the ledger knows of a worker that lives.

    Attributes:
        epoch: that it asked about last.
        leases: that it has, in the order in which it uses them.
        used: how many positions it has used since it turned to this epoch. The last lease counts in full,
            the one before it by half, and so on, so that who becomes slow is soon known to be.
        seen: how many all workers together used in the time of its leases, counted alike. `used / seen`
            is its share of the work, which takes no clock to measure.

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
        """How many positions it has."""
        return sum(lease.size for lease in self.leases)

    def turn_to(self, epoch: int) -> None:
        """Note which epoch it asks about, and forget what it did in another."""
        # The end of an epoch misleads: while the last leases are used, others have nothing to use.
        if epoch != self.epoch:
            self.epoch, self.used, self.seen = epoch, 0, 0

    def most(self, left: int, unit: int) -> int:
        """Return how large its next lease may be, in whole units: one, if nothing is known of it."""
        # Guided self-scheduling (Polychronopoulos and Kuck, 1987), with the measured share for 1/p. It is
        # halved, since others' leases are counted only when they end: even if the share is twice the true
        # one, nobody is late. And it is as uncertain as the leases that it is from are small; so they may
        # only about double, and none takes much longer than all before it, however slow the worker is.
        half = min(left * self.used // max(self.seen, 1), 3 * self.used) // 2
        return max(half // unit, 1) * unit

    def take(self, lease: Lease) -> None:
        """Hand it a lease, and forget half of what was before; rounded up, so that small counts last."""
        self.leases.append(lease)
        self.used, self.seen = (self.used + 1) // 2, (self.seen + 1) // 2

    def holds_of(self, epoch: int) -> bool:
        """Whether any of its leases is of this epoch or an earlier one."""
        return any(lease.epoch <= epoch for lease in self.leases)

    def state(self) -> State:
        """Return what is known."""
        leases = [list(astuple(lease)) for lease in self.leases]
        return {"epoch": self.epoch, "leases": leases, "used": self.used, "seen": self.seen}

    @classmethod
    def of(cls, owner: str, state: Mapping[str, Any]) -> Holder:
        """Return the holder that gave `state`."""
        require(owner, state, epoch=int, leases=[[int]], used=int, seen=int)
        leases = [Lease(*lease) for lease in state["leases"]]
        return cls(state["epoch"], leases, state["used"], state["seen"])
