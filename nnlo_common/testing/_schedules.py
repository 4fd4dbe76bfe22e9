"""Schedules of the virtual cluster: choose the next request, the only freedom of a distributed run.

A worker's numbers depend only on its replies, and a server's only on the order in which it handles requests.
So one thing determines a run: for each shard, the order of the workers whose requests are handled. A schedule
chooses it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nnlo_common.base._errors import ProtocolError
from nnlo_common.protocol import Kind

__all__ = ["ByTime", "Interleaved", "PendingRequest", "RandomOrder", "Replay", "RoundRobin", "Schedule"]


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that may be handled next: the oldest one of its worker at its shard.

    Attributes:
        shard: the shard of the centre.
        worker: the rank that sent it.
        kind: the kind of message.
        arrival_s: its arrival in virtual time (with `ByTime`; else 0).

    Example:
        >>> PendingRequest(shard=0, worker=2, kind=Kind.JOIN, arrival_s=0.0).worker
        2
    """

    shard: int
    worker: int
    kind: Kind
    arrival_s: float


class Schedule(Protocol):
    """Chooses the next request to handle; write one for an order of your own.

    Example:
        >>> class LastFirst:
        ...     def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest | None:
        ...         return max(waiting, key=lambda item: item.worker)
        >>> from nnlo_common import SGD, Downpour
        >>> from nnlo_common.testing import train_virtually
        >>> run = train_virtually(Downpour(), lambda x, rank: x, [1.0], workers=2, steps=1,
        ...                       optimizer=SGD(0.5), schedule=LastFirst())
        >>> run.trace[0]  # each joins, makes its step and leaves
        [2, 2, 2, 1, 1, 1]
    """

    def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest | None:
        """Return one of `waiting`, sorted by shard and worker; None ends the run here."""


class _WholeTurns:
    """Whole turns: all workers join first, and a commit follows its lock at once."""

    def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest | None:
        for first in (Kind.COMMIT, Kind.JOIN):
            for item in waiting:
                if item.kind is first:
                    return item
        return self.turn(waiting)

    def turn(self, waiting: Sequence[PendingRequest]) -> PendingRequest:
        raise NotImplementedError


class RoundRobin(_WholeTurns):
    """Workers in turn, by rank.

    Example:
        >>> schedule = RoundRobin()
        >>> waiting = [PendingRequest(0, rank, Kind.EXCHANGE, 0.0) for rank in (1, 2)]
        >>> [schedule.choose(waiting).worker for _ in range(3)]
        [1, 2, 1]
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def turn(self, waiting: Sequence[PendingRequest]) -> PendingRequest:
        """Return the request of the worker after the last one at its shard."""
        item = min(waiting, key=lambda w: (w.worker <= self._last.get(w.shard, -1), w.worker, w.shard))
        self._last[item.shard] = item.worker
        return item


class RandomOrder(_WholeTurns):
    """Draws the next worker uniformly, the asynchrony that the papers' proofs assume.

    Example:
        >>> schedule = RandomOrder(seed=1)
        >>> waiting = [PendingRequest(0, rank, Kind.EXCHANGE, 0.0) for rank in (1, 2, 3)]
        >>> [schedule.choose(waiting).worker for _ in range(6)]
        [1, 3, 1, 2, 1, 2]
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def turn(self, waiting: Sequence[PendingRequest]) -> PendingRequest:
        """Return any waiting request with equal probability."""
        return self._random.choice(waiting)


class Interleaved:
    """Any waiting request at any time, even between a lock and its commit or before others join.

    Example:
        >>> from nnlo_common import GEM
        >>> from nnlo_common.testing import train_virtually
        >>> run = train_virtually(GEM(), lambda x, rank: x, [1.0], workers=3, steps=9,
        ...                       schedule=Interleaved(seed=1))
        >>> run.servers[0].finished
        True
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest:
        """Return any waiting request with equal probability."""
        return self._random.choice(waiting)


class ByTime:
    """First come, first served, by virtual time.

    Attributes:
        compute_s: draws how long a worker takes for one gradient.
        communicate_s: draws how long a message takes, given its bytes.
        serve_s: draws how long a server takes for one request.
        handle_s: draws how long a worker works on a message that it sends or has got, given its bytes.

    Example:
        >>> schedule = ByTime(seed=1, compute_s=lambda draw, rank: 3.0 if rank == 1 else 1.0)
    """

    def __init__(
        self,
        seed: int,
        *,
        compute_s: Callable[[random.Random, int], float] = lambda draw, rank: draw.lognormvariate(0.0, 0.3),
        communicate_s: Callable[[random.Random, int], float] = lambda draw, size: 1e-3 + size / 1e10,
        serve_s: Callable[[random.Random, int], float] = lambda draw, size: 1e-4 + size / 1e10,
        handle_s: Callable[[random.Random, int], float] = lambda draw, size: 0.0,
    ) -> None:
        self._random = random.Random(seed)
        self._compute_s, self._communicate_s, self._serve_s = compute_s, communicate_s, serve_s
        self._handle_s = handle_s

    def compute_s(self, rank: int) -> float:
        """Draw the time of one gradient."""
        return self._compute_s(self._random, rank)

    def communicate_s(self, size: int) -> float:
        """Draw the time of one message."""
        return self._communicate_s(self._random, size)

    def serve_s(self, size: int) -> float:
        """Draw the time a server takes for one request."""
        return self._serve_s(self._random, size)

    def handle_s(self, rank: int, size: int) -> float:  # noqa: ARG002 - subclasses tell workers apart
        """Draw the time a worker works on a message that it sends or has got."""
        return self._handle_s(self._random, size)

    def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest:
        """Return the request that arrived first."""
        return min(waiting, key=lambda w: (w.arrival_s, w.shard, w.worker))


class Replay:
    """The order logged by a real run (`Server.handled`), shard by shard.

    Example:
        >>> schedule = Replay({0: [1, 2, 2, 1]})
    """

    def __init__(self, handled: Mapping[int, Sequence[int]]) -> None:
        self._remaining = {shard: deque(order) for shard, order in handled.items()}

    def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest | None:
        """Return the next request of the log that has arrived; None at the end of the log.

        Raises:
            ProtocolError: the next request of the log never arrives; the log is of another run.
        """
        there = {(item.shard, item.worker): item for item in waiting}
        for shard, order in self._remaining.items():
            if order and (shard, order[0]) in there:
                return there[shard, order.popleft()]
        rest = {shard: list(order)[:5] for shard, order in self._remaining.items() if order}
        if not rest:
            return None
        raise ProtocolError(
            f"the log continues with {rest} (shard: next workers), but waiting are {sorted(there)} (shard, "
            "worker); replay it with the program, options and number of ranks that it was recorded with"
        )
