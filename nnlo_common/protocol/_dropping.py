"""Dropped workers: what a server answers when one speaks again, and what the worker makes of it."""

from __future__ import annotations

from nnlo_common.base._errors import DroppedError
from nnlo_common.protocol._events import Action, Received, Release, Send
from nnlo_common.protocol._messages import ONE_WAY, Kind, Message

__all__ = ["heed", "refusal"]


def refusal(event: Received, server: int, after_s: float) -> Action:
    """Return the answer to a request of a worker that was dropped; a one-way message gets none.

    Args:
        event: the request.
        server: the rank that answers.
        after_s: how long the worker had been silent.
    """
    request = event.message
    if request.kind in ONE_WAY:
        return Release(request.sender, event.frame)
    answer = Message(Kind.DROPPED, server, request.sequence, scalar=after_s, shard=request.shard)
    return Send(request.sender, answer, event.frame)


def heed(message: Message, rank: int) -> None:
    """Raise `DroppedError` if a reply to `rank` says that it was dropped."""
    if message.kind is Kind.DROPPED:
        raise DroppedError(rank, message.sender, message.silence_s)
