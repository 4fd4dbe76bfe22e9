"""Back-off between polls: none at first, then growing pauses, so that a waiting rank costs little CPU."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from nnlo_common.cluster.transport._datagrams import Datagrams

__all__ = ["Backoff", "LONGEST_S", "Wakeup"]

# -- wake-up sockets between ranks of one host: a sender ends the receiver's pause at once -------------
# MPI cannot wake a sleeping process, and frequent polling costs a core. So a waiting rank sleeps on a
# socket, and a sender that gets no answer writes to it. A wake-up that does not arrive (another host,
# network namespace or operating system) does no harm: the pause runs to its limit.

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


# A short message is answered within this time, so polling without a pause is worth the core.
_SPIN_S = 300e-6
# Afterwards a pause is a tenth of the time waited so far, so a message is seen at most a tenth later,
_PAUSE_PER_WAITED = 0.1
_SHORTEST_PAUSE_S = 20e-6
# and never longer than this, so that it is seen within a millisecond even after hours.
LONGEST_S = 500e-6

# Where ranks share cores, a rank whose message is moving sleeps for so long at most between many polls.
_LONGEST_NAP_S = 50e-6


class Backoff:
    """Pauses between the polls of one wait.

    Args:
        longest_s: the longest pause.
        clock: returns the time in seconds.
        sleep: pauses; returns True if another rank woke it, because a message is about to arrive.
        naps: this host has fewer cores than ranks, so the core that polls without a pause take is another's.

    Example:
        >>> backoff = Backoff(clock=lambda: 0.0)  # no time passes
        >>> backoff.pause()  # returns at once: the wait has only begun
        True
    """

    __slots__ = ("_clock", "_longest_s", "_naps", "_quiet_s", "_sleep", "_start_s")

    def __init__(
        self,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], bool | None] = time.sleep,
        *,
        naps: bool = False,
    ) -> None:
        self._longest_s, self._clock, self._sleep, self._naps = longest_s, clock, sleep, naps
        self._start_s = self._quiet_s = clock()

    def pause(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Pause before the next poll; return whether to poll many times in a row.

        Args:
            hurry: whether a message is moving that needs our polls to arrive.
        """
        waited_s = self._clock() - self._quiet_s
        if not self._naps and (waited_s < _SPIN_S or hurry()):
            os.sched_yield()  # the answering rank may need this core
            return True
        moves = self._naps and hurry()
        longest_s = _LONGEST_NAP_S if moves else self._longest_s
        woken = self._sleep(min(max(waited_s * _PAUSE_PER_WAITED, _SHORTEST_PAUSE_S), longest_s))
        if woken:
            self._quiet_s = self._clock()
        return bool(woken) or moves

    @property
    def waited_s(self) -> float:
        """How long the wait has taken so far."""
        return self._clock() - self._start_s
