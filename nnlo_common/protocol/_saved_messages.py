"""Saved state of a server about its workers: their waiting messages and their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Frame
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._events import Received
from nnlo_common.protocol._messages import Kind, Message
from nnlo_common.protocol._worker_records import Peer

__all__ = ["kept", "restored", "restored_peers"]


def kept(message: Message) -> State:
    """Return a copy of a waiting message as a plain tree."""
    return {
        "kind": message.kind.name,
        "sender": message.sender,
        "sequence": message.sequence,
        "clock": message.clock,
        "pulled_at": message.pulled_at,
        "weight": message.scalar,
        "shard": message.shard,
        "samples": message.samples,
        "vector": None if message.vector is None else message.vector.copy(),
    }


def restored(owner: str, state: Mapping[str, Any], size: int) -> Received:
    """Rebuild the event whose message was `kept`, in a frame of its own.

    Raises:
        ConfigurationError: the state is not a kept message, or its vector does not have `size` numbers.
    """
    vector = state.get("vector")
    owner = f"{owner}, a waiting message"
    numbers = dict.fromkeys(("sender", "sequence", "clock", "pulled_at", "shard", "samples"), int)
    expected = None if vector is None else np.zeros(size, np.float32)
    require(owner, state, kind=str, weight=float, vector=expected, **numbers)
    if state["kind"] not in Kind.__members__:
        raise ConfigurationError(f"{owner}: unknown kind {state['kind']!r} of message; is the state damaged?")
    frame = Frame(size)
    if vector is not None:
        np.copyto(frame.vector, vector)
    fields = {name: state[name] for name in numbers}
    kept_vector = None if vector is None else frame.vector
    return Received(Message(Kind[state["kind"]], scalar=state["weight"], vector=kept_vector, **fields), frame)


def restored_peers(owner: str, state: Mapping[str, Any]) -> dict[int, Peer]:
    """Return the workers of a server's saved state, after checking all its parts.

    Raises:
        ConfigurationError: it is not a server's state.
    """
    parts = {"rule": Mapping, "staleness": [[int]], "workers": Mapping, "pending": [Mapping]}
    parts["progress_at"] = [float]
    if isinstance(state, Mapping) and "wires" in state:  # there are none with float32
        parts["wires"] = Mapping
    require(owner, state, rate=float, **parts)
    if not all(isinstance(peer, Mapping) and rank.isdecimal() for rank, peer in state["workers"].items()):
        raise ConfigurationError(f"{owner}: its workers are not records by rank; is the state damaged?")
    return {int(rank): Peer.of(f"{owner}, rank {rank}", peer) for rank, peer in state["workers"].items()}
