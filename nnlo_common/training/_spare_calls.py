"""Spares that train in the places of dead workers, as the servers see to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import Kind, Message, Send, Server, Shard
from nnlo_common.training._rank_parts import perform
from nnlo_common.training._training_queries import TrainingQueries

__all__ = ["SpareCalls"]


class SpareCalls:
    """Calls spares that no server needs to train in the places of dead workers, from the next epoch on.

    The first server decides at the end of an epoch, and tells the others before they begin the next one, so
    that all wait for the same workers. What a spare says itself counts more than what a dead server has said.

    Args:
        endpoint: this rank's endpoint.
        server: the state machine.
        shards: returns all shards, by number, each with the rank that serves it and those that may.
        service: returns the query service, on the first server.
        moved: called when a spare is awaited no more.

    Attributes:
        allowed: the script's loop takes batches also on a rank that has had none in earlier epochs, so that
            spares can train; and an epoch follows.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: Server,
        *,
        shards: Callable[[], Mapping[int, Shard]],
        service: Callable[[], TrainingQueries | None],
        moved: Callable[[], object],
    ) -> None:
        self.allowed = False
        self._endpoint, self._server, self._moved = endpoint, server, moved
        self._shards, self._service = shards, service

    def call(self, epochs: int) -> None:
        """Call spares, if this is the first server.

        Args:
            epochs: those that are finished.
        """
        server, service = self._server, self._service()
        if service is None or not self.allowed or server.stopping or server.peers.have_finished(epochs + 1):
            return
        # The last of each line come first, so that the line before them stays whole.
        lines = [shard.spares for shard in self._shards().values()]
        last = sorted({(line.index(spare), spare) for line in lines for spare in line}, reverse=True)
        may = [spare for _, spare in last if service.takes_part(spare) and spare not in self._next]
        free = [spare for spare in may if spare not in server.peers]
        for spare, place in zip(free, sorted(server.vacant), strict=False):
            server.call(spare, place, epochs)
            service.admit(spare)
            self._tell(spare, self._others)

    def keep(self) -> None:
        """Keep the first spares for the servers, though they were called; all, if no epoch follows.

        Those that were told so train; but for one that serves by now.
        """
        if (service := self._service()) is None:
            return
        serving = {shard.server for shard in self._shards().values()}
        for spare in self._server.peers.called():
            kept = spare in self._next or not self.allowed
            if spare in serving or (kept and spare not in service.places.told):
                self.dismiss(spare)

    def dismiss(self, spare: int) -> None:
        """Let a spare that was called be a spare again."""
        perform(self._endpoint, self._server.dismiss(spare))
        if (service := self._service()) is not None:
            perform(self._endpoint, service.dismiss(spare))
            self._tell(spare, self._others)
        self._moved()

    def dismiss_leavers(self) -> None:
        """Wait no more for spares that were called, and whose scripts are over."""
        service = self._service()
        if service is not None and self._server.places:
            for spare in self._server.peers.called():
                if not service.takes_part(spare):
                    self.dismiss(spare)

    def tell_all(self, shards: Collection[Shard] | None = None) -> None:
        """Tell servers which spares are called, and which are not: they or this rank have taken over.

        Args:
            shards: theirs; None: those of all other servers.
        """
        peers, spares = self._server.peers, {one for shard in self._shards().values() for one in shard.spares}
        for spare in sorted(spares - (peers.keys() - peers.called())):
            self._tell(spare, self._others if shards is None else shards)

    def hear(self, message: Message, gone: Collection[int]) -> None:
        """Wait for a spare, or no more, as the first server or the spare itself says.

        Args:
            message: a CALL or a PLACE.
            gone: dead ranks. What a dead server has said the next one has said anew.
        """
        server = self._server
        if message.kind is Kind.PLACE:
            server.seat(message.sender, message.place, message.epochs)
            if (service := self._service()) is not None:
                service.admit(message.sender)
        elif message.sender in gone:
            return
        elif message.takes_back:
            if message.spare in server.peers.called():
                self.dismiss(message.spare)
        elif message.spare not in server.peers and message.spare not in gone:
            server.call(message.spare, message.place, message.epochs)

    @property
    def _next(self) -> set[int]:
        """The spares that stay: each takes the place of the next server that dies."""
        return {spare for shard in self._shards().values() for spare in shard.spares[:1]}

    @property
    def _others(self) -> list[Shard]:
        return [shard for shard in self._shards().values() if shard.server != self._server.rank]

    def _tell(self, spare: int, shards: Iterable[Shard]) -> None:
        rank, peers = self._server.rank, self._server.peers
        called = spare in peers.called()
        epochs, place = (peers[spare].epochs, self._server.places[spare]) if called else (0, 0)
        for shard in shards:
            told = Message(
                Kind.CALL, rank, 0, epochs, place, shard=shard.index, stop=not called, samples=spare
            )
            perform(self._endpoint, [Send(shard.server, told)])
