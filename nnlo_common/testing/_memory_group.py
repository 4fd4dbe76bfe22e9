"""Group of threads as ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector
from nnlo_common.cluster.transport._endpoint import Numbers

__all__ = ["MemoryGroup"]


class SharedItems(Protocol):
    """What ranks bring to operations of their groups; the cluster has it."""

    def share(self, key: Hashable, rank: int, item: object) -> None:
        """Bring something to an operation of a group."""

    def shared(
        self, key: Hashable, ranks: Sequence[int], readers: int, timeout_s: float | None = None
    ) -> list[Any] | None:
        """Return what these ranks have brought to an operation; None after `timeout_s`."""


class RankInside(Protocol):
    """One rank of the cluster."""

    @property
    def rank(self) -> int:
        """Its number."""

    def reach(self, point: str) -> None:
        """Reach a named point of the program."""


class MemoryGroup:
    """The ranks of one logical worker.

    Args:
        cluster: the cluster.
        world: this rank's world.
        ranks: the numbers of its ranks in the training.
        inside: their numbers in the cluster.
        channel: names the group.
    """

    def __init__(
        self,
        cluster: SharedItems,
        world: RankInside,
        ranks: Sequence[int],
        inside: Sequence[int],
        channel: Hashable,
    ) -> None:
        self._cluster, self._world, self._inside = cluster, world, tuple(inside)
        self._channel = channel, self._inside
        self.ranks, self.index = tuple(ranks), self._inside.index(world.rank)
        self._turn = self._twins = 0

    def gather(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks, a row for each."""
        self._world.reach("gather in group")
        rows: Numbers = np.stack(self._everyone(numbers.copy()))
        return rows

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by index."""
        self._world.reach("gather bytes in group")
        return self._everyone(data)

    def add_up(self, vector: Vector) -> None:
        """Replace the vector by the sum over all ranks, added in their order."""
        self._world.reach("add up in group")
        first, *others = self._everyone(vector.copy())
        np.copyto(vector, first)
        for other in others:
            vector += other

    def broadcast(self, data: npt.NDArray[np.uint8]) -> MemoryBroadcast:
        """Begin to copy the lead's bytes into those of the others."""
        self._world.reach("broadcast in group")
        key = self._next()
        if self.index == 0:
            self._cluster.share(key, self._inside[0], data.copy())
        return MemoryBroadcast(self._cluster, key, self._inside, data)

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self._world.reach("barrier in group")
        self._everyone(None)

    def twin(self) -> MemoryGroup:
        """Return another group of the same ranks, which another thread may use."""
        self._twins += 1
        channel = ("twin", self._twins, self._channel)
        return MemoryGroup(self._cluster, self._world, self.ranks, self._inside, channel)

    def communicator(self) -> None:
        """Return None: the ranks are threads."""

    def close(self) -> None:
        """Do nothing: a group holds no resources."""

    def _next(self) -> Hashable:
        self._turn += 1
        return self._channel, self._turn

    def _everyone(self, item: Any) -> list[Any]:
        key = self._next()
        self._cluster.share(key, self._world.rank, item)
        everyone = self._cluster.shared(key, self._inside, len(self._inside))
        assert everyone is not None  # there is no time limit
        return everyone


class MemoryBroadcast:
    """A broadcast under way."""

    def __init__(
        self, cluster: SharedItems, key: Hashable, ranks: Sequence[int], data: npt.NDArray[np.uint8]
    ) -> None:
        self._cluster, self._key, self._ranks, self._data = cluster, key, ranks, data

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete here; False after `timeout_s`."""
        brought = self._cluster.shared(self._key, self._ranks[:1], len(self._ranks), timeout_s)
        if brought is not None:
            np.copyto(self._data, brought[0])
        return brought is not None
