"""A clock for trainings on threads as ranks: it stands still while a rank computes, and skips what all sleep.

A test owns it, so that what a training lasts, and who waits for whom for how long, is the same on a machine
that is busy. What waits for time or for other ranks does it here: `nap`, the inboxes and the collective
operations of a `TimedCluster`, and threads of `VirtualTime.Thread`. Once all of them wait, the clock jumps to
the end of the nap that ends first. Time limits of waits never end.
"""

from __future__ import annotations

import functools
import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nnlo_common.base._spans import Spans
from nnlo_common.data import _prefetch
from nnlo_common.testing import MemoryCluster, _memory
from nnlo_common.training.report import _facts_writer

__all__ = ["TimedCluster", "VirtualTime"]


class VirtualTime:
    """The clock, for a `with` block of `monkeypatch`: facts are written by it.

    Attributes:
        changed: guards all that is below.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._now_s, self._running = 0.0, 0
        self._naps: list[float] = []

    def now(self) -> float:
        """Return the seconds since the begin."""
        return self._now_s

    def nap(self, seconds: float) -> None:
        """Sleep."""
        with self.changed:
            end_s = self._now_s + seconds
            heapq.heappush(self._naps, end_s)
            self.run(-1)
            while self._now_s < end_s:
                self.changed.wait()

    def run(self, more: int) -> None:
        """Count threads that run from now on, or that wait; call it while holding `changed`."""
        self._running += more
        if self._running == 0 and self._naps:
            self._now_s = self._naps[0]
            while self._naps and self._naps[0] <= self._now_s:
                heapq.heappop(self._naps)
                self._running += 1
            self.changed.notify_all()

    def tell(self, monkeypatch: Any) -> None:
        """Let facts be written by this clock, and what is read ahead be read in its threads."""
        monkeypatch.setattr(_facts_writer, "Spans", functools.partial(Spans, clock=self.now))
        monkeypatch.setattr(_facts_writer, "time", SimpleNamespace(perf_counter=self.now, time=time.time))
        thread, meeting = functools.partial(_Thread, self), functools.partial(_Meeting, self)
        monkeypatch.setattr(_prefetch, "threading", SimpleNamespace(Thread=thread, Condition=meeting))
        inboxes = SimpleNamespace(SimpleQueue=functools.partial(_Inbox, self), Empty=queue.Empty)
        monkeypatch.setattr(_memory, "queue", inboxes)

    def on_ranks(self, size: int, program: Callable[[Any], Any]) -> list[Any]:
        """Return what a program returns on each rank."""
        with TimedCluster(size, self) as cluster:
            return cluster.run(program, 180)


class TimedCluster(MemoryCluster):
    """Ranks by this clock.

    Args:
        size: how many.
        time: the clock.
    """

    def __init__(self, size: int, time: VirtualTime) -> None:
        super().__init__(size)
        self._time, self._changed = time, _Meeting(time)

    def run(self, program: Callable[[Any], Any], timeout_s: float = 60.0) -> list[Any]:
        with self._time.changed:
            self._time.run(self.size)
        return super().run(program, timeout_s)

    def _run_rank(self, *args: Any) -> None:
        try:
            super()._run_rank(*args)
        finally:
            with self._time.changed:
                self._time.run(-1)


class _Meeting:
    """A `threading.Condition`: those who wait for it do not run."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._waiting, self._turn = time, 0, 0

    def __enter__(self) -> None:
        self._time.changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._time.changed.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        turn = self._turn
        self._waiting += 1
        self._time.run(-1)
        while turn == self._turn:
            self._time.changed.wait()
        return True

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            self.wait()

    def notify_all(self) -> None:
        self._turn += 1
        self._time.run(self._waiting)
        self._waiting = 0
        self._time.changed.notify_all()


class _Inbox:
    """A `queue.SimpleQueue` for one reader."""

    def __init__(self, time: VirtualTime) -> None:
        self._items: deque[Any] = deque()
        self._arrived = _Meeting(time)

    def put(self, item: Any) -> None:
        with self._arrived:
            self._items.append(item)
            self._arrived.notify_all()

    def get(self, timeout: float | None = None) -> Any:
        with self._arrived:
            while not self._items:
                if timeout == 0:
                    raise queue.Empty
                self._arrived.wait()
            return self._items.popleft()


class _Thread(threading.Thread):
    """A thread beside a rank, which may nap."""

    def __init__(self, time: VirtualTime, **options: Any) -> None:
        super().__init__(**options)
        self._time, self._over, self._ended = time, False, _Meeting(time)

    def start(self) -> None:
        with self._ended:
            self._time.run(1)
        super().start()

    def run(self) -> None:
        try:
            super().run()
        finally:
            with self._ended:
                self._over = True
                self._ended.notify_all()
                self._time.run(-1)

    def join(self, timeout: float | None = None) -> None:
        with self._ended:
            while not self._over:
                self._ended.wait()
        super().join(timeout)
