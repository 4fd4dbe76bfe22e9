"""Sub-server of an elastic tree: a server to its workers and a worker to the top server; pure, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nnlo_common.algorithms import CenterRule
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._events import Action, Event, Lost, Received, Release, Send
from nnlo_common.protocol._messages import Kind, Message
from nnlo_common.protocol._server import Server
from nnlo_common.protocol._shard_client import Phase, ShardClient
from nnlo_common.protocol._wire import PLAIN, Wire

__all__ = ["SubServer"]


class SubServer(Server):
    """Serves the workers of a branch; each of their commits is one step of its own `client` towards the top.

    While a request of its own is unanswered the workers' messages are held back, so that nothing else moves
    the centre during an exchange: it moves by the same float32 numbers as the top's centre, atomically.

    Besides the exchanges it always has one pull of the top's centre under way, on the channel `pulls`: for
    the end of the next epoch. The top also answers it, without the centre, when it wishes something (a stop,
    a pause, another learning rate). Workers that look at the centre get the top's.

    Attributes:
        client: the worker's half towards the top server; its parameters are this server's centre.
        shown: the top's centre as it was last pulled.
        shown_epochs: the epochs at whose end that was.
        final: it is the centre after the last exchange of all sub-servers.
        held: the workers' messages that wait for the top's answer, in order.

    Args:
        rule: the centre's half of the algorithm, for the workers.
        workers: the ranks of the branch's workers.
        client: see above.
        shown: filled with the top's centre.
        pulls: the number of the channel.
        depth: how many requests of a worker may be unanswered.
        wire: how vectors travel between it and its workers.
    """

    def __init__(
        self,
        rule: CenterRule,
        workers: Iterable[int],
        *,
        client: ShardClient,
        shown: Vector,
        pulls: int,
        depth: int = 1,
        wire: Wire = PLAIN,
    ) -> None:
        super().__init__(rule, workers, rank=client.rank, depth=depth, wire=wire)
        self.client, self.shown, self._pulls = client, shown, pulls
        self.shown_epochs, self.final = 0, False
        self.held: list[Received] = []
        self._commits: list[Action] = []  # requests to the top that commits have opened
        self._looks: list[Received] = []  # the worker's pull that the look under way answers, if any
        self._seen: Vector = np.zeros(0, np.float32)
        self._deaths: list[Lost] = []  # of workers, during a pause
        self._reported = 0  # epochs

    @property
    def waits(self) -> bool:
        """Whether workers' messages are held back."""
        client = self.client
        return client.phase in (Phase.OUTSIDE, Phase.JOINING) or bool(client.unanswered) or client.pausing

    def holds(self, rank: int) -> bool:
        """Whether a worker waits for the top's answer."""
        return any(event.message.sender == rank for event in self.held)

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return the actions to perform.

        Raises:
            ProtocolError: the protocol forbids this message now; the error lists the recent events.
        """
        if isinstance(event, Received) and event.message.sender == self.client.shard.server:
            actions = self._hear(event)
        elif isinstance(event, Lost) and self.client.pausing:
            self._deaths.append(event)  # the branch has said that it pauses, so do not change it now
            return []
        elif isinstance(event, Received) and self.waits and event.message.sender not in self._dropped:
            self.held.append(event)
            actions = []
        else:
            actions = self._take(event)
        while not self.waits and (self._deaths or self.held):
            actions += self._take(self._deaths.pop(0) if self._deaths else self.held.pop(0))
        return [*actions, *self._move_up()]

    def drop(self, rank: int, after_s: float) -> list[Action]:
        """Treat a worker as dead though it may speak again; return the actions to perform."""
        return [*super().drop(rank, after_s), *self._report_epochs(), *self._move_up()]

    def answer_pauses(self) -> list[Action]:
        """Ask the top for a pause once all workers wait; first cancel it for workers others need."""
        if self.waits or not self.pauses.waiting:
            return []
        cancelled: list[Action] = [self._paused(one, cancelled=True) for one in self.pauses.cancelled(())]
        if not self.pauses.ready():
            return cancelled
        return [*cancelled, *self._report_epochs(), *self.client.pause()]

    def state(self) -> State:
        """Return all that the next commit depends on; exact in a pause."""
        return {
            "server": super().state(),
            "client": self.client.state(),
            "shown": self.shown.copy(),
            "shown_epochs": self.shown_epochs,
            "reported": self._reported,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state` of a sub-server; its workers must join again.

        Raises:
            ConfigurationError: it was saved with other options, another model or other ranks; nothing is
                changed then.
        """
        parts: dict[str, Any] = {"client": Mapping, "shown": self.shown, "shown_epochs": int, "reported": int}
        require(f"sub-server rank {self.rank}", state, server=Mapping, **parts)
        self.client.check(state["client"])
        super().load(state["server"])
        self.client.load(state["client"])
        np.copyto(self.shown, state["shown"])
        self.shown_epochs, self._reported = state["shown_epochs"], state["reported"]

    # -- inside ---------------------------------------------------------------------------------------

    def _take(self, event: Event) -> list[Action]:
        """Take an event of a worker now."""
        actions = super().handle(event)
        commits, self._commits = self._commits, []
        return [*actions, *commits, *self._report_epochs()]

    def _without(self, rank: int) -> list[Received]:
        gone = [one for one in (*self.held, *self._looks) if one.message.sender == rank]
        self.held = [one for one in self.held if one.message.sender != rank]
        self._looks = [one for one in self._looks if one.message.sender != rank]
        return [*gone, *super()._without(rank)]

    def _unanswered(self) -> list[Received]:
        return [*super()._unanswered(), *self._looks]

    def _apply(self, events: list[Received]) -> None:
        super()._apply(events)
        self.client.begin_step()
        self._commits += self.client.exchange()
        self.client.end_step()

    def _hear(self, event: Received) -> list[Action]:
        """Take a message of the top server."""
        message = event.message
        self.stopping |= message.stop
        self.pauses.wanted |= message.pause
        if message.rate != self.rate:
            self.set_rate(message.rate)
        if message.shard == self._pulls:
            return self._pulled(event)
        before, joining = self.client.looking, self.client.phase is Phase.JOINING
        actions = self.client.receive(event)
        if joining:
            if not self.client.keeps_parameters:
                np.copyto(self.shown, self.rule.center)
            return [*actions, self._pull_next()]
        if message.kind is Kind.PAUSED:
            return [*actions, *self._end_pause(cancelled=message.cancelled)]
        if before:
            looks, self._looks = self._looks, []
            actions += [self._center_to(one, self._seen) for one in looks]
        return actions

    def _pulled(self, event: Received) -> list[Action]:
        """Take the top's centre at the end of an epoch, or only its wishes."""
        message = event.message
        released = Release(message.sender, event.frame)
        if message.vector is None:
            return [released, self._pull_next()]
        np.copyto(self.shown, message.vector)
        self.shown_epochs, self.final = message.sequence, message.final
        return [released, *([] if self.final else [self._pull_next()]), *self._show()]

    def _pull_next(self) -> Send:
        request = Message(Kind.PULL, self.rank, self.shown_epochs + 1, shard=self._pulls)
        return Send(self.client.shard.server, request)

    def _end_pause(self, *, cancelled: bool) -> list[Action]:
        if not cancelled:
            done = self.pauses.complete()
            self.pauses.made = self.client.pauses
            return [self._paused(one, cancelled=False) for one in done]
        waiting, self.pauses.waiting = self.pauses.waiting, []
        return [self._paused(one, cancelled=True) for one in waiting]

    def _pull(self, event: Received) -> list[Action]:
        """Look at the top's centre for a worker."""
        self._looks.append(event)
        self._seen = np.empty_like(self.rule.center)
        return self.client.look(self._seen)

    def _show(self) -> list[Action]:
        """Answer the views of an epoch with the top's centre, once it has that of this epoch."""
        views = self._waiting.views
        shown = [one for one in views if self.peers[one.message.sender].epochs <= self.shown_epochs]
        self._waiting.views = [one for one in views if one not in shown]
        for one in shown:
            self.peers[one.message.sender].views += not one.message.refreshes
        return [self._center_to(one, self.shown) for one in shown]

    def _move_up(self) -> list[Action]:
        """Join the top once all workers are there; leave it once they have left."""
        client = self.client
        client.samples = sum(peer.samples for peer in self.peers.values())
        if client.phase is Phase.OUTSIDE:
            there = {one.message.sender for one in self.held}
            return client.join() if there.issuperset(self.peers.awaited()) and there else []
        if self.waits or client.phase is not Phase.TRAINING:
            return []
        return [] if self.awaited else client.leave()

    def _report_epochs(self) -> list[Action]:
        actions: list[Action] = []
        if self.client.phase is not Phase.TRAINING or self.client.pausing:
            return actions
        while self.awaited and self.peers.have_finished(self._reported + 1):
            self._reported += 1
            actions += self.client.finish_epoch()
        return actions
