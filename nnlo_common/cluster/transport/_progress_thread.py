"""Progress thread: moves a worker's messages while the worker computes.

MPI moves long messages only inside an MPI call, and a computing worker makes none. With `lag` of 1 or more
the worker need not wait for a reply, so this thread calls MPI meanwhile and hides the round trip.

Requirements that shaped this module:

* The inner endpoint has one holder at a time: the worker from its first call to `flush`, the thread from
  `flush` to the worker's next call. One lock hands it over; the inner endpoint knows nothing of threads.
* The thread only moves bytes and orders messages. The worker applies them where it would without a thread, so
  the numbers are the same.
* Computing comes first: the thread sleeps on the wake-up socket, polls rarely, holds the interpreter for
  microseconds at a time, and stops polling while no message is in flight.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Protocol

from nnlo_common.base._flat_vector import Apart, Frame, PartWork, Vector
from nnlo_common.cluster.transport._backoff import LONGEST_S, Wakeup
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import Event, Message

__all__ = ["OverlappedEndpoint", "PolledEndpoint"]

# No reply comes sooner.
_SHORTEST_PAUSE_S = 100e-6
# Each pause is as long as all before it together, so a reply costs a handful of polls.
_PAUSE_PER_WAITED = 1.0
# Waking the thread costs more than a timed wait, so it stays awake this long after the last message.
_LINGER_S = 20e-3
# Waking the thread and sharing the interpreter costs the worker up to 0.1 ms. For steps shorter than this the
# worker reads the reply itself: it is short, and the server has answered meanwhile.
_BRIEF_S = 2e-3
_BRIEF_PAUSE_S = 10e-3
# Weight of the latest absence in the running mean, and the longest absence counted.
_ABSENCE_WEIGHT = 0.25
_LONGEST_ABSENCE_S = 10e-3
# Limit on joining the thread; it ends within a pause unless one call copies many gigabytes.
_STOP_S = 60.0


class PolledEndpoint(Endpoint, Protocol):
    """An endpoint that a second thread can poll."""

    wakeup: Wakeup
    #: The longest pause between polls while a reply is awaited.
    longest_s: float
    #: Whether all peers are on this host; messages from other hosts need several polls, even short ones.
    near: bool

    def poll(self) -> bool:
        """Progress sends and receives; return whether any is still in flight."""

    @property
    def busy(self) -> bool:
        """Whether a message is in flight, as known without a poll."""

    @property
    def leaving(self) -> bool:
        """Whether a send was incomplete at the last poll; no peer wakes us when it completes."""


class OverlappedEndpoint:
    """An endpoint that a thread polls between `flush` and the owner's next call.

    An error in the thread is raised by the owner's next call and by every later one.

    Attributes:
        polls: how often the thread has polled.

    Args:
        inner: the endpoint to poll; no other code may use it from now on.
        clock: returns the time in seconds.
    """

    def __init__(self, inner: PolledEndpoint, clock: Callable[[], float] = time.perf_counter) -> None:
        self._inner, self._clock = inner, clock
        self.polls = 0
        self._error: BaseException | None = None
        self._stopping = False
        self._owned = True  # the owner uses the endpoint and holds the lock
        self._lock = threading.Lock()
        self._lock.acquire()
        self._handed_over_s = clock()  # when `flush` handed it to the thread
        self._absence_s = _LONGEST_ABSENCE_S  # running mean of the owner's absences
        self._asleep = False  # the thread waits for the wake lock, or is about to
        self._wake_lock = threading.Lock()
        self._wake_lock.acquire()
        self._thread = threading.Thread(target=self._run, name="nnlo-progress", daemon=True)
        self._thread.start()
        # The thread must leave MPI before MPI_Finalize, however the program ends.
        atexit.register(self.stop)

    def send(
        self, peer: int, message: Message, frame: Frame | None = None, fill: PartWork | None = None
    ) -> None:
        """Send `message`."""
        self._take_over()
        self._inner.send(peer, message, frame, fill)

    def send_ahead(self, peer: int, shard: int, vector: Vector, start: int, apart: Apart = ()) -> None:
        """Send what lies behind `start` ahead of its message; the thread moves it while the rest is made."""
        self._take_over()
        self._inner.send_ahead(peer, shard, vector, start, apart)
        self.flush()

    def withdraw(self, peer: int, shard: int) -> None:
        """Let what was sent ahead count for nothing."""
        self._take_over()
        self._inner.withdraw(peer, shard)

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None after `timeout_s`."""
        self._take_over()
        return self._inner.receive(timeout_s)

    def release(self, peer: int, frame: Frame) -> None:
        """Release the memory of a message."""
        self._take_over()
        self._inner.release(peer, frame)

    def abandon(self, peer: int) -> None:
        """Never wait for this peer again."""
        self._take_over()
        self._inner.abandon(peer)

    def flush(self) -> None:
        """Hand the endpoint to the thread if a message is in flight."""
        if self._stopping:
            self._take_over()
            self._inner.flush()
        elif self._owned and self._inner.busy:
            self._owned = False
            self._handed_over_s = self._clock()
            self._lock.release()
            if self._asleep:  # read after releasing the lock; see _run
                self._wake()

    def close(self) -> None:
        """End the thread, complete all sends, release all memory."""
        self.stop()
        self._take_over()
        self._inner.close()

    def stop(self) -> None:
        """End the thread; the owner then polls the endpoint itself."""
        atexit.unregister(self.stop)
        self._stopping = True
        self._wake()
        self._inner.wakeup.wake(self._inner.wakeup.address)
        self._thread.join(_STOP_S)

    def _take_over(self) -> None:
        """Take the endpoint back, after the thread's current poll."""
        if not self._owned:
            self._lock.acquire()
            self._owned = True
            absence_s = min(self._clock() - self._handed_over_s, _LONGEST_ABSENCE_S)
            self._absence_s += _ABSENCE_WEIGHT * (absence_s - self._absence_s)
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._wake_lock.locked():
            self._wake_lock.release()

    # -- in the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                # This order loses no wake-up: `flush` sees `_asleep`, or we see the message it handed over.
                self._asleep = True
                if not self._has_work():
                    self._wake_lock.acquire()
                self._asleep = False
                self._poll_inner()
        except BaseException as error:  # the owner's next call raises it
            self._error = error

    def _has_work(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._inner.busy
        finally:
            self._lock.release()

    def _poll_inner(self) -> None:
        """Poll until no message has been in flight for `_LINGER_S`."""
        inner, idle_s, woken = self._inner, self._clock(), False
        while not self._stopping:
            now_s, pause_s = self._clock(), inner.longest_s
            if inner.near and self._absence_s < _BRIEF_S and now_s - self._handed_over_s < _BRIEF_S:
                self._wake_lock.acquire(timeout=_BRIEF_PAUSE_S)
                continue
            if self._lock.acquire(blocking=False):
                try:
                    if inner.busy:
                        self.polls += 1
                        if inner.poll():
                            idle_s = now_s
                            pause_s = self._pause_s(now_s - self._handed_over_s, woken)
                except BaseException as error:
                    self._error = error  # set before the owner can take the endpoint back
                    raise
                finally:
                    self._lock.release()
            elif woken:  # the wake-up was for the owner: pass it on
                inner.wakeup.wake(inner.wakeup.address)
                return
            if now_s - idle_s > _LINGER_S:
                return
            woken = inner.wakeup.wait(pause_s)

    def _pause_s(self, waited_s: float, woken: bool) -> float:
        """How long to pause while a message is in flight."""
        if woken:  # the peer announced a message that is about to arrive
            return _SHORTEST_PAUSE_S
        longest_s = LONGEST_S if self._inner.leaving else self._inner.longest_s
        return min(max(waited_s * _PAUSE_PER_WAITED, _SHORTEST_PAUSE_S), longest_s)
