"""Heir: a worker that holds a copy of a server's state, and serves in its place once it has died."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import (
    REPLIES,
    Action,
    Activity,
    Kind,
    QueryClient,
    Received,
    Release,
    Worker,
    shards_without,
)
from nnlo_common.protocol._query_messages import AnswerT, BroadcastQuery, Query
from nnlo_common.training._rank_parts import perform
from nnlo_common.training._spare_rank import WITHOUT_SAMPLES, ServerInheritance, SpareRank, answer_to_copy
from nnlo_common.training._worker_rank import WorkerRank

__all__ = ["HeirRank"]


class _SuccessionError(Exception):
    """The server is dead, and this worker takes its place; it ends what the worker was doing."""

    def __init__(self, dead: int) -> None:
        super().__init__(dead)
        self.dead = dead


class HeirRank(WorkerRank):
    """Trains as a worker, holds a copy of a server's state, and serves once that server has died.

    It hears of the death within a call, as that is where it waits. What the call has begun as a worker's is
    dropped, and ended as a server's; what the script has still to do in this epoch is nothing. Its training
    over, it stands by like a spare.

    Args:
        endpoint: this rank's endpoint.
        worker: the state machine.
        queries: sends queries to the query service.
        hosts: the host of each rank that serves, or may.
        serve: makes the part that serves.
        options: those of a `WorkerRank`.

    Attributes:
        on_taking_over: called when it takes over.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        worker: Worker,
        queries: QueryClient,
        hosts: Mapping[int, str],
        *,
        serve: Callable[[], SpareRank],
        **options: Any,
    ) -> None:
        super().__init__(endpoint, worker, queries, hosts, **options)
        self._serve = serve
        self._known = ServerInheritance()
        self._part: SpareRank | None = None  # what serves, or stands by
        self._inside = False  # an activity is under way
        self._saves: int | None = None  # those before a pause that is under way
        self.on_taking_over: list[Callable[[], object]] = []

    @property
    def serving(self) -> SpareRank | None:
        """The part that serves now; None while this rank trains, or stands by."""
        return None if self._part is None or self._part.standing_by else self._part

    def start(self) -> None:
        """Join; as a server, wait until all have."""
        super().start()
        if self.serving is not None:
            self.serving.start()

    def end_epoch(self) -> None:
        """Report the end of the epoch; as a server, serve it to its end."""
        super().end_epoch()
        if self.serving is not None:
            self.serving.end_epoch()

    def last_round(self) -> None:
        """Contribute the steps since the last round; a server has none."""
        super().last_round()
        if self.serving is not None:
            self.serving.last_round()

    def look(self, into: Vector) -> None:
        """Copy the current centre into `into`."""
        super().look(into)
        if self.serving is not None:
            self.serving.look(into)

    def view(self, into: Vector) -> None:
        """Copy the centre into `into` once all have finished the epoch."""
        super().view(into)
        if self.serving is not None:
            self.serving.view(into)
        self._known.views += 1

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service, and wait for the answer."""
        answer = super().ask(query)
        if self.serving is None:
            return answer
        if type(query) in WITHOUT_SAMPLES:
            return self.serving.ask(query)
        return cast("AnswerT", self.serving.answered())

    def pause(self, *, between: bool = False) -> bool:
        """Wait until all workers are at a batch boundary; False: cancelled, or this rank serves now."""
        self._saves = self._queries.record.saves
        granted = super().pause(between=between)
        self._saves = None
        return granted and self.serving is None

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Call `last`, then leave; stand by, and serve if the server dies, while others still train."""
        last()
        self._known.ends = True
        self._work(self._worker.leave(), "the end of the training")
        if self.serving is None:
            self._turn().stand_by_after(self._known, last)
        else:
            self.serving.finish(last)

    def _work(self, activity: Activity, what: str, endpoint: Endpoint | None = None) -> None:
        if self._inside:  # the outer activity ends with this one
            super()._work(activity, what, endpoint)
            return
        self._inside = True
        try:
            super()._work(activity, what, endpoint)
        except _SuccessionError as lost:
            self._take_over(lost.dead)
        finally:
            self._inside = False

    def _lost(self, rank: int, error: PeerLostError | None) -> None:
        self._known.gone.add(rank)
        shards = [one.shard for one in self._worker.shard_clients]
        if self._spares and any(one.server == self._worker.rank for one in shards_without(shards, rank)):
            raise _SuccessionError(rank) from error
        super()._lost(rank, error)

    def _deliver(self, event: Received) -> list[Action]:
        message = event.message
        if message.kind is Kind.COPY:
            self._known.copies.take(message)
            return [answer_to_copy(event, self._worker.rank)]
        if message.kind in REPLIES:
            return super()._deliver(event)
        if message.kind is Kind.LEAVE:
            gone = self._known.over if message.needs_no_more else self._known.departed
            gone.add(message.sender)
            return [Release(message.sender, event.frame)]
        self._known.early.append(event)
        return []

    def _take_over(self, dead: int) -> None:
        """Serve in the place of the dead server from now on."""
        if self._saves is not None:  # perhaps all but the dead have let this rank out of the pause
            self._queries.record.saves = self._saves  # it ends as a server's, which counts it
        asked = self._queries.open
        if self._queries.service in self._known.gone and type(asked) in WITHOUT_SAMPLES:
            self._queries.drop()  # a new service does not know this rank as a worker
        elif dead == self._queries.service and isinstance(asked, BroadcastQuery) and not asked.values:
            raise PeerLostError(dead, "the server has died while it sent its averages to all ranks")
        self._turn().inherit(self._known, dead)

    def _turn(self) -> SpareRank:
        """Train no more; return the part that serves, or stands by to."""
        perform(self._endpoint, self._worker.let_go())
        self._known.epochs = self._worker.epochs
        self._part = self._serve()
        self._part.on_taking_over = self.on_taking_over
        return self._part
