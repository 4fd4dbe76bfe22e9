"""A worker in the book of leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from nnlo_common._state import State, require
from nnlo_common.data._lease import Lease

__all__ = ["Holder"]


@dataclass(slots=True)
class Holder:
    """What the book knows of a worker that lives.

    Attributes:
        epoch: that it asked about last.
        lease: that it has.

    Example:
        >>> Holder(1, Lease(1, 0, 4)).state()
        {'epoch': 1, 'lease': [1, 0, 4]}
    """

    epoch: int = 0
    lease: Lease | None = None

    def holds_of(self, epoch: int) -> bool:
        """Whether its lease is of this epoch or an earlier one."""
        return self.lease is not None and self.lease.epoch <= epoch

    def state(self) -> State:
        """Return what is known."""
        return {"epoch": self.epoch, "lease": [] if self.lease is None else list(astuple(self.lease))}

    @classmethod
    def of(cls, owner: str, state: Mapping[str, Any]) -> Holder:
        """Return the holder that gave `state`."""
        require(owner, state, epoch=int, lease=[int])
        return cls(state["epoch"], Lease(*state["lease"]) if state["lease"] else None)
