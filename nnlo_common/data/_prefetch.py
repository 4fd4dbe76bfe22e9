"""Reading ahead in a thread while what was read before is used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Prefetch"]

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


class Prefetch(Generic[_Key, _Item]):
    """Has the next item read while this one is used; at most these two are in memory.

    One thread at a time: HDF5 has one lock for all, so several would only wait for each other. It ends by
    itself with what it reads, so nothing has to be stopped. What goes wrong in it is raised by the `get` that
    asks for its item. In a forked process it begins anew.

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
        self._errand: _Errand[_Key, _Item] | None = None

    def get(self, key: _Key, *, then: _Key | None = None) -> _Item:
        """Return the item of `key`, and have that of `then` read meanwhile."""
        if self._pid != os.getpid():  # the thread has stayed behind
            self._pid, self._errand = os.getpid(), None
        if self._held is None or self._held[0] != key:
            self._held = None  # before the next one comes
            self._held = key, self._take(key)
        if then is not None and (self._errand is None or self._errand.key != then):
            self.wait()
            self._errand = _Errand(self._read, then)
        return self._held[1]

    def wait(self) -> None:
        """Return when nothing is read any more, and forget what was read ahead."""
        errand, self._errand = self._errand, None
        if errand is not None and self._pid == os.getpid():
            errand.wait()

    def close(self) -> None:
        """Forget everything, when nothing is read any more."""
        self.wait()
        self._held = None

    def _take(self, key: _Key) -> _Item:
        errand = self._errand
        if errand is not None and errand.key == key:
            self._errand = None
            return errand.result()
        self.wait()
        return self._read(key)


class _Errand(Generic[_Key, _Item]):
    """One item that a thread of its own reads."""

    def __init__(self, read: Callable[[_Key], _Item], key: _Key) -> None:
        self.key = key
        self._found: list[_Item] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=[read], name=f"nnlo reads {key}")
        self._thread.start()

    def _run(self, read: Callable[[_Key], _Item]) -> None:
        try:
            self._found.append(read(self.key))
        except BaseException as error:  # is raised where the item is asked for
            self._error = error

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> _Item:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._found.pop()
