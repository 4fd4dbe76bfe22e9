"""Memory that all processes of one user on a host share, found by its name; the last user's end frees it.

It has no name in any file system: the kernel frees it with the last process that has it open, however that
ends, so that a killed job leaves nothing behind.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["HostMemory"]

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
        self.memory = mmap.mmap(-1 if file is None else file, size)
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
