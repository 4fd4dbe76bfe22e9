"""Reading ahead in a thread, while the training uses what was read before."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from nnlo_common.base._spans import Spans, record, recorder, span

__all__ = ["Prefetch"]

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


class Prefetch(Generic[_Key, _Item]):
    """Reads the next items while this one is used.

    It reads one ahead, or as many as last for a given time: then a disk that answers late is not waited for.

    One thread at a time, because HDF5 has one lock for all threads. The thread ends with the last item that
    is wanted, so it needs no stopping. An error in it is raised by the `get` for its item. A forked process
    starts without it.

    Args:
        read: returns the item of a key.
        ahead_s: read so many items ahead that they last for so many seconds.
        most: but at most so many.
        clock: returns the time in seconds.

    Example:
        >>> squares = Prefetch(lambda number: number**2)
        >>> squares.get(3, then=[4]), squares.get(4)
        (9, 16)
    """

    def __init__(
        self,
        read: Callable[[_Key], _Item],
        *,
        ahead_s: float = 0.0,
        most: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._ahead_s, self._most, self._clock = read, ahead_s, most, clock
        self._pid = os.getpid()
        self._held: tuple[_Key, _Item] | None = None
        self._held_since_s = 0.0
        self._lasts_s = math.inf  # an item, by the last that was used
        self._reads = _ReadsAhead(read)

    def get(self, key: _Key, *, then: Iterable[_Key] = ()) -> _Item:
        """Return the item of `key`; begin to read the first of `then` ahead, or more as time asks for it.

        What is read ahead of others is dropped, unless `then` is empty.
        """
        if self._pid != os.getpid():  # forked: the thread exists in the parent only
            self._pid, self._reads = os.getpid(), _ReadsAhead(self._read)
        if self._held is None or self._held[0] != key:
            if self._held is not None:
                self._lasts_s = self._clock() - self._held_since_s
            self._held = None  # frees memory before the next item is read
            with span("read", "waits for the reader"):
                self._held = key, self._take(key)
            self._held_since_s = self._clock()
        if wanted := [*itertools.islice(then, self._count)]:
            self._reads.want(wanted)
        return self._held[1]

    def close(self) -> None:
        """Wait until the thread has ended, and drop all items."""
        if self._pid == os.getpid():
            self._reads.stop()
        self._held = None

    @property
    def _count(self) -> int:
        """How many items to read ahead."""
        if self._most * self._lasts_s <= self._ahead_s:
            return self._most
        return max(1, math.ceil(self._ahead_s / self._lasts_s))

    def _take(self, key: _Key) -> _Item:
        found = self._reads.take(key)
        if found is None:
            self._reads.stop()
            return self._read(key)
        if found.error is not None:
            raise found.error
        return found.items.pop()


class _Read(Generic[_Item]):
    """What has become of reading an item."""

    def __init__(self, items: list[_Item], error: BaseException | None = None) -> None:
        self.items, self.error = items, error


class _ReadsAhead(Generic[_Key, _Item]):
    """Items that a thread reads, one after the other."""

    def __init__(self, read: Callable[[_Key], _Item]) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._wanted: deque[_Key] = deque()  # the first one is being read
        self._found: dict[_Key, _Read[_Item]] = {}
        self._thread: threading.Thread | None = None

    def want(self, keys: Sequence[_Key]) -> None:
        """Read these next, and drop what was read of others."""
        with self._changed:
            for key in [key for key in self._found if key not in keys]:
                del self._found[key]
            begun = [*self._wanted][:1]
            missing = [key for key in keys if key not in self._found and key not in begun]
            self._wanted = deque([*begun, *missing])
            if begun or not missing:
                return
            self._thread = threading.Thread(
                target=self._run, args=[recorder()], name=f"nnlo reads {missing[0]}"
            )
            try:
                self._thread.start()
            except BaseException:
                self._thread = None
                self._wanted.clear()
                raise

    def take(self, key: _Key) -> _Read[_Item] | None:
        """Return what was read, once it is; None: nobody reads it."""
        with self._changed:
            if key not in self._found and key not in self._wanted:
                return None
            self._changed.wait_for(lambda: key in self._found or key not in self._wanted)
            return self._found.pop(key, None)

    def stop(self) -> None:
        """Wait until the thread has ended, and drop what it has read."""
        with self._changed:
            while len(self._wanted) > 1:
                self._wanted.pop()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._found.clear()

    def _run(self, spans: Spans | None) -> None:
        record(None if spans is None else spans.beside("reader"))
        key = self._wanted[0]
        while True:
            found: _Read[_Item] = _Read([])
            try:
                with span("read", "reads ahead"):
                    found.items.append(self._read(key))
            except BaseException as error:  # raised by `get`
                found.error = error
            with self._changed:
                self._wanted.popleft()
                self._found[key] = found
                del found
                self._changed.notify_all()
                if not self._wanted:
                    return
                key = self._wanted[0]
