"""Ranks of an elastic tree that serve: the top server, which knows all ranks, and sub-servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.protocol import Event, Lost, Message, Received, SubServer
from nnlo_common.protocol._query_messages import GoodbyeQuery, LeaveQuery
from nnlo_common.training._event_loop import perform
from nnlo_common.training._server_rank import ServerRank

__all__ = ["SubServerRank", "TopServerRank"]


class TopServerRank(ServerRank):
    """Holds the centre; exchanges with sub-servers, and answers the queries of all ranks.

    Args:
        branches: the ranks of each branch, its sub-server first.
        rest: see `ServerRank`.
    """

    def __init__(self, *rest: Any, branches: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(*rest, **options)
        self._subs = {branch[0]: tuple(branch[1:]) for branch in branches}
        self._trains = {rank for ranks in self._subs.values() for rank in ranks}
        self._dead: set[int] = set()

    def stop(self) -> None:
        """Ask each worker to end; sub-servers hear of it at once."""
        super().stop()
        self._tell_wishes()

    def tell_rate(self, rate: float) -> None:
        """Send workers a learning rate from now on; sub-servers hear of it at once."""
        super().tell_rate(rate)
        self._tell_wishes()

    def want_pause(self) -> None:
        """Ask all for a pause; sub-servers hear of it at once."""
        super().want_pause()
        self._tell_wishes()

    def view(self, into: Vector) -> None:
        """Copy the centre into `into`: sub-servers have it from the end of the epoch, and show it."""
        self.look(into)

    def saving(self) -> set[int]:
        """Return the other ranks that save: the sub-servers, and the workers that have not left."""
        assert self.service is not None  # this is the first server
        return set(self._subs) | (self._trains & self.service.present)

    def workers(self) -> set[int]:
        """Return the ranks of all workers."""
        return set(self._trains)

    def lost(self) -> set[int]:
        """Return the ranks of the workers that have died."""
        return set(self._dead)

    def _is_awaited(self, rank: int) -> bool:  # noqa: ARG002 - sub-servers watch their workers
        return False

    def _assembled(self) -> bool:
        return True  # sub-servers pull at the ends of epochs whenever this rank serves

    def _left(self, sender: int) -> None:
        """Do nothing: workers and sub-servers tell the query service themselves."""

    def _take_shard(self, event: Received) -> None:
        perform(self._endpoint, self._server.handle(event))  # the pull of a sub-server

    def _lost(self, event: Lost) -> None:
        if event.rank in self._subs:
            workers = ", ".join(map(str, self._subs[event.rank]))
            raise PeerLostError(
                event.rank, f"the sub-server of the workers {workers} has died, and its centre with it"
            )
        if event.rank not in self._trains or event.rank in self._dead:
            return
        self._dead.add(event.rank)
        left = self._trains - self._dead
        self._losses.append(self._stall_detector.report_death(event.rank, len(left)))
        perform(self._endpoint, self._queries.handle(event))
        if not left:
            raise PeerLostError(event.rank, "the last worker has died")

    def _tell_wishes(self) -> None:
        perform(self._endpoint, self._server.tell_wishes())


class SubServerRank(ServerRank):
    """Serves the workers of a branch; its model shows the top's centre at the end of the last epoch.

    Args:
        server: the state machine; its own centre is no part of the model.
        rest: see `ServerRank`.
    """

    def __init__(self, endpoint: Any, server: SubServer, *rest: Any, **options: Any) -> None:
        super().__init__(endpoint, server, *rest, **options)
        self._machine = server
        self._top = server.client.shard.server
        self._of = f" of the sub-server on rank {server.rank}"

    def end_epoch(self) -> None:
        """Serve until every remaining worker has finished one more epoch, and all other branches, too."""
        super().end_epoch()
        self.wait_until(lambda: self._machine.shown_epochs >= self._epochs or self._machine.final)

    def tell_rate(self, rate: float) -> None:
        """Do nothing: workers get the rate of the top server."""

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Serve until every worker has left and the final centre is here; call `last`, then leave."""
        self._leaving = True
        self.ask(LeaveQuery())
        self.wait_until(lambda: self._machine.final)
        last()
        self.ask(GoodbyeQuery())
        self._endpoint.close()

    def _go_on(self, state: Any, *, others: bool = False) -> None:  # noqa: ARG002 - never with others
        self._epochs = self._pulls = self._machine.shown_epochs

    def _is_awaited(self, rank: int) -> bool:
        return super()._is_awaited(rank) and not self._machine.holds(rank)

    def _warn_of_leaving(self, message: Message) -> None:
        """Do nothing: the top server warns."""

    def _handle(self, event: Event) -> None:
        if isinstance(event, Received) and event.message.sender == self._top:
            if event.message.shard == self._queries.shard:
                perform(self._endpoint, self._queries.handle(event))
            else:
                perform(self._endpoint, self._machine.handle(event))
                self._look_for_pause()
            return
        super()._handle(event)

    def _lost(self, event: Lost) -> None:
        if event.rank == self._top:
            raise PeerLostError(event.rank, "the top server of the tree has died")
        super()._lost(event)
