"""Which samples a worker takes: the order of an epoch, fixed shares of it, and leases of parts of it."""

from __future__ import annotations

from nnlo_common.data._lease import WAIT, Answer, Lease, Waiting
from nnlo_common.data._leases import Leases
from nnlo_common.data._order import epoch_order, share

__all__ = ["Answer", "epoch_order", "Lease", "Leases", "share", "WAIT", "Waiting"]
