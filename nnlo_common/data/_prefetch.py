"""Reading ahead in a thread while the training uses the item read before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from nnlo_common.base._spans import record, recorder, span

__all__ = ["Prefetch"]

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


class Prefetch(Generic[_Key, _Item]):
    """Reads the next item while this one is used; at most these two are in memory.

    One thread at a time, because HDF5 has one lock for all threads. The thread ends after one item, so it
    needs no stopping. An error in it is raised by the `get` for its item. A forked process starts without it.

    Args:
        read: returns the item of a key.

    Example:
        >>> squares = Prefetch(lambda number: number**2)
        >>> squares.get(3, then=4), squares.get(4)
        (9, 16)
    """

    def __init__(self, read: Callable[[_Key], _Item]) -> None:
        self._read = read
        self._pid = os.getpid()
        self._held: tuple[_Key, _Item] | None = None
        self._pending: _PendingRead[_Key, _Item] | None = None

    def get(self, key: _Key, *, then: _Key | None = None) -> _Item:
        """Return the item of `key`, and start reading that of `then`."""
        if self._pid != os.getpid():  # forked: the thread exists in the parent only
            self._pid, self._pending = os.getpid(), None
        if self._held is None or self._held[0] != key:
            self._held = None  # frees memory before the next item is read
            with span("read", "waits for the reader"):
                self._held = key, self._take(key)
        if then is not None and (self._pending is None or self._pending.key != then):
            self.wait()
            self._pending = _PendingRead(self._read, then)
        return self._held[1]

    def wait(self) -> None:
        """Wait until the thread has ended, and drop the item read ahead."""
        pending, self._pending = self._pending, None
        if pending is not None and self._pid == os.getpid():
            pending.wait()

    def close(self) -> None:
        """Wait until the thread has ended, and drop both items."""
        self.wait()
        self._held = None

    def _take(self, key: _Key) -> _Item:
        pending = self._pending
        if pending is not None and pending.key == key:
            self._pending = None
            return pending.result()
        self.wait()
        return self._read(key)


class _PendingRead(Generic[_Key, _Item]):
    """One item, being read in its own thread."""

    def __init__(self, read: Callable[[_Key], _Item], key: _Key) -> None:
        self.key = key
        self._found: list[_Item] = []
        self._error: BaseException | None = None
        self._spans = recorder()
        self._thread = threading.Thread(target=self._run, args=[read], name=f"nnlo reads {key}")
        self._thread.start()

    def _run(self, read: Callable[[_Key], _Item]) -> None:
        record(None if self._spans is None else self._spans.beside("reader"))
        try:
            with span("read", "reads ahead"):
                self._found.append(read(self.key))
        except BaseException as error:  # raised by `result`
            self._error = error

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> _Item:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._found.pop()
