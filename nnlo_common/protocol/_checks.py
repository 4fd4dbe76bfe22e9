"""Checks of a server: requests it refuses, and invariants that hold after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Protocol

from nnlo_common.algorithms import CenterRule
from nnlo_common.protocol._messages import Kind, Message
from nnlo_common.protocol._worker_records import AWAITED, Peers, Standing

__all__ = ["ServerRecords", "refused", "violated"]


class ServerRecords(Protocol):
    """The records of a server that the checks read."""

    rule: CenterRule
    peers: Peers
    shard: int
    depth: int
    awaited: int
    staleness: Counter[int]

    @property
    def of_any_size(self) -> Container[Kind]:
        """The requests whose vector need not be as long as the centre."""

    @property
    def handlers(self) -> Container[Kind]:
        """The requests that workers may send."""


def refused(server: ServerRecords, message: Message) -> str | None:
    """Return why the protocol forbids this request now; None if it is allowed."""
    kind, size = message.kind, server.rule.center.size
    peer = server.peers.get(message.sender)
    due = {Kind.JOIN: 0, Kind.PAUSE: peer.sequence if peer else 0}
    expected = Standing.EXPECTED if kind is Kind.JOIN else Standing.TRAINING
    if peer is None:
        problem = f"sent {kind.name}, but is not one of this server's workers {sorted(server.peers)}"
    elif message.shard != server.shard:
        problem = f"sent a request for shard {message.shard} to the server of shard {server.shard}"
    elif kind not in server.handlers:
        problem = f"sent {kind.name}, which only servers send"
    elif message.sequence != due.get(kind, peer.sequence + 1):
        problem = f"sent sequence {message.sequence} after {peer.sequence}: a message was lost or doubled"
    elif peer.standing is not expected:
        problem = f"sent {kind.name}, but {peer.standing.name.lower()}: it {peer.standing.value}"
    elif message.pulled_at > server.rule.clock:
        problem = f"says it pulled at clock {message.pulled_at}, but the clock is only {server.rule.clock}"
    elif kind is Kind.SAMPLE:
        found = 0 if message.vector is None else message.vector.size
        problem = f"sent {found} sampled numbers; expected {server.rule.sampled}"
        if found == server.rule.sampled:
            return None
    elif message.vector is not None and message.vector.size != size and kind not in server.of_any_size:
        problem = (
            f"sent {message.vector.size} numbers for a centre of {size}; do all ranks build the same model?"
        )
    else:
        return None
    return f"rank {message.sender} {problem}"


def violated(server: ServerRecords, waiting: Sequence[int]) -> str | None:
    """Return the first invariant that does not hold of the server's records.

    Args:
        server: the server.
        waiting: the sender of each unanswered request; a rank appears once per request.
    """
    clock, peers, owed = server.rule.clock, server.peers, Counter(waiting)
    committed = sum(server.staleness.values())
    invariants = {
        "each commit has at least one contribution": committed >= clock,
        "each contribution has a staleness": sum(peer.commits for peer in peers.values()) <= committed,
        "no clock runs ahead": all(0 <= peer.last_commit <= clock for peer in peers.values()),
        "no worker exceeds the depth": all(peer.unanswered <= server.depth for peer in peers.values()),
        "each waiting request is counted": all(owed[rank] == peer.unanswered for rank, peer in peers.items()),
        "waiting requests come from live workers": all(peers[rank].standing in AWAITED for rank in waiting),
        "awaited is the number of live workers": server.awaited
        == sum(peer.standing in AWAITED for peer in peers.values()),
    }
    return next((what for what, holds in invariants.items() if not holds), None)
