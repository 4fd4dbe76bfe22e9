"""Records that a server keeps of its workers."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nnlo_common.algorithms import CenterRule
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._messages import Kind, Message

__all__ = ["AWAITED", "Peer", "Peers", "ServerRecords", "Standing", "refused", "violated"]


class Standing(enum.Enum):
    """State of a worker, as the server sees it."""

    EXPECTED = "has not asked to join yet; synchronous commits already wait for it"
    CALLED = "is a spare that trains in the place of a dead worker from its next epoch on"
    QUEUING = "has asked to join and is not let in yet (warm start)"
    TRAINING = "has joined"
    LEFT = "has left normally"
    LOST = "died or was dropped"


#: Standings of workers that may still contribute.
AWAITED = (Standing.EXPECTED, Standing.CALLED, Standing.QUEUING, Standing.TRAINING)

_KEPT = ("sequence", "epochs", "commits", "last_commit", "dropped", "samples")


@dataclass(slots=True)
class Peer:
    """Record of one worker."""

    standing: Standing = Standing.EXPECTED
    sequence: int = 0  # of its last request
    unanswered: int = 0  # requests without a reply
    epochs: int = 0
    commits: int = 0  # its committed contributions
    last_commit: int = 0  # the centre's clock after the last of them
    dropped: int = 0  # its contributions that were too stale
    samples: int = 0  # taken so far
    waited: float = 0.0  # the share of its last epoch that it has spent in exchanges
    views: int = 0  # of the centre, at the ends of epochs
    pauses: int = -1  # the number of the last pause that it is no part of, as a spare; -1: there is none
    fresh: bool = False  # it has been let in while others queue, or anew, and has said nothing since
    staleness: Counter[int] = field(default_factory=Counter)  # of its contributions, since this start
    # Its contributions of this epoch, if it has told them here after another server's death.
    round: int | None = None
    options: Vector | None = None  # for stepping its contributions, if it has sent any
    sample: Vector | None = None  # coordinates of its next contribution, if it sends any

    @property
    def gone(self) -> bool:
        """Whether it has left or is lost."""
        return self.standing not in AWAITED

    @property
    def may_queue(self) -> bool:
        """Whether it is let in here, and perhaps not yet by other servers."""
        return self.fresh and self.standing is Standing.TRAINING

    def count_round(self) -> None:
        """Note that a contribution of it has been handled."""
        if self.round is not None:
            self.round += 1

    def state(self) -> State:
        """Return the record to resume from; a worker that has left starts anew in its epoch."""
        peer = Peer(epochs=self.epochs) if self.standing is Standing.LEFT else self
        options = None if peer.options is None else peer.options.copy()
        return {**{name: getattr(peer, name) for name in _KEPT}, "options": options}

    @classmethod
    def of(cls, owner: str, state: Mapping[str, Any]) -> Peer:
        """Rebuild a peer from its `state`, as it is before it joins again.

        Raises:
            ConfigurationError: it is not a peer's state.
        """
        options = state.get("options")
        pattern = None if options is None else np.zeros(np.shape(options)[:1], np.float32)
        require(owner, state, **dict.fromkeys(_KEPT, int), options=pattern)
        return cls(**{**state, "options": None if options is None else options.copy()})


class Peers(dict[int, Peer]):
    """Records of all workers, by rank."""

    def states(self) -> dict[int, State]:
        """Return all states; lost and queuing workers start anew in the earliest epoch of training ones."""
        inside = [peer.epochs for peer in self.values() if peer.standing is Standing.TRAINING]
        anew = Peer(epochs=min(inside, default=0)).state()
        outside = (Standing.LOST, Standing.CALLED, Standing.QUEUING)
        return {rank: anew if peer.standing in outside else peer.state() for rank, peer in self.items()}

    def awaited(self) -> list[int]:
        """Return the workers that may still contribute."""
        return [rank for rank, peer in self.items() if peer.standing in AWAITED]

    def called(self) -> list[int]:
        """Return the spares that will train in the places of dead workers."""
        return [rank for rank, peer in self.items() if peer.standing is Standing.CALLED]

    def trains(self, rank: int) -> bool:
        """Whether a rank is a worker, and no spare that will be one."""
        return rank in self and self[rank].standing is not Standing.CALLED

    @property
    def gathered(self) -> bool:
        """Whether no worker is still expected to ask to join."""
        return all(peer.standing is not Standing.EXPECTED for peer in self.values())

    def have_finished(self, epoch: float) -> bool:
        """Whether every worker that may still contribute has finished `epoch` epochs."""
        return all(self[rank].epochs >= epoch for rank in self.awaited())

    def have_viewed(self, times: int) -> bool:
        """Whether every worker that may still contribute has viewed the centre `times` times."""
        return all(self[rank].views >= times for rank in self.awaited() if self.trains(rank))

    def behind(self) -> list[int]:
        """Return the workers in the earliest epoch that is still open."""
        epoch = self._earliest_epoch()
        return [rank for rank in self.awaited() if self[rank].epochs == epoch]

    def in_next_round(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these workers that have not sent a contribution to the next commit.

        A server that has died may have had the contributions of some to the next commits, and not of others.
        The others make these alone, or workers would wait for each other on the servers of different shards.
        """
        told = [one for rank in ranks if (one := self[rank].round) is not None]
        if len(told) < len(ranks):
            return [*ranks]
        return [rank for rank in ranks if self[rank].round == min(told)]

    def in_later_rounds(self) -> set[int]:
        """Return the workers of the earliest open epoch whose contribution to the next commit is lost."""
        behind = self.behind()
        return set(behind).difference(self.in_next_round(behind))

    def ahead(self) -> int:
        """Return the number of workers past that epoch, including those that have left since."""
        epoch = self._earliest_epoch()
        return sum(peer.epochs > epoch for peer in self.values() if peer.standing is not Standing.LOST)

    def latest_epoch(self) -> int:
        """Return the most epochs that a worker has finished, including those that left, but not dead ones."""
        living = [peer for peer in self.values() if peer.standing is not Standing.LOST]
        return max((peer.epochs for peer in living), default=0)

    def _earliest_epoch(self) -> int:
        return min((self[rank].epochs for rank in self.awaited()), default=0)


# -- checks of a server: requests it refuses, and invariants that hold after every event ---------------


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
    expected = (Standing.EXPECTED, Standing.CALLED) if kind is Kind.JOIN else (Standing.TRAINING,)
    if peer is None:
        problem = f"sent {kind.name}, but is not one of this server's workers {sorted(server.peers)}"
    elif message.shard != server.shard:
        problem = f"sent a request for shard {message.shard} to the server of shard {server.shard}"
    elif kind not in server.handlers:
        problem = f"sent {kind.name}, which only servers send"
    elif message.sequence != due.get(kind, peer.sequence + 1):
        problem = f"sent sequence {message.sequence} after {peer.sequence}: a message was lost or doubled"
    elif peer.standing not in expected:
        problem = f"sent {kind.name}, but {peer.standing.name.lower()}: it {peer.standing.value}"
    elif message.pulled_at > server.rule.clock and not (kind is Kind.JOIN and message.again):
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
