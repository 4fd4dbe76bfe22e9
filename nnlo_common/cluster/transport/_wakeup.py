"""Wake-up sockets between ranks of one host: a sender ends the receiver's pause at once.

MPI cannot wake a sleeping process, and frequent polling costs a core. So a waiting rank sleeps on a socket,
and a sender that gets no answer writes to it. A wake-up that does not arrive (another host, network namespace
or operating system) does no harm: the pause runs to its limit.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from nnlo_common.cluster.transport._datagrams import Datagrams

__all__ = ["Wakeup"]

# poll(2) rounds its time limit up to this.
_COARSE_S = 1e-3


class Wakeup:
    """This rank's wake-up socket.

    Args:
        token: the job's token; wake-ups without it are dropped.

    Attributes:
        address: what other ranks pass to `wake`; empty where the system has no such sockets.

    Example:
        >>> mine, other = Wakeup(bytes(16)), Wakeup(bytes(16))
        >>> other.wake(mine.address)
        >>> mine.wait(60)  # returns at once
        True
        >>> mine.close(), other.close()
        (None, None)
    """

    def __init__(self, token: bytes) -> None:
        self._datagrams = Datagrams(token)
        self.address = self._datagrams.address
        # select waits for fractions of a millisecond but takes descriptors up to 1023 only; poll takes any,
        # but whole milliseconds only.
        self._fine = self._datagrams.fileno() < 1024
        self._poll = select.poll()
        self._poll.register(self._datagrams, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Sleep until another rank wakes this one, or for `seconds`; return whether it was woken."""
        heard: Sequence[object]
        deaf_s = self._datagrams.deaf_s
        if deaf_s:
            time.sleep(min(seconds, deaf_s))
            return False
        if self._fine:
            heard, _, _ = select.select([self._datagrams], [], [], seconds)
        else:
            if seconds < _COARSE_S:
                time.sleep(seconds)
            heard = self._poll.poll(0 if seconds < _COARSE_S else 1000 * seconds)
        return bool(heard) and bool(self._datagrams.received())

    def wake(self, address: str) -> None:
        """Wake the rank with this address; do nothing if it cannot be reached."""
        self._datagrams.send(address)

    def close(self) -> None:
        """Close the socket."""
        self._datagrams.close()
