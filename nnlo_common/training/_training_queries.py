"""Query service of a training, on its first server: what its ranks may ask, and which spares it calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._state_tree import State
from nnlo_common.protocol import (
    Action,
    Averages,
    Broadcasts,
    EpochMeans,
    Leasing,
    Means,
    Notes,
    PausesBetween,
    Places,
    QueryService,
    Server,
)
from nnlo_common.protocol._query_messages import LastRoundQuery

__all__ = ["ALIKE", "Retiring", "TrainingQueries"]

#: Advice for ranks that wait for each other in different collectives.
ALIKE = "call evaluate() and mean() on all ranks, not under `if rank == ...` or `if role == ...`"


@runtime_checkable
class Retiring(Protocol):
    """A handler of queries that is told of workers that serve another shard."""

    def retired(self, rank: int) -> None:
        """Note that a worker serves another shard by now."""


class TrainingQueries(QueryService):
    """Answers the queries of a training's ranks.

    Attributes:
        averages: the averages of the workers' buffers.
        pauses: the pauses between two epochs.
        places: tells spares in whose places they train.

    Args:
        servers: the ranks of the servers and spares; the service runs on the first.
        workers: the ranks that train.
        leads: the first rank of each worker, which leases samples for it; None: each worker is one rank.
        shard: the number of the channel.
        averages: the averages of the workers' buffers.
        patient: a worker waits for leases that others may still give back.
        pauses: how many pauses between two epochs another rank has known.
    """

    def __init__(
        self,
        servers: Iterable[int],
        workers: Iterable[int],
        shard: int,
        averages: Averages,
        *,
        leads: Iterable[int] | None = None,
        patient: bool,
        pauses: int = 0,
    ) -> None:
        first, *others = servers
        workers = list(workers)
        ranks = [first, *others, *workers]
        self.averages, self._means, self.pauses = averages, Means(ranks), PausesBetween(pauses)
        self._leasing, self._notes = Leasing(workers if leads is None else leads, patient=patient), Notes()
        self.places = Places(first)
        rounds, copies = Means(ranks, LastRoundQuery), Broadcasts(ranks, first)
        self._epoch_means = EpochMeans(workers)
        parts = (
            self._means,
            rounds,
            averages,
            self._notes,
            self._epoch_means,
            copies,
            self._leasing,
            self.pauses,
            self.places,
        )
        super().__init__(first, shard, ranks, parts)

    def copy(self) -> State:
        """Return what another rank needs to go on with these queries."""
        parts = self.averages.state(), self._leasing.state(), self._notes.state()
        return dict(zip(("averages", "leases", "notes"), parts, strict=True))

    def load_copy(self, state: Mapping[str, Any]) -> None:
        """Go on from a `copy`, once `take_over` has been called."""
        self.averages.load(state["averages"])
        self._leasing.load(state["leases"])
        self._notes.load(state["notes"])

    def follow(self, server: Server) -> None:
        """Call spares, and save what workers have had here, as this server's records say."""
        self.places.pauses = lambda: server.pauses.made
        self.places.place_of = lambda rank: (
            (server.places[rank], server.peers[rank].epochs) if rank in server.peers.called() else None
        )
        self._leasing.saved_as = lambda: server.saved_as

    def admit(self, rank: int) -> None:
        """Count with a spare that trains in the place of a dead worker."""
        self._leasing.admit(rank)
        self._epoch_means.admit(rank)

    def dismiss(self, rank: int) -> list[Action]:
        """Count no more with a spare that was called and does not come."""
        return self.tell([*self._leasing.gone(rank, lost=False), *self._epoch_means.gone(rank, lost=False)])

    def retire(self, rank: int) -> list[Action]:
        """Go on with a worker that serves another shard by now; it asks like a server from then on."""
        self.averages.gone(rank, lost=True)
        for part in self._parts:
            if isinstance(part, Retiring):
                part.retired(rank)
        return self.tell([*self._leasing.retire(rank), *self._epoch_means.gone(rank, lost=False)])

    @property
    def in_mean(self) -> bool:
        """Whether the server itself waits for all ranks' parts of a mean."""
        return self.rank in self._means.waiting

    def refuse_absence(self, epochs: int) -> None:
        """Raise if a rank waits for a mean after an epoch that the server has passed: a deadlock."""
        for rank, part in self._means.waiting.items():
            if part.epochs is not None and part.epochs < epochs:
                raise ConfigurationError(
                    f"rank {rank} waits for all ranks in evaluate() or mean() after epoch {part.epochs}, "
                    f"but rank {self.rank} continued with the next epoch; {ALIKE}"
                )

    def left(self, rank: int) -> list[Action]:
        """Record that a worker has left and sends no more queries."""
        self.present.discard(rank)
        return self.gone(rank)

    def let_wait(self, *, may_wait: bool) -> list[Action]:
        """Set whether workers may wait for leases that others may give back."""
        return self.tell(self._leasing.let_wait(may_wait=may_wait))
