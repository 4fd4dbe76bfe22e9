"""Seeing from outside what a rank does with the others, and how long it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nnlo_common.training._roles import TeamPart

__all__ = ["Observed", "See"]

#: Is told what was done, when that began and ended, and how long it waited meanwhile; all in seconds.
See = Callable[[str, float, float, float], None]

#: What of a part is worth being told, by what it does to the others.
_SEEN = {
    "start": "join",
    "step": "exchange",
    "begin_epoch": "begin epoch",
    "end_epoch": "end epoch",
    "ask": "ask",
    "look": "look",
    "view": "look",
    "finish": "leave",
}


class _Waits:
    """A door that measures how long it has been waited at."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint, self.waited_s = endpoint, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    def receive(self, timeout_s: float | None = None) -> Any:
        began_s = time.perf_counter()
        try:
            return self._endpoint.receive(timeout_s)
        finally:
            self.waited_s += time.perf_counter() - began_s


class Observed:
    """A part that tells what it does; it stands in for the part that it is made of.

    Args:
        part: a worker's or a server's.
        see: whom to tell.
    """

    def __init__(self, part: TeamPart, see: See) -> None:
        # What nobody observes is not slowed down: the door is another one only from here on.
        unchecked: Any = part
        self._part = unchecked
        self._see = see
        self._waits = _Waits(self._part._endpoint)
        self._part._endpoint = self._waits

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name not in _SEEN:
            return found

        def seen(*args: Any, **options: Any) -> Any:
            began_s, waited_s = time.perf_counter(), self._waits.waited_s
            try:
                return found(*args, **options)
            finally:
                self._see(_SEEN[name], began_s, time.perf_counter(), self._waits.waited_s - waited_s)

        return seen
