"""Decoded samples kept in memory, one copy for all ranks of a host."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._process_memory import free_memory
from nnlo_common.data._source import Array, Field

__all__ = ["CACHES", "CacheKind", "HostMemory", "MemoryCache", "cached_mb", "memory_cache"]

# -- memory that all processes of one user on a host share, found by its name; the last user's end frees
# it.
# It has no name in any file system: the kernel frees it with the last process that has it open, however
# that ends, so that a killed job leaves nothing behind.

#: How long to wait while another process makes the memory; later this one makes its own.
_WAIT_S = 5.0
_LOOK_EVERY_S = 0.002
_MAPS = "/proc"


class HostMemory:
    r"""A piece of memory with a name, zero at first.

    Processes of other users, of another container or of a system without `memfd_create` do not find it; each
    of them gets a piece of its own.

    Args:
        name: equal for all that share it; up to 200 characters.
        size: in bytes, which is part of what must be equal.

    Raises:
        OSError: there is no room for it in this process.

    Attributes:
        memory: the bytes.
        shared: whether other processes can find it.

    Example:
        >>> one, other = HostMemory("example", 4096), HostMemory("example", 4096)
        >>> one.memory[:2] = b"ab"
        >>> bytes(other.memory[:3])
        b'ab\x00'
        >>> one.close(), other.close()
        (None, None)
    """

    def __init__(self, name: str, size: int) -> None:
        self._file: int | None = None
        self._threads, self._pid = threading.Lock(), os.getpid()
        file = _shared(f"{name}-{size}", size)
        self.shared = file is not None
        try:
            self.memory = mmap.mmap(-1 if file is None else file, size)
        except BaseException:
            if file is not None:
                os.close(file)
            raise
        self._release: weakref.finalize[..., HostMemory] | None = None
        if file is not None:
            self._file, self._release = file, weakref.finalize(self, os.close, file)

    @contextmanager
    def holding(self, place: int) -> Iterator[None]:
        """Hold the lock of this number, which no other process has meanwhile; a dead process loses it."""
        if self._pid != os.getpid():  # forked: whoever held the parent's lock is not here
            self._threads, self._pid = threading.Lock(), os.getpid()
        with self._threads:
            held = self._file is not None and _locked(self._file, place, fcntl.F_WRLCK)
            try:
                yield
            finally:
                if held and self._file is not None:
                    _locked(self._file, place, fcntl.F_UNLCK)

    def close(self) -> None:
        """Give the memory back; it stays mapped while arrays of it are in use."""
        self._file = None
        if self._release is not None:
            self._release()
        with suppress(BufferError):  # arrays of it are in use; the last one unmaps it
            self.memory.close()


def _shared(name: str, size: int) -> int | None:
    """Return an open file of the memory of this name, found or made; None: it cannot be shared here."""
    if not hasattr(os, "memfd_create"):
        return None
    with _alone(name):
        found = _found(name, size)
        if found is not None:
            return found
        try:
            made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # not permitted here
            return None
        try:
            os.ftruncate(made, size)
            # Nobody can shorten it, which would end every process that reads it.
            fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            os.close(made)
            return None
        return made


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Let one process of this user at a time look for memory and make it.

    The kernel frees an abstract name with its process. Who takes the name for longer delays others a few
    seconds; they then have memory of their own, which costs space, and no more.
    """
    until_s = time.monotonic() + _WAIT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
        while True:
            try:
                taken.bind(f"\0nnlo-memory-{os.getuid()}-{name}"[:100])
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until_s:
                    break
            time.sleep(_LOOK_EVERY_S)
        yield


def _found(name: str, size: int) -> int | None:
    """Return the memory of this name opened anew, if a process of this user has it open."""
    wanted, own = f"/memfd:{name} (deleted)", os.getuid()
    for process in _processes(own):
        try:
            with os.scandir(f"{_MAPS}/{process}/fd") as entries:
                paths = [one.path for one in entries]
        except OSError:  # has ended, or may not be looked at
            continue
        for path in paths:
            with suppress(OSError):
                if os.readlink(path) != wanted:  # noqa: PTH115 - there may be many
                    continue
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                status = os.fstat(file)
                if status.st_uid == own and status.st_size == size and _is_sealed(file):
                    return file
                os.close(file)
    return None


def _processes(user: int) -> Iterator[str]:
    """Yield the numbers of this user's processes."""
    with suppress(OSError), os.scandir(_MAPS) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == user:
                    yield entry.name


def _is_sealed(file: int) -> bool:
    seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    return bool(seals & fcntl.F_SEAL_SHRINK)


def _locked(file: int, place: int, kind: int) -> bool:
    """Set the lock of a byte, waiting for it; False where the system has no such locks."""
    # Locks of open files, not of processes: they exclude other sources of this process, too.
    asked = struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, asked)
    except (OSError, AttributeError):
        return False
    return True


CacheKind: TypeAlias = Literal["auto", "memory", "none"]
CACHES: Sequence[CacheKind] = ("auto", "memory", "none")

#: The part of a host's free memory that decoded samples may take unasked.
_UNASKED = 4
#: The memory that stays free, as a part of all: where it is reached, further samples are decoded each time.
_RESERVE = 20
# Bytes of a block: each has a lock and a mark.
_BLOCK_BYTES = 2**20
_ALIGNED = 4096
_PRESENT = 1
#: Reads samples [start, stop) into arrays.
_Decode: TypeAlias = Callable[[int, int, Sequence[Array]], None]

_CACHES: weakref.WeakSet[MemoryCache]


class MemoryCache:
    """The samples of a source, each decoded by the first process of the host to need it.

    All samples have a place, but only those take memory that were read. A block is decoded under its lock;
    the mark that it is present comes last. So a process that dies in between leaves a block that the next
    one decodes again.

    Args:
        facts: all that determines the samples: equal on all ranks that share them.
        fields: of a sample.
        lengths: the number of samples of each part.
        grain: samples to decode together, counted from the start of a part.

    Attributes:
        arrays: one for each field, with all samples; those not yet decoded are zeros.
    """

    def __init__(self, facts: str, fields: Sequence[Field], lengths: Sequence[int], grain: int) -> None:
        row_bytes = max(sum(field.row_bytes for field in fields), 1)
        rows = -(-max(_BLOCK_BYTES // row_bytes, 1) // grain) * grain
        ends = np.cumsum([0, *lengths]).tolist()
        cuts = [np.arange(start, stop, rows) for start, stop in pairwise(ends)]
        self._starts: npt.NDArray[np.int64] = np.concatenate([*cuts, [ends[-1]]]).astype(np.int64)
        places, at = [], _aligned(len(self._starts))
        for field in fields:
            places.append(at)
            at = _aligned(at + field.row_bytes * ends[-1])
        shape = [(field.name, field.shape, field.dtype.str) for field in fields]
        text = f"{facts}\n{shape}\n{self._starts.tolist()}"
        name = f"nnlo-samples-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        self._name, self._size, self._row_bytes = name, max(at, _ALIGNED), row_bytes
        self._fields, self._places = list(fields), places
        self._begin()

    def read(self, start: int, stop: int, out: Sequence[Array], decode: _Decode) -> None:
        """Copy the samples [start, stop) into arrays, after decoding those that are absent."""
        if self.load(start, stop, decode):
            for array, into in zip(self.arrays, out, strict=True):
                into[:] = array[start:stop]
        else:
            decode(start, stop, out)

    def load(self, start: int, stop: int, decode: _Decode) -> bool:
        """Decode what is absent of the samples [start, stop); return False where memory is short."""
        try:
            self._opened()
        except OSError:
            return False
        block = bisect_right(self._starts, start) - 1
        while start < stop:
            if not self._marks[block] and not self._decoded(block, decode):
                return False
            block += 1
            start = int(self._starts[block])
        return True

    @property
    def used_mb(self) -> float:
        """How much memory the samples take, on the host."""
        if self._host is None:
            return 0.0
        sizes = np.diff(self._starts)
        return float(sizes[self._marks == _PRESENT].sum() * self._row_bytes / 1e6)

    def close(self) -> None:
        """Give the memory back."""
        host = self._host
        self._begin()
        if host is not None:
            host.close()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for own in ("_host", "_marks", "arrays"):  # another process finds the same memory
            del state[own]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _begin(self) -> None:
        self._host: HostMemory | None = None
        self.arrays: list[Array] = []
        self._marks: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        _CACHES.discard(self)

    def _opened(self) -> HostMemory:
        """Find or make the memory: when it is first used, so that a server has none."""
        if self._host is None:
            host, rows = HostMemory(self._name, self._size), int(self._starts[-1])
            self._marks = np.frombuffer(host.memory, np.uint8, len(self._starts) - 1)
            for field, place in zip(self._fields, self._places, strict=True):
                numbers = np.frombuffer(host.memory, field.dtype, math.prod(field.shape) * rows, place)
                self.arrays.append(numbers.reshape((rows, *field.shape)))
            self._host = host
            _CACHES.add(self)
        return self._host

    def _decoded(self, block: int, decode: _Decode) -> bool:
        start, stop = map(int, self._starts[block : block + 2])
        with self._opened().holding(block):
            if self._marks[block]:  # another process was faster
                return True
            free, total = free_memory()
            if free - (stop - start) * self._row_bytes < total // _RESERVE:
                return False
            decode(start, stop, [array[start:stop] for array in self.arrays])
            # Taking and giving the locks orders this after the numbers, for every processor.
            self._marks[block] = _PRESENT
        return True


_CACHES = weakref.WeakSet()


def memory_cache(
    kind: CacheKind,
    facts: Callable[[], str],
    fields: Sequence[Field],
    lengths: Sequence[int],
    grain: int,
    *,
    encoded: bool,
) -> MemoryCache | None:
    """Return the cache that was asked for; None: there is none.

    Args:
        kind: "memory", "none", or "auto": where samples are `encoded` and take up to a quarter of the free
            memory of the host.
        facts: returns those of `MemoryCache`, which take time to look up, if there is one.
        fields: as for `MemoryCache`, also the others.
        lengths: of the parts.
        grain: of the source.
        encoded: whether reading costs more than copying.

    Raises:
        ConfigurationError: an unknown kind, or there is not so much memory.
    """
    if kind not in CACHES:
        raise ConfigurationError(
            f"cache={kind!r} is not possible; give one of {', '.join(map(repr, CACHES))}"
        )
    if kind == "none" or (kind == "auto" and not encoded):
        return None
    needed = sum(field.row_bytes for field in fields) * sum(lengths)
    free, total = free_memory()
    if kind == "auto" and needed > free // _UNASKED:
        return None
    if needed > free - total // _RESERVE:
        raise ConfigurationError(
            f'cache="memory" needs {needed / 2**30:.1f} GiB for the decoded samples, but {free / 2**30:.1f} '
            'GiB are free on this host; use cache="none", name fewer files or columns, or use more hosts'
        )
    return MemoryCache(facts(), fields, lengths, grain)


def cached_mb() -> float:
    """Return how much memory the caches that this process uses take on the host."""
    return sum(one.used_mb for one in list(_CACHES))


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED
