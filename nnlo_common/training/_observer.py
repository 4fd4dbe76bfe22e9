"""Observer of a rank's exchanges with the others and of its waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nnlo_common.training._rank_parts import TeamPart

__all__ = ["Observed", "See"]

#: Called with the name of the operation, its begin and end, and the time it waited; in seconds.
See = Callable[[str, float, float, float], None]

#: The observed methods of a part, and the name of each operation.
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
    """Endpoint that measures the time spent waiting in `receive`."""

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
    """Wrapper of a part that reports its operations.

    Args:
        part: a worker's or a server's part.
        see: called after each operation.
    """

    def __init__(self, part: TeamPart, see: See) -> None:
        # Replace the endpoint only here, so that unobserved parts are not slowed down.
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
