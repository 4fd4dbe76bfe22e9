"""Counts of commits: how stale each contribution was, and what each worker has contributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nnlo_common.algorithms import CenterRule, Contribution
from nnlo_common.protocol._events import Received
from nnlo_common.protocol._worker_records import Peers

__all__ = ["contributions", "count_commit"]


def contributions(
    events: Iterable[Received], rule: CenterRule, peers: Peers, staleness: Counter[int]
) -> list[Contribution]:
    """Return the contributions of the next commit, counted by staleness; the optimizer gets their options."""
    found = []
    for event in events:
        message = event.message
        assert message.vector is not None  # refused() has seen to it
        if (options := peers[message.sender].options) is not None:
            rule.configure(options)
        stale = rule.clock - message.pulled_at
        sample = peers[message.sender].sample
        found.append(Contribution(message.sender, message.vector, stale, message.share, sample))
        staleness[stale] += 1
        peers[message.sender].staleness[stale] += 1
    return found


def count_commit(events: Iterable[Received], rule: CenterRule, peers: Peers) -> None:
    """Note for each worker that its contribution is in the commit just made."""
    for event in events:
        peer = peers[event.message.sender]
        peer.commits += 1
        peer.last_commit = rule.clock
