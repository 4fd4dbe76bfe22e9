"""Query service of a training, on its first server."""

from __future__ import annotations

from collections.abc import Iterable

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.protocol import Action, Averages, Broadcasts, EpochMeans, Leasing, Means, Notes, QueryService
from nnlo_common.protocol._query_messages import LastRoundQuery

__all__ = ["ALIKE", "TrainingQueries"]

#: Advice for ranks that wait for each other in different collectives.
ALIKE = "call evaluate() and mean() on all ranks, not under `if rank == ...` or `if role == ...`"


class TrainingQueries(QueryService):
    """Answers the queries of a training's ranks.

    Attributes:
        averages: the averages of the workers' buffers.

    Args:
        servers: the ranks of the servers; the service runs on the first.
        workers: the ranks that train.
        leads: the first rank of each worker, which leases samples for it; None: each worker is one rank.
        shard: the number of the channel.
        averages: the averages of the workers' buffers.
        patient: a worker waits for leases that others may still give back.
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
    ) -> None:
        first, *others = servers
        workers = list(workers)
        ranks = [first, *others, *workers]
        self.averages, self._means = averages, Means(ranks)
        self._leasing = Leasing(workers if leads is None else leads, patient=patient)
        rounds, copies = Means(ranks, LastRoundQuery), Broadcasts(ranks, first)
        parts = self._means, rounds, averages, Notes(), EpochMeans(workers), copies, self._leasing
        super().__init__(first, shard, ranks, parts)

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
