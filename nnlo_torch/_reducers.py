"""Reducers that add up gradients by torch.distributed, or by Horovod where it is installed."""

from __future__ import annotations

import importlib.util
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Group, Reducer, Vector

__all__ = ["HorovodReducer", "TorchReducer"]

# -- torch.distributed, without making it the process's default group -----------------------------------

_TIMEOUT = timedelta(minutes=30)
_store: Any = getattr(dist, "TCPStore", None)  # torch's type stubs do not export it


class TorchReducer(Reducer):
    """Sums by gloo, between processes that find each other by an address that MPI has brought them.

    `torch.distributed.init_process_group` is not called: whatever looks for a default group, as Keras does,
    would then act on it.

    Args:
        group: the ranks.

    Raises:
        ConfigurationError: this torch has no gloo; raised on all ranks.
    """

    name, overlaps = "torch", True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if not dist.is_available() or not dist.is_gloo_available():
            raise ConfigurationError(
                f"all_reduce='torch' needs torch.distributed with gloo, which torch {torch.__version__} here "
                "does not have; use another build of torch, or all_reduce='mpi'"
            )
        size, leads = len(group.ranks), group.index == 0
        hosts = {one.decode() for one in group.gather_bytes(socket.gethostname().encode())}
        own = "localhost" if len(hosts) == 1 else socket.gethostname()
        store = _store(own, 0, size, True, _TIMEOUT, wait_for_workers=False) if leads else None
        port = 0 if store is None else store.port
        host, number = group.gather_bytes(f"{own} {port}".encode())[0].decode().split()
        self._store = store or _store(host, int(number), size, False, _TIMEOUT)
        # torch's type stubs leave out most methods of this class.
        self._processes: Any = dist.ProcessGroupGloo(self._store, group.index, size, _TIMEOUT)
        self._under_way: list[dist.Work] = []

    def start(self, part: Vector, at: int = 0) -> None:  # noqa: ARG002 - all places are alike
        """Begin to add up the vector."""
        self._under_way.append(self._processes.allreduce([torch.from_numpy(part)]))

    def finish(self) -> None:
        """Wait for all sums."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.wait()

    def close(self) -> None:
        """End the connections."""
        self._processes.barrier().wait()  # the lead's store must outlive the last sum of the others
        del self._processes, self._store


# -- Horovod, where it is installed ---------------------------------------------------------------------

_RECIPE = (
    "docs/pytorch.md says how to build it for a current PyTorch; or use all_reduce='mpi', which needs nothing"
)


class HorovodReducer(Reducer):
    """Sums by Horovod over MPI; it takes the group for its world.

    Args:
        group: the ranks.

    Raises:
        ConfigurationError: the ranks are threads, or Horovod was built without MPI or PyTorch.
    """

    name, overlaps = "horovod", True

    @classmethod
    def check(cls) -> None:
        """Refuse Horovod if it is not installed."""
        if importlib.util.find_spec("horovod") is None:
            raise ConfigurationError(
                f"all_reduce='horovod' needs Horovod, which is not installed here; {_RECIPE}"
            )

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.check()
        comm = group.communicator()
        if comm is None:
            raise ConfigurationError(
                "all_reduce='horovod' needs a process for each rank, but these ranks are threads; use mpiexec"
            )
        try:
            import horovod.torch as hvd

            hvd.init(comm=comm)
        except (ImportError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(
                f"all_reduce='horovod': this Horovod does not work here ({reason}); {_RECIPE}"
            ) from error
        self._horovod: Any = hvd
        self._under_way: list[Any] = []

    def start(self, part: Vector, at: int = 0) -> None:  # noqa: ARG002 - all places are alike
        """Begin to add up the vector; Horovod finds its counterparts by the name."""
        name = f"nnlo.{len(self._under_way)}"
        handle = self._horovod.allreduce_async_(torch.from_numpy(part), name=name, op=self._horovod.Sum)
        self._under_way.append(handle)

    def finish(self) -> None:
        """Wait for all sums."""
        under_way, self._under_way = self._under_way, []
        for handle in under_way:
            self._horovod.synchronize(handle)

    def close(self) -> None:
        """End Horovod, so that a later training can have other groups."""
        self._horovod.shutdown()
