"""Test clusters for our tests and yours: no MPI, no sockets, no sleeping, no chance."""

from __future__ import annotations

from nnlo_common.base._public_names import say_public_module
from nnlo_common.testing._memory import InjectedFault, MemoryCluster, MemoryWorld
from nnlo_common.testing._schedules import (
    ByTime,
    Interleaved,
    PendingRequest,
    RandomOrder,
    Replay,
    RoundRobin,
    Schedule,
)
from nnlo_common.testing._training import VirtualRun, train_virtually
from nnlo_common.testing._virtual import ServerDeath, VirtualCluster, VirtualTree, tree_machines

__all__ = [
    "ByTime",
    "InjectedFault",
    "Interleaved",
    "MemoryCluster",
    "MemoryWorld",
    "PendingRequest",
    "RandomOrder",
    "Replay",
    "RoundRobin",
    "Schedule",
    "ServerDeath",
    "VirtualCluster",
    "VirtualRun",
    "VirtualTree",
    "train_virtually",
    "tree_machines",
]

say_public_module(__name__, __all__)
