"""Records that a server keeps of each worker, and of all together."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State, require

__all__ = ["AWAITED", "Peer", "Peers", "Standing"]


class Standing(enum.Enum):
    """Where a worker stands with this server."""

    EXPECTED = "has not asked to join yet; synchronous commits wait for it all the same"
    QUEUING = "has asked to join and is not let in yet (warm start)"
    TRAINING = "is in"
    LEFT = "has left in good order"
    LOST = "died"


#: Standings of workers that may still contribute.
AWAITED = (Standing.EXPECTED, Standing.QUEUING, Standing.TRAINING)

_KEPT = ("sequence", "epochs", "commits", "last_commit", "dropped", "samples")


@dataclass(slots=True)
class Peer:
    """What the server knows of one worker."""

    standing: Standing = Standing.EXPECTED
    sequence: int = 0  # of its last request
    unanswered: int = 0  # requests that still wait for their reply
    epochs: int = 0
    commits: int = 0  # contributions of its that were committed
    last_commit: int = 0  # the centre's clock after the last of them
    dropped: int = 0  # contributions of its that came too late
    samples: int = 0  # that it has taken so far
    views: int = 0  # how often it was shown the centre at the end of an epoch
    options: Vector | None = None  # what its contributions are stepped with, if it has said so

    def state(self) -> State:
        """Return what a resumed training goes on from; who has left begins it anew."""
        peer = Peer(epochs=self.epochs) if self.standing is Standing.LEFT else self
        options = None if peer.options is None else peer.options.copy()
        return {**{name: getattr(peer, name) for name in _KEPT}, "options": options}

    @classmethod
    def of(cls, owner: str, state: Mapping[str, Any]) -> Peer:
        """Return the peer that gave `state`, as it is before it joins again.

        Raises:
            ConfigurationError: it is no peer's state.
        """
        options = state.get("options")
        pattern = None if options is None else np.zeros(np.shape(options)[:1], np.float32)
        require(owner, state, **dict.fromkeys(_KEPT, int), options=pattern)
        return cls(**{**state, "options": None if options is None else options.copy()})


class Peers(dict[int, Peer]):
    """What the server knows of all workers, by rank."""

    def states(self) -> dict[int, State]:
        """Return the states of all; who has none to go on from is to begin in the epoch of those who have."""
        inside = [peer.epochs for peer in self.values() if peer.standing is Standing.TRAINING]
        anew = Peer(epochs=min(inside, default=0)).state()
        outside = (Standing.LOST, Standing.QUEUING)
        return {rank: anew if peer.standing in outside else peer.state() for rank, peer in self.items()}

    def awaited(self) -> list[int]:
        """Return those that may still contribute."""
        return [rank for rank, peer in self.items() if peer.standing in AWAITED]

    @property
    def gathered(self) -> bool:
        """Whether every worker has asked to join, or never will."""
        return all(peer.standing is not Standing.EXPECTED for peer in self.values())

    def have_finished(self, epoch: float) -> bool:
        """Whether every worker that is still there has finished `epoch` epochs."""
        return all(self[rank].epochs >= epoch for rank in self.awaited())

    def have_viewed(self, times: int) -> bool:
        """Whether every worker that is still there has been shown the centre that often, at epochs' ends."""
        return all(self[rank].views >= times for rank in self.awaited())

    def behind(self) -> list[int]:
        """Return the workers that are still in the earliest epoch that anybody is in."""
        epoch = self._earliest_epoch()
        return [rank for rank in self.awaited() if self[rank].epochs == epoch]

    def ahead(self) -> int:
        """Return how many workers have ended that epoch; also those who have left since."""
        epoch = self._earliest_epoch()
        return sum(peer.epochs > epoch for peer in self.values() if peer.standing is not Standing.LOST)

    def latest_epoch(self) -> int:
        """Return how many epochs the worker that is or was furthest has finished; the dead do not count."""
        living = [peer for peer in self.values() if peer.standing is not Standing.LOST]
        return max((peer.epochs for peer in living), default=0)

    def _earliest_epoch(self) -> int:
        return min((self[rank].epochs for rank in self.awaited()), default=0)
