"""Steps that virtual clusters and trees have in common: workers' programs, waiting messages, copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from nnlo_common.base._flat_vector import Frame
from nnlo_common.protocol import Action, Activity, Compute, Message, Received, Wait, decode, encode
from nnlo_common.protocol._events import given
from nnlo_common.testing._schedules import ByTime, PendingRequest, Schedule

__all__ = ["advance", "bytes_of", "carried", "filled_unevenly", "in_parts", "pending"]

#: Messages on their way, by receiver and sender, in order: when each arrives, the message, and perhaps more.
Channels: TypeAlias = Mapping[tuple[int, int], Sequence[tuple[Any, ...]]]


def advance(
    programs: MutableMapping[int, Activity],
    rank: int,
    schedule: Schedule,
    clock_s: MutableMapping[int, float],
    perform: Callable[[int, Sequence[Action]], None],
) -> None:
    """Run a worker's program until it waits for a reply that has not arrived; remove it once it has ended.

    Args:
        programs: those that run, by rank.
        rank: the worker.
        schedule: with `ByTime` it says how long a computation takes.
        clock_s: the virtual time of each rank.
        perform: performs actions of a rank.
    """
    for action in programs[rank]:
        if isinstance(action, Wait):
            return
        if isinstance(action, Compute):
            if isinstance(schedule, ByTime):
                clock_s[rank] += schedule.compute_s(rank)
            continue
        perform(rank, [action])
    del programs[rank]


def pending(channels: Channels) -> list[PendingRequest]:
    """Return the first message of each channel, by receiver and sender."""
    return [
        PendingRequest(to, sender, channel[0][1].message.kind, channel[0][0])
        for (to, sender), channel in sorted(channels.items())
        if channel
    ]


def carried(message: Message, frame: Frame) -> Received:
    """Copy a message, header and vector, into the receiver's memory, as a transport does."""
    if message.vector is not None:
        np.copyto(frame.vector[: message.vector.size], message.vector)
    return Received(decode(frame, encode(message, frame)), frame)


def filled_unevenly(message: Message, fill: Callable[[slice], None] | None) -> list[slice]:
    """Compute a vector in two parts, as a server does while it sends a long one; return the parts."""
    if fill is None:
        return []
    size = 0 if message.vector is None else message.vector.size
    parts = [slice(0, size // 3), slice(size // 3, size)]
    for part in parts:
        fill(part)
    return parts


def in_parts(event: Received, parts: Sequence[slice]) -> Received:
    """Let a received vector arrive in these parts, if there are any."""
    vector = event.message.vector
    if vector is None or not parts:
        return event
    return Received(event.message, event.frame, partial(given, [(part, vector[part]) for part in parts]))


def bytes_of(message: Message) -> int:
    """Return the size of a message's vector."""
    return 0 if message.vector is None else message.vector.nbytes
