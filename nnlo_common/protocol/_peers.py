"""What a server knows of each worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from nnlo_common._flat import Vector

__all__ = ["AWAITED", "Peer", "Standing"]


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
