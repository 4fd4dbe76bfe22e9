"""Performing what the state machines ask for, on a real transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nnlo_common._errors import PeerLostError
from nnlo_common.protocol import Action, Activity, Event, Lost, Release, Send, Wait, Worker
from nnlo_common.transport._endpoint import Endpoint

__all__ = ["perform", "serve", "work"]


def perform(endpoint: Endpoint, actions: Iterable[Action]) -> None:
    """Send and release what `actions` say."""
    for action in actions:
        if isinstance(action, Send):
            endpoint.send(action.rank, action.message, action.frame)
        elif isinstance(action, Release):
            endpoint.release(action.rank, action.frame)


def work(endpoint: Endpoint, worker: Worker, activity: Activity) -> None:
    """Carry out an activity of `worker`, waiting for replies where it has to.

    Raises:
        PeerLostError: the server it waits for is gone.
    """
    for action in activity:
        if not isinstance(action, Wait):
            perform(endpoint, (action,))
            continue
        event = endpoint.receive()
        if isinstance(event, Lost):
            if any(event.rank == conversation.shard.server for conversation in worker.conversations):
                raise PeerLostError(event.rank, "the server of this worker's centre is gone")
        elif event is not None:
            perform(endpoint, worker.deliver(event))
    # The worker now computes, perhaps for long, and what it has sent must not wait for that.
    endpoint.flush()


def serve(endpoint: Endpoint, handle: Callable[[Event], None], until: Callable[[], bool]) -> None:
    """Hand every event to `handle` until `until()` holds, which is asked before each."""
    while not until():
        event = endpoint.receive()
        if event is not None:
            handle(event)
