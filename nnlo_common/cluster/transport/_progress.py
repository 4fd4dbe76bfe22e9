"""A thread that keeps a worker's messages moving while the worker computes.

MPI moves long messages only while somebody calls it, and a worker that computes calls nothing. Where it may
go on before a reply has come (`lag` of 1 or more) a thread calls MPI in its place, so that the whole round
trip passes beside the computation.

Requirements that shaped this module:

* There is one door and one holder of it: the worker from its first call to `flush`, the thread from there to
  the worker's next call. Changing hands is one lock; the door itself knows nothing of threads.
* The thread only moves bytes and puts messages in order. What they change is changed by the worker, where it
  would have been changed anyway, so that the numbers are the same with the thread and without.
* Computing comes first. The thread sleeps on the bell, looks seldom, holds the interpreter for some
  microseconds at a time, and sleeps for good while nothing is under way.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Protocol

from nnlo_common.base._flat_vector import Frame
from nnlo_common.cluster.transport._backoff import LONGEST_S
from nnlo_common.cluster.transport._doorbell import Doorbell
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import Event, Message

__all__ = ["Door", "OverlappedEndpoint"]

# A look that soon finds nothing: nobody answers sooner.
_SHORTEST_PAUSE_S = 100e-6
# From then on a pause is as long as all before it, so that a reply costs a handful of looks.
_PAUSE_PER_WAITED = 1.0
# Waking a thread costs more than letting it doze, so it dozes this long where nothing is under way.
_LINGER_S = 20e-3
# Waking the thread and sharing the interpreter with it costs the worker up to a tenth of a millisecond. An
# owner who is back so soon does better without: the server has gone on meanwhile, and a reply that is short
# enough for such steps is read in no time.
_BRIEF_S = 2e-3
_NAP_S = 10e-3
# How fast the usual absence follows the latest, and what counts as the longest.
_FORGETTING = 0.25
_LONGEST_ABSENCE_S = 10e-3
# For the thread to end; it does so within a pause, but for a copy of many gigabytes in one call.
_END_S = 60.0


class Door(Endpoint, Protocol):
    """An endpoint that somebody else may look after, with the owner's consent."""

    bell: Doorbell
    #: The longest pause while a reply is awaited, which may be announced by the bell.
    longest_s: float
    #: Whether all messages come from this host; others need several looks, also short ones.
    near: bool

    def look(self) -> bool:
        """Let move what is under way and take in what has come; say whether anything still is."""

    @property
    def busy(self) -> bool:
        """Whether anything is under way, as far as is known without a look."""

    @property
    def leaving(self) -> bool:
        """Whether something that was sent had not left when last looked; nobody rings for that."""


class OverlappedEndpoint:
    """A door that a thread looks after between `flush` and the owner's next call.

    Errors that the thread meets are raised by the owner's next call, and by every one after it.

    Attributes:
        looks: how often the thread has looked.

    Args:
        door: what is looked after; nobody else may use it from now on.
        clock: tells the time.
    """

    def __init__(self, door: Door, clock: Callable[[], float] = time.perf_counter) -> None:
        self._door, self._clock = door, clock
        self.looks = 0
        self._error: BaseException | None = None
        self._ending = False
        self._mine = True  # the owner has the door, and holds the lock
        self._lock = threading.Lock()
        self._lock.acquire()
        self._given_s = clock()  # when the door was handed over
        self._absence_s = _LONGEST_ABSENCE_S  # how long the owner usually is away
        self._asleep = False  # the thread waits at the gate, or is about to
        self._gate = threading.Lock()
        self._gate.acquire()
        self._thread = threading.Thread(target=self._run, name="nnlo-progress", daemon=True)
        self._thread.start()
        # A thread amid a call of MPI must be gone before the library is finalised, however the program ends.
        atexit.register(self.end)

    def send(self, peer: int, message: Message, frame: Frame | None = None) -> None:
        """Send `message`."""
        self._take_over()
        self._door.send(peer, message, frame)

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None if there was none in time."""
        self._take_over()
        return self._door.receive(timeout_s)

    def release(self, peer: int, frame: Frame) -> None:
        """Give back the memory of a message."""
        self._take_over()
        self._door.release(peer, frame)

    def flush(self) -> None:
        """Hand over to the thread, if anything is under way."""
        if self._ending:
            self._take_over()
            self._door.flush()
        elif self._mine and self._door.busy:
            self._mine = False
            self._given_s = self._clock()
            self._lock.release()
            if self._asleep:  # asked when the lock is free; see _run
                self._wake()

    def close(self) -> None:
        """End the thread, then let everything leave that was sent, and give all memory back."""
        self.end()
        self._take_over()
        self._door.close()

    def end(self) -> None:
        """End the thread; the door remains, and its owner has to do everything again."""
        atexit.unregister(self.end)
        self._ending = True
        self._wake()
        self._door.bell.ring(self._door.bell.address)
        self._thread.join(_END_S)

    def _take_over(self) -> None:
        """Have the door again; a look of the thread that is under way is waited for."""
        if not self._mine:
            self._lock.acquire()
            self._mine = True
            absence_s = min(self._clock() - self._given_s, _LONGEST_ABSENCE_S)
            self._absence_s += _FORGETTING * (absence_s - self._absence_s)
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._gate.locked():
            self._gate.release()

    # -- in the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                # In this order: either `flush` sees that we sleep, or we see what it has handed over.
                self._asleep = True
                if not self._has_work():
                    self._gate.acquire()
                self._asleep = False
                self._look_after()
        except BaseException as error:  # the owner's next call raises it
            self._error = error

    def _has_work(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._door.busy
        finally:
            self._lock.release()

    def _look_after(self) -> None:
        """Look whenever there may be something to see, until there has been nothing for a while."""
        door, idle_s, woken = self._door, self._clock(), False
        while not self._ending:
            now_s, pause_s = self._clock(), door.longest_s
            if door.near and self._absence_s < _BRIEF_S and now_s - self._given_s < _BRIEF_S:
                self._gate.acquire(timeout=_NAP_S)
                continue
            if self._lock.acquire(blocking=False):
                try:
                    if door.busy:
                        self.looks += 1
                        if door.look():
                            idle_s = now_s
                            pause_s = self._pause_s(now_s - self._given_s, woken)
                except BaseException as error:
                    self._error = error  # before the owner can have the door again
                    raise
                finally:
                    self._lock.release()
            elif woken:  # the ring was meant for whoever has the door
                door.bell.ring(door.bell.address)
                return
            if now_s - idle_s > _LINGER_S:
                return
            woken = door.bell.wait(pause_s)

    def _pause_s(self, waited_s: float, woken: bool) -> float:
        """How long to wait for something that is under way."""
        if woken:  # what was announced is about to come
            return _SHORTEST_PAUSE_S
        longest_s = LONGEST_S if self._door.leaving else self._door.longest_s
        return min(max(waited_s * _PAUSE_PER_WAITED, _SHORTEST_PAUSE_S), longest_s)
