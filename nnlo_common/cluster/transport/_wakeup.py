"""Wake-up sockets between ranks of one host: a sender ends the receiver's pause at once.

MPI cannot wake a sleeping process, and frequent polling costs a core. So a waiting rank sleeps on a socket,
and a sender that gets no answer writes to it. A wake-up that does not arrive (another host, network namespace
or operating system) does no harm: the pause runs to its limit.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import sys
import time
from collections.abc import Sequence

__all__ = ["Wakeup"]

# poll(2) rounds its time limit up to this.
_COARSE_S = 1e-3


class Wakeup:
    """This rank's wake-up socket.

    Attributes:
        address: what other ranks pass to `wake`; empty where the system has no such sockets.

    Example:
        >>> mine, other = Wakeup(), Wakeup()
        >>> other.wake(mine.address)
        >>> mine.wait(60)  # returns at once
        True
        >>> mine.close(), other.close()
        (None, None)
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # select waits for fractions of a millisecond but takes descriptors up to 1023 only; poll takes any,
        # but whole milliseconds only.
        self._fine = self._socket.fileno() < 1024
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.address = ""
        if sys.platform == "linux":  # an abstract name: no file, removed with the process
            self.address = f"nnlo-{secrets.token_hex(16)}"
            self._socket.bind(f"\0{self.address}")

    def wait(self, seconds: float) -> bool:
        """Sleep until another rank wakes this one, or for `seconds`; return whether it was woken."""
        heard: Sequence[object]
        if self._fine:
            heard, _, _ = select.select([self._socket], [], [], seconds)
        else:
            if seconds < _COARSE_S:
                time.sleep(seconds)
            heard = self._poll.poll(0 if seconds < _COARSE_S else 1000 * seconds)
        if heard:
            try:
                while True:  # several ranks may have sent one
                    self._socket.recv(1)
            except OSError:
                pass
        return bool(heard)

    def wake(self, address: str) -> None:
        """Wake the rank with this address; do nothing if it cannot be reached."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", f"\0{address}")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
