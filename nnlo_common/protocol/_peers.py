"""What a server knows of each worker, and of all together."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from nnlo_common._flat import Vector

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


class Peers(dict[int, Peer]):
    """What the server knows of all workers, by rank."""

    def awaited(self) -> list[int]:
        """Return those that may still contribute."""
        return [rank for rank, peer in self.items() if peer.standing in AWAITED]

    @property
    def gathered(self) -> bool:
        """Whether every worker has asked to join, or never will."""
        return all(peer.standing is not Standing.EXPECTED for peer in self.values())

    def have_finished(self, epoch: int) -> bool:
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

    def _earliest_epoch(self) -> int:
        return min((self[rank].epochs for rank in self.awaited()), default=0)
