"""Ways in which the ranks of a group add up their gradients: `all_reduce=` of the wrappers.

A new way is its name and its line here, and its reducer.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Layout, Vector, without_absent
from nnlo_common.cluster.transport._endpoint import Group
from nnlo_common.cluster.transport._shared_memory import shared_memory
from nnlo_common.protocol._wire import from_bfloat16, to_bfloat16

__all__ = [
    "ALL_REDUCES",
    "BFloat16Reducer",
    "MPIReducer",
    "Reducer",
    "SharedReducer",
    "ThreadReducer",
    "Way",
    "WayName",
    "reducer_of",
    "ways_of",
]

# -- reducers: ways to add up the gradients of the ranks of a group, behind one small interface --------

# Half a megabyte to two are equally fast: the pieces of all ranks fit the cache together.
_PIECE = 1 << 18
# Of messages to all others, which are cut into as many as there are ranks.
_LONG_PIECE = 1 << 22
# With more ranks each adds up a part of every piece; with fewer, one wait less for each other is worth more.
_FEW = 3


class Reducer:
    """Adds up vectors over a group; all its ranks call each method alike, in the same order.

    Attributes:
        name: its name in `all_reduce=`.
        overlaps: whether sums are made while the caller computes, so that it should start them early.

    Args:
        group: the ranks.
    """

    name: ClassVar[str]
    overlaps: ClassVar[bool] = False

    def __init__(self, group: Group) -> None:
        self._group = group

    @classmethod
    def check(cls) -> None:
        """Refuse it if this machine lacks what it needs; nothing is needed by default."""

    def fit(self, layout: Layout) -> None:
        """Learn what a gradient is made of; by default it does not matter."""

    def start(self, part: Vector, at: int = 0) -> None:
        """Begin to replace this vector by its sum over all ranks, with the same bits on each.

        Args:
            part: of a gradient.
            at: where it begins there.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Return once all vectors that were started hold their sums; by default `start` has done it."""

    def state(self) -> Vector:
        """Return what its next sum depends on; by default nothing."""
        return np.zeros(0, np.float32)

    def load(self, state: Vector) -> None:
        """Go on from what `state` returned; begin anew if another way did."""

    def close(self) -> None:
        """Release its resources, before those of the group (collective); by default it has none."""


class MPIReducer(Reducer):
    """Sums by the MPI library, in pieces that fit the cache.

    Args:
        group: the ranks.
    """

    name = "mpi"

    def start(self, part: Vector, at: int = 0) -> None:  # noqa: ARG002 - all places are alike
        """Replace the vector by its sum."""
        self._group.add_up(part)


class SharedReducer(Reducer):
    """Sums in memory that all ranks of a host see: each copies its piece there, and adds up those of all.

    Args:
        group: the ranks.

    Raises:
        ConfigurationError: there is no such memory; raised on all ranks of the group.
    """

    name = "shared"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._turn = 0
        # Two places for pieces, in turn: a rank writes the next one while others still read the last.
        self._memory = [memory.reshape(2, _PIECE) for memory in shared_memory(group, 2 * _PIECE)]

    def start(self, part: Vector, at: int = 0) -> None:  # noqa: ARG002 - all places are alike
        """Replace the vector by its sum."""
        if len(self._memory) == 1:
            return  # the last rank of its group
        for start in range(0, part.size, _PIECE):
            self._add_up(part[start : start + _PIECE])

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.clear()

    def _add_up(self, piece: Vector) -> None:
        pieces: list[Vector] = [memory[self._turn, : piece.size] for memory in self._memory]
        self._turn = 1 - self._turn
        np.copyto(pieces[self._group.index], piece)
        self._group.barrier()
        if len(pieces) <= _FEW:
            _add(pieces, piece)
            return
        index, size = self._group.index, len(pieces)
        mine = slice(piece.size * index // size, piece.size * (index + 1) // size)
        _add([one[mine] for one in pieces], pieces[0][mine])
        self._group.barrier()
        np.copyto(piece, pieces[0])


def _add(vectors: Sequence[Vector], total: Vector) -> None:
    """Put the sum of the vectors, in their order, into `total`, which may be the first."""
    np.add(vectors[0], vectors[1], out=total)
    for one in vectors[2:]:
        np.add(total, one, out=total)


class BFloat16Reducer(Reducer):
    """Sums of numbers that travel in 16 bits: half of the bytes, and nothing is lost for good.

    Each rank adds up a part of all gradients, in float32, and shows the others the sum. What rounding takes
    from a gradient, and from a sum that this rank has made, is added to its next gradient; so all sums
    together are those of float32, up to the last residuals.

    Args:
        group: the ranks.
    """

    name = "bfloat16"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._residual: Vector = np.zeros(0, np.float32)
        self._room, self._halves = np.zeros((2, 0), np.float32), np.zeros(0, np.uint16)
        self._marks: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def fit(self, layout: Layout) -> None:
        """Make room for what rounding takes; marks say whether there is a gradient, and have no rest."""
        self._residual = np.zeros(layout.size, np.float32)
        self._marks = layout.unused_marks(slice(0, layout.size))

    def start(self, part: Vector, at: int = 0) -> None:
        """Replace the vector by its sum."""
        if len(self._group.ranks) == 1:
            return
        residual = self._residual[at : at + part.size]
        first, end = np.searchsorted(self._marks, [at, at + part.size])
        waits = without_absent([residual], self._marks[first:end] - at, part)
        with waits, np.errstate(invalid="ignore", over="ignore"):  # others tell of a step that is not finite
            for start in range(0, part.size, _LONG_PIECE):
                stop = start + _LONG_PIECE
                self._add_up(part[start:stop], residual[start:stop])
        self._residual[self._marks] = 0

    def state(self) -> Vector:
        """Return what rounding has taken from the gradients."""
        return self._residual.copy()

    def load(self, state: Vector) -> None:
        """Go on from there."""
        if state.size == self._residual.size:
            np.copyto(self._residual, state)

    def _add_up(self, piece: Vector, residual: Vector) -> None:
        size, index, count = len(self._group.ranks), self._group.index, piece.size
        width = -(-count // size)
        if self._halves.size < size * width:
            self._room = np.empty((2, size * width), np.float32)
            self._halves = np.empty(size * width, np.uint16)
        (mine, spare), halves = self._room[:, : size * width], self._halves[: size * width]
        np.add(piece, residual, out=mine[:count])
        mine[count:] = 0
        to_bfloat16(mine, halves, spare)
        _keep(mine[:count], residual)
        dealt = self._group.deal(halves.reshape(size, width))
        total, other = self._room[:, :width]  # nothing else needs them now
        total.fill(0)
        for halves_of in dealt:
            from_bfloat16(halves_of, other)
            np.add(total, other, out=total)
        to_bfloat16(total, halves[:width], other)
        from_bfloat16(self._group.show(halves[:width]).reshape(-1), spare)
        np.copyto(piece, spare[:count])
        place = residual[index * width : (index + 1) * width]
        _keep(place + total[: place.size], place)


def _keep(lost: Vector, residual: Vector) -> None:
    """Keep what rounding has taken; of a step that is not finite nothing can be kept."""
    np.copyto(residual, lost)
    if not np.isfinite(lost.sum()):
        np.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


class ThreadReducer(Reducer):
    """Sums by the MPI library in a thread, while the caller computes.

    Args:
        group: the ranks; the thread has a communicator of its own.

    Raises:
        ConfigurationError: the MPI library lets only one thread call it.
    """

    name, overlaps = "thread", True

    def __init__(self, group: Group) -> None:
        super().__init__(group.twin())
        self._thread = ThreadPoolExecutor(1, "nnlo-all-reduce")
        self._started: list[Future[None]] = []

    def start(self, part: Vector, at: int = 0) -> None:  # noqa: ARG002 - all places are alike
        """Give the vector to the thread."""
        self._started.append(self._thread.submit(self._group.add_up, part))

    def finish(self) -> None:
        """Wait for the thread; raise what it has met."""
        started, self._started = self._started, []
        for one in started:
            one.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
        self._group.close()


_LOG = logging.getLogger(__name__)

WayName: TypeAlias = Literal["auto", "mpi", "bfloat16", "shared", "thread", "torch", "horovod"]


@dataclass(frozen=True)
class Way:
    """A way to add up the gradients of a group.

    Attributes:
        text: what it is.
        home: the module and class of its reducer; empty: the choice is made among others.
        framework: the only package whose wrappers have it; empty: all.
        lasts: the others go on when a rank dies in the middle of a sum.
    """

    text: str
    home: str = ""
    framework: str = ""
    lasts: bool = False

    @property
    def reducer(self) -> type[Reducer]:
        """The class of its reducer; imported when it is used."""
        module, _, name = self.home.partition(":")
        return cast(type[Reducer], getattr(importlib.import_module(module), name))

    def check(self) -> None:
        """Refuse it where what it needs is missing, before ranks meet."""
        if self.framework:
            self.reducer.check()


_OURS, _TORCH = "nnlo_common.training._all_reduce", "nnlo_torch"

#: All ways, and what they are.
ALL_REDUCES: Mapping[str, Way] = {
    "auto": Way("the fastest of 'shared' and 'mpi' that works here", lasts=True),
    "mpi": Way("the MPI library, in pieces", f"{_OURS}:MPIReducer", lasts=True),
    "bfloat16": Way("the MPI library, in 16 bits a number", f"{_OURS}:BFloat16Reducer"),
    "shared": Way("memory that all ranks of a host see", f"{_OURS}:SharedReducer", lasts=True),
    "thread": Way(
        "the MPI library, in a thread while the backward pass runs", f"{_OURS}:ThreadReducer", _TORCH
    ),
    "torch": Way("torch.distributed, with gloo", "nnlo_torch._reducers:TorchReducer", _TORCH),
    "horovod": Way("Horovod", "nnlo_torch._reducers:HorovodReducer", _TORCH),
}


def ways_of(framework: str) -> tuple[str, ...]:
    """Return the names of the ways that a package's wrappers have."""
    return tuple(name for name, way in ALL_REDUCES.items() if way.framework in ("", framework))


def reducer_of(name: WayName, group: Group, *, one_host: bool) -> Reducer:
    """Return the reducer of a group, and show the choice (collective over the group).

    Args:
        name: as in `ALL_REDUCES`.
        group: the ranks.
        one_host: whether all ranks of the group are processes of one host.

    Raises:
        ConfigurationError: it cannot be had.
    """
    reason = ""
    reducer: Reducer | None = None
    if name == "shared" or (name == "auto" and one_host):
        try:
            reducer = SharedReducer(group)
        except ConfigurationError as error:  # raised on all ranks of the group
            reason = f", because {error}"
    elif name != "auto":
        reducer = ALL_REDUCES[name].reducer(group)
    reducer = MPIReducer(group) if reducer is None else reducer
    if group.index == 0:
        _LOG.log(
            logging.WARNING if reason and name != "auto" else logging.INFO,
            "the gradients of ranks %s are added up by %s (all_reduce=%r)%s",
            list(group.ranks),
            ALL_REDUCES[reducer.name].text,
            reducer.name,
            reason,
        )
    return reducer
