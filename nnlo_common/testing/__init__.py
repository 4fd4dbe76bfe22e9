"""Fakes and clusters for our tests and for yours: no MPI, no sockets, no sleeping, no luck."""

from __future__ import annotations

from nnlo_common.testing._memory import InjectedFault, MemoryCluster, MemoryWorld
from nnlo_common.testing._schedules import (
    ByTime,
    Interleaved,
    RandomOrder,
    Replay,
    RoundRobin,
    Schedule,
    Waiting,
)
from nnlo_common.testing._training import VirtualRun, train_virtually
from nnlo_common.testing._virtual import VirtualCluster

__all__ = [
    "ByTime",
    "InjectedFault",
    "Interleaved",
    "MemoryCluster",
    "MemoryWorld",
    "RandomOrder",
    "Replay",
    "RoundRobin",
    "Schedule",
    "VirtualCluster",
    "VirtualRun",
    "Waiting",
    "train_virtually",
]
