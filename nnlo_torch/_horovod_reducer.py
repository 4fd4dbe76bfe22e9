"""Reducer that adds up gradients by Horovod, where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Group, Reducer, Vector

__all__ = ["HorovodReducer"]

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

    def start(self, part: Vector) -> None:
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
