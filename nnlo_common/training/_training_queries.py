"""Query service of a training, on its first server: what is answered there, and what the server tells it."""

from __future__ import annotations

from collections.abc import Iterable

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.protocol import Action, Averages, Broadcasts, EpochMeans, Leasing, Means, Notes, QueryService
from nnlo_common.protocol._query_messages import LastRoundQuery

__all__ = ["ALIKE", "TrainingQueries"]

#: What to do where ranks wait for each other in different places.
ALIKE = "call evaluate() and mean() on all ranks alike, not behind a question for the rank or the role"


class TrainingQueries(QueryService):
    """Answers what the ranks of a training ask besides their exchanges.

    Attributes:
        averages: of the workers' buffers.

    Args:
        servers: their ranks; it runs on the first of them.
        workers: their ranks.
        shard: the number of the channel.
        averages: of the workers' buffers.
        patient: have workers wait for leases that others may still leave behind.
    """

    def __init__(
        self, servers: Iterable[int], workers: Iterable[int], shard: int, averages: Averages, *, patient: bool
    ) -> None:
        first, *others = servers
        workers = list(workers)
        ranks = [first, *others, *workers]
        self.averages, self._means, self._leasing = averages, Means(ranks), Leasing(workers, patient=patient)
        rounds, copies = Means(ranks, LastRoundQuery), Broadcasts(ranks, first)
        parts = self._means, rounds, averages, Notes(), EpochMeans(workers), copies, self._leasing
        super().__init__(first, shard, ranks, parts)

    @property
    def in_mean(self) -> bool:
        """Whether the server itself waits for all ranks' part of a mean."""
        return self.rank in self._means.waiting

    def refuse_absence(self, epochs: int) -> None:
        """Refuse ranks that wait for a mean after an epoch before this one, which the server is past."""
        for rank, part in self._means.waiting.items():
            if part.epochs is not None and part.epochs < epochs:
                raise ConfigurationError(
                    f"rank {rank} waits for all ranks in evaluate() or mean() after epoch {part.epochs}, "
                    f"but rank {self.rank} has gone on to the next; {ALIKE}"
                )

    def left(self, rank: int) -> list[Action]:
        """Take note that a worker has left: it asks nothing any more."""
        self.present.discard(rank)
        return self.gone(rank)

    def let_wait(self, *, may_wait: bool) -> list[Action]:
        """Have workers wait for what others may leave behind of an epoch, or not."""
        return self.tell(self._leasing.let_wait(may_wait=may_wait))
