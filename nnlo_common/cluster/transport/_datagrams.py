"""Datagrams between the ranks of one host, which anybody on the host may send to.

Abstract sockets have no permissions: any process that lists them can send. So a socket takes only what its
own user has sent with the job's token, which the ranks get over MPI. After the first stray datagram the
kernel drops those without the token before they wake anybody, so that a flood costs this rank nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable

__all__ = ["TOKEN_BYTES", "Datagrams", "new_token"]

_LOG = logging.getLogger(__name__)

TOKEN_BYTES = 16
_CREDENTIALS = struct.Struct("3i")  # of the sender: process, user, group
_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)
# Strays read at once; the kernel holds a few hundred at most.
_MOST_STRAYS = 64
_SEND_AGAIN_S = 1e-3
# Where the kernel cannot filter: after stray datagrams nothing is read for so long, which bounds their cost.
_DEAF_S = 0.1
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


def new_token() -> bytes:
    """Return a token that nobody can guess."""
    return secrets.token_bytes(TOKEN_BYTES)


class Datagrams:
    """Receives this job's datagrams on one socket, and sends to other ranks.

    Args:
        token: the job's token, equal on all its ranks.
        clock: returns the time in seconds.

    Attributes:
        address: what other ranks pass to `send`; empty where the system has no such sockets.
        strays: how many datagrams of others were dropped, not counting those that the kernel dropped.

    Example:
        >>> token = new_token()
        >>> mine, other = Datagrams(token), Datagrams(token)
        >>> other.send(mine.address, b"hello")
        >>> mine.received()
        [b'hello']
        >>> mine.close(), other.close()
        (None, None)
    """

    def __init__(self, token: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._closing = weakref.finalize(self, self._socket.close)
        self.address, self.strays = "", 0
        self._deaf_until_s = -1.0
        self._guarded = False  # whether the kernel filters, or was asked in vain
        if sys.platform == "linux":  # an abstract name: no file, removed with the process
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.address = f"nnlo-{secrets.token_hex(16)}"
            self._socket.bind(f"\0{self.address}")

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for datagrams."""
        return self._socket.fileno()

    @property
    def deaf_s(self) -> float:
        """For how many seconds the socket must not be waited for, because strays would end the wait."""
        return max(0.0, self._deaf_until_s - self._clock()) if self._deaf_until_s > 0 else 0.0

    def received(self, most_strays: int = _MOST_STRAYS) -> list[bytes]:
        """Return the contents of this job's datagrams that have arrived; drop all others.

        Args:
            most_strays: read no further after so many datagrams of others.
        """
        found, strays = [], 0
        with contextlib.suppress(OSError):  # no more to read
            while strays < most_strays:
                data, extra, flags, _ = self._socket.recvmsg(2 * TOKEN_BYTES, _SPACE)
                if self._is_ours(data, extra, flags):
                    found.append(data[TOKEN_BYTES:])
                else:
                    strays += 1
        if strays:
            self._drop(strays)
        return found

    def send(self, address: str, content: bytes = b"", patience_s: float = 0.0) -> None:
        """Send to the rank with this address; do nothing if it cannot be reached.

        Args:
            address: of the other rank.
            content: what `received` returns there.
            patience_s: how long to try while the other rank's queue is full.
        """
        limit_s = self._clock() + patience_s
        with contextlib.suppress(OSError):
            while True:
                try:
                    self._socket.sendto(self._token + content, f"\0{address}")
                except BlockingIOError:
                    if self._clock() >= limit_s:
                        return
                    time.sleep(_SEND_AGAIN_S)
                else:
                    return

    def close(self) -> None:
        """Close the socket; it is closed, too, when nobody has it any more."""
        self._closing()

    def _is_ours(self, data: bytes, extra: list[tuple[int, int, bytes]], flags: int) -> bool:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(extra) != 1:
            return False
        level, kind, content = extra[0]
        if (level, kind, len(content)) != (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, _CREDENTIALS.size):
            return False
        user = _CREDENTIALS.unpack(content)[1]
        return user == os.getuid() and secrets.compare_digest(data[:TOKEN_BYTES], self._token)

    def _drop(self, strays: int) -> None:
        if not self.strays:
            _LOG.warning(
                "another process of this host sends datagrams to this rank's socket; they are dropped, and "
                "harm nothing"
            )
        self.strays += strays
        if not self._guarded:
            self._guarded = True
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _filter(self._token))
                return
        self._deaf_until_s = self._clock() + _DEAF_S


def _filter(token: bytes) -> bytes:
    """Return the program by which the kernel drops datagrams without the token."""
    words = struct.unpack(f"!{TOKEN_BYTES // 4}I", token)
    program = []
    for index, word in enumerate(words):
        to_the_end = 2 * (len(words) - index - 1) + 1
        program += [(_LOAD_WORD, 0, 0, 4 * index), (_JUMP_IF_EQUAL, 0, to_the_end, word)]
    program += [(_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    # The kernel copies the program during the call; until then `_CODE` keeps it in memory.
    _CODE[:] = [ctypes.create_string_buffer(code, len(code))]
    return struct.pack("HP", len(program), ctypes.addressof(_CODE[0]))


_CODE: list[ctypes.Array[ctypes.c_char]] = []
