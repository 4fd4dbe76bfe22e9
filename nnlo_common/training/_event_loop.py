"""Event loop: performs the actions of the state machines on a real transport."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import PartWork
from nnlo_common.base._spans import Span, span
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.cluster.transport._group_endpoints import MemberEndpoint
from nnlo_common.protocol import Action, Activity, Event, Kind, Lost, Message, Received, Release, Send, Wait
from nnlo_common.training._stall_detector import LOOK_EVERY_S, ServerWatch

__all__ = ["Periodic", "perform", "serve", "work"]

#: Messages that move the centre.
_CONTRIBUTIONS = (Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT)


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
            with span("send", action.message.kind.name) as sent:
                if sent is not None and not isinstance(endpoint, MemberEndpoint):
                    sent.facts = {"sends": _arrow(action.rank, action.message)}
                endpoint.send(action.rank, action.message, action.frame, _spanned(action.fill))
        elif isinstance(action, Release):
            endpoint.release(action.rank, action.frame)


def _spanned(fill: PartWork | None) -> PartWork | None:
    """Return what does so in a span of its own: a server moves the centre by a contribution in it."""
    if fill is None:
        return None

    def move(part: slice) -> None:
        with span("apply", "part"):
            fill(part)

    return move


def work(
    endpoint: Endpoint,
    deliver: Callable[[Received], Iterable[Action]],
    activity: Activity,
    lost: Callable[[int, PeerLostError | None], object],
    watch: ServerWatch,
    *,
    what: str = "work",
) -> None:
    """Perform an activity of a worker, waiting for replies when it yields `Wait`.

    Args:
        endpoint: of this rank.
        deliver: takes a message.
        activity: the actions.
        lost: called when a rank has died, with the error if that has broken off a message; it raises if the
            training cannot go on.
        watch: of the servers' silence.
        what: names the activity in a trace.

    Raises:
        PeerLostError: raised by `lost`, or a server was silent too long.
    """
    with span("pack", what):
        for action in activity:
            if not isinstance(action, Wait):
                perform(endpoint, (action,))
                continue
            with span("wait", what):
                while (event := endpoint.receive(LOOK_EVERY_S)) is None:
                    watch.look()
            if isinstance(event, Lost):
                lost(event.rank, None)
                continue
            watch.heard()
            try:
                with _handling(endpoint, event):
                    perform(endpoint, deliver(event.watched(watch.look, watch.heard)))
            except PeerLostError as error:
                lost(error.rank, error)
        # The worker may now compute for long: get its messages out first.
        with span("send", "flush"):
            endpoint.flush()


def serve(
    endpoint: Endpoint,
    handle: Callable[[Event], None],
    until: Callable[[], bool],
    watches: Iterable[Periodic] = (),
) -> None:
    """Hand every event to `handle` until `until()` holds; it is checked before each event."""
    watches = tuple(watches)
    while not until():
        wait_s = min((watch.look() for watch in watches), default=None)
        with span("idle", "no message"):
            event = endpoint.receive(wait_s)
        if isinstance(event, Received):
            with _handling(endpoint, event):
                handle(event)
        elif event is not None:
            handle(event)


def _handling(endpoint: Endpoint, event: Received) -> AbstractContextManager[object]:
    """Return the span of a message that has arrived."""
    message = event.message
    found = span("apply" if message.kind in _CONTRIBUTIONS else "receive", message.kind.name)
    if isinstance(found, Span) and not isinstance(endpoint, MemberEndpoint):  # its lead takes the message
        found.facts = {"takes": _arrow(message.sender, message)}
    return found


def _arrow(peer: int, message: Message) -> tuple[int, int, str, int]:
    """Return what names a message at both ends, together with this rank's number."""
    return peer, message.shard, message.kind.name, message.sequence
