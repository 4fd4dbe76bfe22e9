"""A bell between ranks of one host: it ends a pause at once, so that pauses may be long.

MPI cannot wake a sleeping process, and looking often costs a core even where nothing happens. So a rank
that waits sleeps on a socket, and whoever has sent it something and sees no answer rings. A bell that is
not heard (another host, another network namespace, another operating system) does no harm: the pause
simply lasts its time.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import sys
import time
from collections.abc import Sequence

__all__ = ["Doorbell"]

# What poll rounds its time limit up to.
_COARSE_S = 1e-3


class Doorbell:
    """This rank's bell.

    Attributes:
        address: what others ring; empty where there is no such socket.

    Example:
        >>> mine, other = Doorbell(), Doorbell()
        >>> other.ring(mine.address)
        >>> mine.wait(60)  # returns at once
        True
        >>> mine.close(), other.close()
        (None, None)
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # select waits for fractions of a millisecond but knows descriptors up to 1023 only; poll is the other
        # way round.
        self._fine = self._socket.fileno() < 1024
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.address = ""
        if sys.platform == "linux":  # a name without a file, gone with the process
            self.address = f"nnlo-{secrets.token_hex(16)}"
            self._socket.bind(f"\0{self.address}")

    def wait(self, seconds: float) -> bool:
        """Wait until somebody rings, or for `seconds`; say whether somebody rang."""
        heard: Sequence[object]
        if self._fine:
            heard, _, _ = select.select([self._socket], [], [], seconds)
        else:
            if seconds < _COARSE_S:
                time.sleep(seconds)
            heard = self._poll.poll(0 if seconds < _COARSE_S else 1000 * seconds)
        if heard:
            try:
                while True:  # several may have rung
                    self._socket.recv(1)
            except OSError:
                pass
        return bool(heard)

    def ring(self, address: str) -> None:
        """Wake the rank with this address if it can hear us."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", f"\0{address}")

    def close(self) -> None:
        """Take the bell down."""
        self._socket.close()
