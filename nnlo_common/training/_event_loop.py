"""Event loop: performs the actions of the state machines on a real transport."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from nnlo_common.base._errors import PeerLostError
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import Action, Activity, Event, Lost, Received, Release, Send, Wait
from nnlo_common.training._server_watch import ServerWatch
from nnlo_common.training._stall_detector import LOOK_EVERY_S

__all__ = ["Periodic", "perform", "serve", "work"]


@dataclass(slots=True)
class Periodic:
    """Periodic call while a server waits for messages.

    Attributes:
        call: the function to call.
        every_s: the interval.
    """

    call: Callable[[], object]
    every_s: float
    _next_s: float = field(default=math.inf, init=False)

    def look(self) -> float:
        """Call if it is due; return the seconds until the next call."""
        now_s = time.monotonic()
        if self._next_s == math.inf:
            self._next_s = now_s + self.every_s
        if now_s >= self._next_s:
            self._next_s = now_s + self.every_s
            self.call()
        return max(0.0, self._next_s - now_s)


def perform(endpoint: Endpoint, actions: Iterable[Action]) -> None:
    """Perform the sends and releases in `actions`."""
    for action in actions:
        if isinstance(action, Send):
            if action.parts is None:
                endpoint.send(action.rank, action.message, action.frame)
            else:
                endpoint.send(action.rank, action.message, action.frame, action.parts)
        elif isinstance(action, Release):
            endpoint.release(action.rank, action.frame)


def work(
    endpoint: Endpoint,
    deliver: Callable[[Received], Iterable[Action]],
    activity: Activity,
    servers: Collection[int],
    watch: ServerWatch,
) -> None:
    """Perform an activity of a worker, waiting for replies when it yields `Wait`.

    Raises:
        PeerLostError: one of its servers has died, or was silent too long.
    """
    for action in activity:
        if not isinstance(action, Wait):
            perform(endpoint, (action,))
            continue
        while (event := endpoint.receive(LOOK_EVERY_S)) is None:
            watch.look()
        if not isinstance(event, Lost):
            watch.heard()
            if event.parts is not None:
                event = Received(event.message, event.frame, _watched(event.parts, watch))
            perform(endpoint, deliver(event))
        elif event.rank in servers:
            raise PeerLostError(event.rank, "a server of the centre has died")
    # The worker may now compute for long: get its messages out first.
    endpoint.flush()


def _watched(parts: Iterable[slice], watch: ServerWatch) -> Iterator[slice]:
    """Yield the parts of a message while it arrives; look at the server's silence where one is late."""
    for part in parts:
        if part.start == part.stop:
            watch.look()
        else:
            watch.heard()
            yield part


def serve(
    endpoint: Endpoint,
    handle: Callable[[Event], None],
    until: Callable[[], bool],
    watches: Iterable[Periodic] = (),
) -> None:
    """Hand every event to `handle` until `until()` holds; it is checked before each event."""
    watches = tuple(watches)
    while not until():
        event = endpoint.receive(min((watch.look() for watch in watches), default=None))
        if event is not None:
            handle(event)
