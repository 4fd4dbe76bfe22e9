"""The server's side of the protocol, for one shard of the centre: a pure state machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from nnlo_common.algorithms import CenterRule
from nnlo_common.base._block_threads import on_threads, with_threads
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import PartWork, Vector
from nnlo_common.base._state_tree import State
from nnlo_common.protocol._events import (
    Action,
    Event,
    Lost,
    Received,
    Release,
    Send,
    Story,
    kept,
    restored,
    restored_peers,
)
from nnlo_common.protocol._messages import ONE_WAY, Kind, Message
from nnlo_common.protocol._waiting_requests import WaitingRequests, contributions, count_commit, refusal
from nnlo_common.protocol._wire import PLAIN, Wire, WireEnds
from nnlo_common.protocol._worker_records import AWAITED, Peer, Peers, Standing, refused, violated

__all__ = ["Server"]

_NO_WISH = (False, 0.0, False)
_PACKED = (Kind.EXCHANGE, Kind.PUSH)  # what another wire packs
# A shorter reply is copied, and fits one part.
_LONG = 1 << 17
_UNSAVED = (Standing.LOST, Standing.CALLED)  # standings of spares without a part of their own in checkpoints


class Server:
    """Serves one shard of the centre: takes events, moves the centre by its rule, returns actions.

    It does no input or output, reads no clock and draws no random number: the same events give the same
    centre, bit for bit.

    Attributes:
        rule: the centre's half of the algorithm; `rule.center` and `rule.clock` are the centre.
        awaited: the number of workers that may still contribute.
        peers: the record of each worker, by rank.
        other_servers: the epochs after which each of them, and each rank that may take the place of one, has
            pulled the centre last; inf once it will pull no more.
        turned: those of them that were workers of this server.
        places: the spares that train in the places of dead workers, or will: spare to worker.
        by_parts: leave a commit on arrival to the `fill` of its reply, so that it is made while it is sent;
            a long reply that is the centre is sent from there.
        staleness: the number of committed contributions by staleness.
        stopping: every reply from now on asks its worker to stop.
        commits_lost: after a `take_over`, the commits of the dead server that workers have seen and this one
            has not.
        rate: the learning rate that replies send to workers; 0: none.
        pauses: pauses of all workers together; set `pauses.wanted` to request one.
        after_commit: called after each commit, before its replies are made; it may change the centre.
        threads: tells how many may compute here while these workers wait for it; None: as many as always.
        before_taking: called with each request that is allowed, before it changes anything; it may raise.
        handled: with `record`, the ranks whose requests were handled, in order. A replay needs only these
            lists of all shards.

    Example:
        >>> import numpy as np
        >>> from nnlo_common import EASGD, Frame
        >>> rule = EASGD(alpha=0.5).center(np.zeros(1, np.float32), workers=1, optimizer=None)
        >>> server = Server(rule, workers=[1])
        >>> frame = Frame(1)
        >>> (reply,) = server.handle(Received(Message(Kind.JOIN, sender=1, sequence=0), frame))
        >>> reply.message.kind.name, reply.message.vector
        ('CENTER', array([0.], dtype=float32))
    """

    def __init__(
        self,
        rule: CenterRule,
        workers: Iterable[int],
        *,
        rank: int = 0,
        shard: int = 0,
        depth: int = 1,
        other_servers: Iterable[int] = (),
        record: bool = False,
        by_parts: bool = False,
        wire: Wire = PLAIN,
    ) -> None:
        self.rank, self.depth, self.by_parts = rank, depth, by_parts
        self.peers = Peers({worker: Peer() for worker in workers})
        self.serve(rule, shard, wire)
        self.awaited = len(self.peers)
        self.other_servers: dict[int, float] = dict.fromkeys(other_servers, 0)
        self.turned = set[int]()
        self.places: dict[int, int] = {}
        self.staleness: Counter[int] = Counter()
        self.stopping, self.rate, self.commits_lost = False, 0.0, 0
        self.after_commit: Callable[[], object] | None = None
        self.threads: Callable[[Collection[int]], int] | None = None
        self.before_taking: Callable[[Message], object] = lambda message: None
        self.handled: list[int] | None = [] if record else None
        self._dropped: dict[int, float] = {}  # after how long a silence
        self._waiting = WaitingRequests(self.peers)
        self.pauses = self._waiting.pauses
        self._calls: list[Received] = []  # pulls of other servers that wait for an epoch's end
        self._told: dict[int, tuple[bool, float, bool]] = {}  # the wishes that other servers have heard of
        self._holder: int | None = None  # the worker with the lock
        # A worker has ended an epoch and may wait for the others, so let in all that queue.
        self._warm = False
        # Each contribution is a commit, however many workers there are.
        # The progress when the first worker had finished so many epochs.
        self.progress_at: list[float] = [0.0]
        rule.attend(self.awaited)
        self.handlers: dict[Kind, Callable[[Received], list[Action]]] = {
            Kind.JOIN: self._join,
            Kind.EXCHANGE: self._contribution,
            Kind.PUSH: self._contribution,
            Kind.PULL: self._pull,
            Kind.LOCK: self._lock,
            Kind.COMMIT: self._commit,
            Kind.EPOCH: self._epoch,
            Kind.VIEW: self._view,
            Kind.OPTIONS: self._options,
            Kind.SAMPLE: self._sample,
            Kind.LEAVE: self._leave,
            Kind.PAUSE: self._pause,
            Kind.ROUND: self._round,
        }

    # -- calls from outside ---------------------------------------------------------------------------

    def serve(self, rule: CenterRule, shard: int, wire: Wire = PLAIN) -> None:
        """Serve this shard from now on; call it before any worker has joined.

        Args:
            rule: the centre's half of the algorithm.
            shard: the shard's number.
            wire: how vectors travel between it and its workers.
        """
        self.rule, self.shard = rule, shard
        self.story = Story(f"server rank {self.rank}, shard {shard}")
        self.of_any_size = {Kind.OPTIONS, *(_PACKED if wire.packs else ())}
        self._wire = wire
        self._wires = WireEnds(wire)  # to each worker that has joined
        self._at_once = rule.max_staleness is None and rule.quorum(len(self.peers) + 1) <= 1

    @property
    def finished(self) -> bool:
        """Whether every worker has left or died."""
        return self.awaited == 0

    @property
    def queued(self) -> int:
        """The number of contributions that wait for others."""
        return len(self._waiting.contributions)

    def pulled_by(self, ranks: Iterable[int], epochs: float) -> bool:
        """Whether each of these servers has pulled the centre of the end of this epoch, or of a later one."""
        return all(self.other_servers.get(rank, math.inf) >= epochs for rank in ranks)

    def set_rate(self, rate: float) -> None:
        """Send workers a learning rate with all replies from now on; 0: stop sending one.

        A rate above 0 replaces the options that workers have sent for their contributions.
        """
        self.rate = rate
        if rate:
            for peer in self.peers.values():
                peer.options = None

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return the actions to perform.

        Raises:
            ProtocolError: the protocol forbids this message now; the error lists the recent events.
        """
        if isinstance(event, Lost):
            gone = self._without(event.rank)
            return [*(Release(event.rank, item.frame) for item in gone), *self._move_on()]
        message = event.message
        self.story.tell("received", message)
        if message.sender in self.other_servers and self._is_call(message):
            self._calls.append(event)
            return self._answer_calls()
        if message.needs_no_more and message.sender in self.other_servers:
            self.other_servers[message.sender] = math.inf
            return [Release(message.sender, event.frame), *self._retire(message.sender)]
        if message.sender in self._dropped:
            return [refusal(event, self.rank, self._dropped[message.sender])]
        if message.kind is Kind.TURN and message.sender in self.peers:
            return self._turn(event)
        problem = refused(self, message)
        if problem is not None:
            raise self.story.error(problem)
        if self._wire.packs and message.kind in _PACKED:
            event = self._wires.unpacked(event, self.story)
            message = event.message
        self.before_taking(message)
        peer = self.peers[message.sender]
        if message.kind is not Kind.JOIN:
            peer.sequence, peer.fresh = message.sequence, False
        if message.kind not in ONE_WAY:
            peer.unanswered += 1
        if not (message.kind is Kind.JOIN and message.again):
            peer.samples = message.samples
        if self.handled is not None and message.kind is not Kind.PAUSE:  # a pause moves nothing
            self.handled.append(message.sender)
        with self._lent(message):
            return self.handlers[message.kind](event)

    def _lent(self, message: Message) -> AbstractContextManager[None]:
        """Let a commit have the threads of the workers that wait for it."""
        if self.threads is None or message.kind is not Kind.EXCHANGE or not self.rule.heavy:
            return nullcontext()
        waiting = {message.sender, *(one.message.sender for one in self._waiting.contributions)}
        return with_threads(self.threads(waiting))

    def _is_call(self, message: Message) -> bool:
        """Whether another server pulls an epoch's centre; a sub-server does so on a channel of its own."""
        return message.kind is Kind.PULL and not self._is_of_worker(message)

    def _is_of_worker(self, message: Message) -> bool:
        """Whether a message is that of a worker, about this shard."""
        trains = self.peers.trains(message.sender) and message.sender not in self.turned
        return trains and message.shard == self.shard

    def _unanswered(self) -> list[Received]:
        """Return the workers' requests that wait for an answer."""
        return list(self._waiting)

    def tell_wishes(self) -> list[Action]:
        """Answer the pulls of sub-servers that have not heard of a new wish: they pull again."""
        subs = [one for one in self._calls if one.message.sender in self.peers.keys() - self.turned]
        news = [one for one in subs if self._told.get(one.message.sender, _NO_WISH) != self._wishes()]
        self._calls = [event for event in self._calls if event not in news]
        return [self._reply(event, with_vector=False) for event in news]

    def _wishes(self) -> tuple[bool, float, bool]:
        """Return what replies ask of workers."""
        return self.stopping, self.rate, self.pauses.wanted

    def drop(self, rank: int, after_s: float) -> list[Action]:
        """Treat a worker as dead though it may speak again; return the actions to perform.

        Args:
            rank: the worker.
            after_s: how long it has been silent.
        """
        self._dropped[rank] = after_s
        gone = self._without(rank)
        return [*(refusal(item, self.rank, after_s) for item in gone), *self._move_on()]

    def validate(self) -> None:
        """Check every invariant; tests call it after each event."""
        broken = violated(self, [event.message.sender for event in self._unanswered()])
        if self._waiting.ready(self.rule, self.peers):
            broken = "no commit is overdue"
        if self._waiting.locks and self._holder is None:
            broken = "no worker waits for a free lock"
        if self._holder is not None and self.peers[self._holder].standing is not Standing.TRAINING:
            broken = "the lock holder is training"
        if broken:
            raise AssertionError("\n  ".join([f"broken invariant: {broken}", *self.story.lines()]))

    def state(self) -> State:
        """Return the centre, all counts, and the contributions that wait for others.

        Raises:
            ProtocolError: a worker holds the lock, or waits for the lock or the end of an epoch.
        """
        if self._waiting.locks or self._holder is not None or self._waiting.views:
            raise self.story.error("cannot save while a worker holds the lock or waits; pause all first")
        names = self.saved_as
        waiting = [event.message for event in self._waiting.contributions]
        pending = [kept(message.of(names[message.sender])) for message in waiting]
        peers = {names[rank]: peer for rank, peer in self.peers.states().items() if rank in names}
        return {**self._records(peers, pending), **self._wires.states(names)}

    @property
    def saved_as(self) -> dict[int, int]:
        """Whose record each worker's is in a saved state: a spare's is that of the worker it replaces."""
        made = self.pauses.made  # a spare that has joined since the pause is not in what it saves
        living = [
            spare
            for spare, peer in self.peers.items()
            if peer.standing not in _UNSAVED and peer.pauses < made
        ]
        held = {spare: place for spare, place in self.places.items() if spare in living}
        own = {rank: rank for rank in self.peers if rank not in self.places}
        return {rank: name for rank, name in own.items() if rank not in held.values()} | held

    def _records(self, peers: Mapping[int, State], pending: list[State]) -> State:
        """Return the centre and all counts, with these records of workers and these waiting messages."""
        return {
            "rule": self.rule.state(),
            "staleness": sorted([stale, count] for stale, count in self.staleness.items()),
            "rate": self.rate,
            "progress_at": list(self.progress_at),
            "workers": {str(rank): peer for rank, peer in sorted(peers.items())},
            "pending": pending,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state` of a server; its workers must join again.

        Raises:
            ConfigurationError: it was saved with other options, another model or other ranks; nothing is
                changed then.
        """
        owner = f"server shard {self.shard}"
        peers = restored_peers(owner, state)
        if peers.keys() != self.peers.keys():
            raise ConfigurationError(
                f"{owner}: the state was saved with the workers {sorted(peers)}, but the workers now are "
                f"{sorted(self.peers)}; resume with the same ranks"
            )
        pending = [restored(owner, item, self.rule.center.size) for item in state["pending"]]
        wires = self._wires.loaded(owner, state)
        self._load_center(state)
        self._wires = wires
        self.progress_at = list(state["progress_at"])
        self.peers.update(peers)
        self._warm = any(peer.epochs for peer in peers.values())
        for rank, peer in peers.items():
            peer.unanswered = sum(event.message.sender == rank for event in pending)
        self._waiting.contributions = pending

    def copy(self) -> State:
        """Return what another rank needs to serve in the place of this one; at any moment.

        It has no requests: a worker that waits asks the other rank again.
        """
        peers = {rank: peer.state() for rank, peer in self.peers.items()}
        return {
            "server": self._records(peers, []),
            "stopping": self.stopping,
            "gone": {str(rank): one.standing.name for rank, one in self.peers.items() if one.gone},
            "places": {str(spare): place for spare, place in self.places.items()},
            "called": self.peers.called(),
        }

    def take_over(self, state: Mapping[str, Any], left: Iterable[int] = ()) -> None:
        """Serve in the place of a dead server, from its `copy`; its workers join again.

        A learning rate and a wish to stop that this server knows itself are kept.

        Args:
            state: the copy.
            left: workers that have left, by what this rank has heard itself.
        """
        for rank in left:
            self.peers[rank].standing = Standing.LEFT
        rate, saved = self.rate, state["server"]
        told = restored_peers(f"server shard {self.shard}", saved)
        self._load_center(saved)
        self.rate = rate or self.rate
        self.stopping |= bool(state["stopping"])
        self.progress_at = list(saved["progress_at"])
        gone = {int(rank): Standing[name] for rank, name in state["gone"].items()}
        called = set(state["called"]) - self.places.keys()  # those that have told this rank train by now
        self.places |= {int(spare): place for spare, place in state["places"].items()}
        for rank, peer in told.items():
            if rank not in self.peers or not self.peers[rank].gone:
                peer.standing = Standing.CALLED if rank in called else gone.get(rank, Standing.EXPECTED)
                self.peers[rank] = peer
        self.awaited = len(self.peers.awaited())
        self._attend()
        self._warm = any(peer.epochs or peer.standing is Standing.LEFT for peer in self.peers.values())
        self.story.tell("takes over at clock", self.rule.clock)

    def depart(self, rank: int) -> list[Action]:
        """Wait no more for a worker that has left before it has joined again."""
        self._depart(rank, Standing.LEFT)
        return self._move_on()

    # -- spares in the places of dead workers ---------------------------------------------------------

    @property
    def vacant(self) -> list[int]:
        """The dead workers in whose places nobody trains, or will."""
        had = {rank: [rank] for rank in self.peers if rank not in self.places}
        for spare, place in self.places.items():
            had[place].append(spare)
        lost = [rank for rank, peer in self.peers.items() if peer.standing is Standing.LOST]
        return [place for place, ranks in had.items() if set(ranks) <= set(lost)]

    def call(self, spare: int, place: int, epochs: int) -> None:
        """Let a spare train in the place of a dead worker after this epoch; its JOIN follows."""
        self._add(spare, place, Peer(Standing.CALLED, epochs=epochs))

    def seat(self, spare: int, place: int, epochs: int) -> None:
        """Expect a spare that trains in the place of a dead worker, as it says itself."""
        if spare not in self.peers or self.peers[spare].standing is Standing.CALLED:
            self._add(spare, place, Peer(epochs=epochs))

    def dismiss(self, spare: int) -> list[Action]:
        """Let a spare that was called be a spare again."""
        assert self.peers[spare].standing is Standing.CALLED  # callers check it
        del self.peers[spare], self.places[spare]
        self.awaited -= 1
        self._attend()
        return self._move_on()

    def _add(self, spare: int, place: int, peer: Peer) -> None:
        self.awaited += spare not in self.peers
        self.peers[spare], self.places[spare] = peer, place
        self._attend()

    def forget_server(self, rank: int) -> list[Action]:
        """Wait no more for another server, which is dead."""
        self.other_servers.pop(rank, None)
        self._calls = [event for event in self._calls if event.message.sender != rank]
        return self._answer_calls()

    def load_for_others(self, state: Mapping[str, Any]) -> None:
        """Resume from the centre in a server's `state`, but with other workers.

        They start at the centre, in the epoch of the slowest earlier worker; waiting contributions are
        dropped.

        Raises:
            ConfigurationError: it was saved with other options or another model; nothing is changed then.
        """
        peers = restored_peers(f"server shard {self.shard}", state)
        epochs = min((peer.epochs for peer in peers.values()), default=0)
        self._load_center(state)
        self.progress_at = list(state["progress_at"])
        self.begin_after(epochs)

    def begin_after(self, epochs: int) -> None:
        """Begin with the centre as it is, for workers that have finished this many epochs elsewhere."""
        for peer in self.peers.values():
            peer.epochs = epochs
        known = [*self.progress_at, *[self.rule.progress] * (epochs + 1)]
        self.progress_at = known[: epochs + 1]

    def _load_center(self, state: Mapping[str, Any]) -> None:
        self.rule.load(state["rule"])
        self.staleness, self.rate = Counter(dict(state["staleness"])), state["rate"]

    # -- one method per kind of message ---------------------------------------------------------------

    def _join(self, event: Received) -> list[Action]:
        peer = self.peers[event.message.sender]
        peer.standing = Standing.QUEUING
        # On other servers it may queue for longer, until a worker here has trained on.
        later = event.message.again or self.rule.capacity() is not None
        peer.fresh = later and not (self._warm or event.message.newly or event.message.trained)
        if event.message.sender in self.places:
            self.other_servers.pop(event.message.sender, None)  # it is a spare no more
        if event.message.again:
            self._know(peer, event.message)
        if not event.message.keeps_parameters:
            peer.sequence = 0  # resumed from a saved record, but starts anew
        self._waiting.joins.append(event)
        if event.message.again:
            return [*self._admit(), *self._move_on()]  # others may have waited to hear where it is
        return [*self._admit(), *self.answer_pauses()]

    def _know(self, peer: Peer, message: Message) -> None:
        """Note where a worker is that goes on here after another server's death."""
        peer.epochs, peer.views = message.epochs, message.views
        if message.newly and self.shard:
            peer.pauses = message.pauses  # the others may still be in the last of them here
        else:
            self.pauses.made = max(self.pauses.made, message.pauses)
        self.commits_lost = max(self.commits_lost, message.pulled_at - self.rule.clock)
        if message.after_last_round:
            self._waiting.done.add(message.sender)
        self._warm |= peer.epochs > 0
        while len(self.progress_at) <= peer.epochs:
            self.progress_at.append(self.rule.progress)

    def _contribution(self, event: Received) -> list[Action]:
        if self._at_once and not self._waiting.contributions:
            # Fast path for asynchronous exchanges; the general path below does the same.
            if self.by_parts and event.message.kind is Kind.EXCHANGE and not self._waiting.joins:
                return [self._move_by_parts(event)]
            self._apply([event])
            reply = self._reply_to_contribution(event)
            return [reply, *self._admit()] if self._waiting.joins else [reply]
        self._waiting.contributions.append(event)
        return [*self._commit_ready(), *self.answer_pauses()]

    def _pull(self, event: Received) -> list[Action]:
        return [self._center_to(event)]

    def _lock(self, event: Received) -> list[Action]:
        self._waiting.locks.append(event)
        return self._grant()

    def _commit(self, event: Received) -> list[Action]:
        message = event.message
        if message.sender != self._holder:
            raise self.story.error(
                f"rank {message.sender} sent COMMIT without the lock; rank {self._holder} holds it"
            )
        self._holder = None
        self._apply([event])
        released = Release(message.sender, event.frame)
        return [released, *self._grant(), *self._admit(), *self.answer_pauses()]

    def _epoch(self, event: Received) -> list[Action]:
        peer = self.peers[event.message.sender]
        peer.epochs, peer.waited = peer.epochs + 1, event.message.waited
        peer.round = None if peer.round is None else 0
        if len(self.progress_at) == peer.epochs:
            self.progress_at.append(self.rule.progress)
        self._warm = True
        released = Release(event.message.sender, event.frame)
        moved = [*self._commit_ready(), *self._admit(), *self._show(), *self._answer_calls()]
        return [released, *moved, *self.answer_pauses()]

    def _pause(self, event: Received) -> list[Action]:
        self.pauses.waiting.append(event)
        # The dead server may have asked only some workers for the pause.
        self.pauses.wanted |= event.message.again and event.message.pauses > self.pauses.made
        return self.answer_pauses()

    def _view(self, event: Received) -> list[Action]:
        self._waiting.views.append(event)
        return self._show()

    def _options(self, event: Received) -> list[Action]:
        assert event.message.vector is not None  # refused() has seen to it
        self.peers[event.message.sender].options = event.message.vector.copy()
        return [Release(event.message.sender, event.frame)]

    def _sample(self, event: Received) -> list[Action]:
        assert event.message.vector is not None  # refused() has seen to it
        self.peers[event.message.sender].sample = event.message.vector.copy()
        return [Release(event.message.sender, event.frame)]

    def _round(self, event: Received) -> list[Action]:
        self.peers[event.message.sender].round = event.message.round
        return [Release(event.message.sender, event.frame), *self._commit_ready(), *self.answer_pauses()]

    def _leave(self, event: Received) -> list[Action]:
        sender = event.message.sender
        if self.peers[sender].unanswered or self._holder == sender:
            raise self.story.error(f"rank {sender} left with replies outstanding or the lock held")
        self._depart(sender, Standing.LEFT)
        return [Release(sender, event.frame), *self._move_on()]

    def _turn(self, event: Received) -> list[Action]:
        """Let a worker be one of the other servers, or one that stands by."""
        sender = event.message.sender
        self.other_servers.setdefault(sender, 0)
        if not self.peers[sender].gone:
            self.pauses.passed = max(self.pauses.passed, self.peers[sender].epochs)
        answer = Message(Kind.ACK, self.rank, 0, self.rule.clock, shard=self.shard, mark=True)
        return [Send(sender, answer, event.frame), *self._retire(sender)]

    def _retire(self, rank: int) -> list[Action]:
        """Wait no more for a rank as a worker, if it was one."""
        if rank not in self.peers or rank in self.turned:
            return []
        self.turned.add(rank)
        if self.peers[rank].gone:
            return []
        gone = self._without(rank)
        return [*(Release(rank, item.frame) for item in gone), *self._move_on()]

    def _without(self, rank: int) -> list[Received]:
        """Stop waiting for a lost worker; return its unanswered requests."""
        self.story.tell("lost rank", rank)
        self._depart(rank, Standing.LOST)
        self.peers[rank].unanswered = 0
        if self._holder == rank:
            self._holder = None
        return self._waiting.drop(rank)

    def _depart(self, rank: int, standing: Standing) -> None:
        self.awaited -= self.peers[rank].standing in AWAITED
        self.peers[rank].standing = standing
        self._attend()

    def _attend(self) -> None:
        # Only deaths: at the end of a training it depends on timing who has left already.
        self.rule.attend(sum(peer.standing is not Standing.LOST for peer in self.peers.values()))

    # -- requests that may now be ready ---------------------------------------------------------------

    def _move_on(self) -> list[Action]:
        """Answer the requests that waited for a worker that is gone."""
        moved = [*self._commit_ready(), *self._grant(), *self._admit(), *self._show()]
        return [*moved, *self._answer_calls(), *self.answer_pauses()]

    def _admit(self) -> list[Action]:
        actions: list[Action] = []
        joins = self._waiting.joins
        while joins:
            # By rank, not by arrival, so that all servers let the same workers in first.
            allowed = sorted(self.peers.awaited())[: None if self._warm else self.rule.capacity()]
            # Whoever has trained with a dead server goes on.
            event = next((one for one in joins if one.message.sender in allowed or one.message.trained), None)
            if event is None:
                break
            joins.remove(event)
            self.peers[event.message.sender].standing = Standing.TRAINING
            keeps = event.message.keeps_parameters
            actions.append(self._reply(event, with_vector=False) if keeps else self._center_to(event))
        return actions

    def _grant(self) -> list[Action]:
        if self._holder is not None or not self._waiting.locks:
            return []
        event = self._waiting.locks.pop(0)
        self._holder = event.message.sender
        return [self._center_to(event)]

    def _show(self) -> list[Action]:
        """Answer the views of an epoch that all workers have finished."""
        shown = [
            event
            for event in self._waiting.views
            if self.peers.have_finished(self.peers[event.message.sender].epochs)
        ]
        self._waiting.views = [event for event in self._waiting.views if event not in shown]
        for event in shown:
            # A refresh begins an epoch; only the others are evaluations.
            self.peers[event.message.sender].views += not event.message.refreshes
        return [self._center_to(event) for event in shown]

    def _answer_calls(self) -> list[Action]:
        """Send other servers the centre of an epoch once its last contribution is in."""
        ready = [event for event in self._calls if self.peers.have_finished(event.message.sequence)]
        self._calls = [event for event in self._calls if event not in ready]
        for event in ready:
            asked = math.inf if event.message.last_pull else event.message.sequence
            self.other_servers[event.message.sender] = max(self.other_servers[event.message.sender], asked)
        answers = [self._center_to(event, last=self.finished) for event in ready]
        return [*answers, *self.tell_wishes()] if self._calls else [*answers]

    def answer_pauses(self) -> list[Action]:
        """Complete a pause once all wait and nothing is under way; first cancel it for workers others need.

        Only the first server cancels: a worker asks the other servers after the first has let it pause.
        """
        if not self.pauses.waiting:
            return []
        over = self.pauses.over(all_numbered=self.shard > 0)
        answers: list[Action] = self._granted(over, of=0)
        contributed = {event.message.sender for event in self._waiting.contributions}
        ahead = set() if self._at_once else self.peers.in_later_rounds()
        requests = self.pauses.cancelled(contributed | ahead) if self.shard == 0 else []
        answers += [self._paused(event, cancelled=True) for event in requests]
        if contributed or self._waiting.locks or self._holder is not None:
            return answers
        done = self.pauses.complete(all_numbered=self.shard > 0)
        return [*answers, *self._granted(done, of=len(done))]

    def _granted(self, events: Iterable[Received], *, of: int) -> list[Action]:
        """Grant the pause of so many workers; 0: a dead server has granted it."""
        answers = [self._paused(event, cancelled=False) for event in events]
        return [Send(one.rank, one.message.of_all(of), one.frame) for one in answers]

    def _commit_ready(self) -> list[Action]:
        actions: list[Action] = []
        while self._waiting.contributions:
            actions += [self._drop(event) for event in self._waiting.take_late(self.rule)]
            absent = self.peers.ahead() + len(self.peers.in_later_rounds())
            chosen = self._waiting.take_ready(self.rule, self.peers)
            if not chosen:
                break
            self.rule.absent = absent
            self._apply(chosen)
            # Another commit may follow before these replies are sent.
            from_center = not self._waiting.contributions and self._sends_center()
            actions += [self._reply_to_contribution(event, from_center=from_center) for event in chosen]
            actions += self._admit()
        return actions

    def _drop(self, event: Received) -> Send:
        peer = self.peers[event.message.sender]
        peer.dropped += 1
        peer.count_round()
        self.story.tell("dropped as too stale:", event.message)
        pushed = event.message.kind is Kind.PUSH
        return self._reply(event, with_vector=False) if pushed else self._center_to(event)

    def _packed(
        self, event: Received, center: Vector, fill: PartWork | None
    ) -> tuple[Vector, PartWork | None]:
        """Return what a reply sends in place of the vector in the request's frame, and what fills that."""
        request = event.message
        if not self._is_of_worker(request):
            return center, fill  # another server's
        if request.kind is Kind.JOIN:
            self._wires.begin(request.sender, center)
        elif request.kind is Kind.EXCHANGE or (request.kind is Kind.PULL and not request.looks):
            return self._wires[request.sender].packing_in_place(event.frame, fill)
        return center, fill

    # -- commits and replies --------------------------------------------------------------------------

    def _move_by_parts(self, event: Received) -> Send:
        """Apply a contribution and make the reply while it is sent, as far as the rule can."""
        fill: PartWork | None = None
        (contribution,) = contributions([event], self.rule, self.peers, self.staleness)
        from_center = self._sends_center()
        if self.after_commit is None:
            fill = self.rule.commit_by_parts(contribution, replies=not from_center)
        if fill is None:
            self.rule.commit([contribution])
            fill = None if from_center else partial(self.rule.reply, contribution.vector)
        self._committed([event])
        return self._reply(event, with_vector=True, fill=fill, from_center=from_center)

    def _sends_center(self) -> bool:
        """Whether a reply to a contribution is sent from the centre itself."""
        long = self.by_parts and not self._wire.packs and self.rule.center.size > _LONG
        return long and self.rule.replies_center

    def _apply(self, events: list[Received]) -> None:
        self.rule.commit(contributions(events, self.rule, self.peers, self.staleness))
        self._committed(events)

    def _committed(self, events: list[Received]) -> None:
        count_commit(events, self.rule, self.peers)
        if self.after_commit is not None:
            self.rule.settle()
            self.after_commit()

    def _reply_to_contribution(self, event: Received, *, from_center: bool = False) -> Send:
        if event.message.kind is Kind.PUSH:
            return self._reply(event, with_vector=False)
        if not from_center:
            assert event.message.vector is not None  # refused() has seen to it
            self.rule.reply(event.message.vector)
        return self._reply(event, with_vector=True, from_center=from_center)

    def _center_to(self, event: Received, center: Vector | None = None, *, last: bool = False) -> Send:
        event.frame.vector[: self.rule.center.size] = self.rule.center if center is None else center
        return self._reply(event, with_vector=True, mark=last)

    def _reply(
        self,
        event: Received,
        *,
        with_vector: bool,
        mark: bool = False,
        fill: PartWork | None = None,
        from_center: bool = False,
    ) -> Send:
        there = self.rule.center if from_center else event.frame.vector[: self.rule.center.size]
        vector = there if with_vector else None
        kind = Kind.CENTER if with_vector else Kind.ACK
        return self._answer(event, kind, vector=vector, mark=mark, fill=fill)

    def _progress_before(self, rank: int) -> int:
        """Return the progress that was made when this worker's epoch was begun."""
        peer = self.peers.get(rank)
        return 0 if peer is None else int(self.progress_at[min(peer.epochs, len(self.progress_at) - 1)])

    def _paused(self, event: Received, *, cancelled: bool) -> Send:
        return self._answer(event, Kind.PAUSED, mark=cancelled)

    def _answer(
        self,
        event: Received,
        kind: Kind,
        *,
        vector: Vector | None = None,
        mark: bool = False,
        fill: PartWork | None = None,
    ) -> Send:
        request = event.message
        if self._is_of_worker(request):
            self.peers[request.sender].unanswered -= 1
        if request.sender in self.other_servers:
            self._told[request.sender] = self._wishes()
        if vector is not None and self._wire.packs:
            vector, fill = self._packed(event, vector, fill)
        elif fill is not None:
            fill = on_threads(fill, self.rule.center.size)
        reply = Message(
            kind,
            self.rank,
            request.sequence,
            self.pauses.made if kind is Kind.PAUSED else self.rule.clock,
            self._progress_before(request.sender),
            scalar=self.rate,
            shard=request.shard,
            stop=self.stopping,
            samples=int(self.rule.progress),
            vector=vector,
            mark=mark,
            pause=self.pauses.wanted,
        )
        return Send(request.sender, reply, event.frame, fill)
