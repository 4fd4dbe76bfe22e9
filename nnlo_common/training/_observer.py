"""Observer of a rank's exchanges with the others and of its waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nnlo_common.training._group_worker import GroupTrainer, GroupWorkerRank
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


#: The methods of an endpoint, and of a group, in which a rank waits for others.
_WAITING = ("receive", "gather", "gather_bytes")


class _Waits:
    """Endpoint, or side of a group, that adds the time spent waiting in it to a sum."""

    def __init__(self, waited: Any, sum_s: list[float]) -> None:
        self._waited, self._sum_s = waited, sum_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._waited, name)
        if name not in _WAITING:
            return found

        def timed(*args: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return found(*args, **options)
            finally:
                self._sum_s[0] += time.perf_counter() - began_s

        return timed


class Observed:
    """Wrapper of a part that reports its operations.

    Args:
        part: a worker's or a server's part.
        see: called after each operation.
    """

    def __init__(self, part: TeamPart, see: See) -> None:
        # Replace the endpoint and the group only here, so that unobserved parts are not slowed down.
        unchecked: Any = part
        self._part = unchecked
        self._see, self._waited_s = see, [0.0]
        if not isinstance(part, GroupTrainer):  # which has no endpoint
            self._part._endpoint = _Waits(self._part._endpoint, self._waited_s)
        if isinstance(part, GroupTrainer | GroupWorkerRank):
            self._part._group.group = _Waits(self._part._group.group, self._waited_s)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name not in _SEEN:
            return found

        def seen(*args: Any, **options: Any) -> Any:
            began_s, waited_s = time.perf_counter(), self._waited_s[0]
            try:
                return found(*args, **options)
            finally:
                self._see(_SEEN[name], began_s, time.perf_counter(), self._waited_s[0] - waited_s)

        return seen
