"""Virtual cluster, deterministic: many ranks in one thread, in an order that a schedule chooses."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from nnlo_common.algorithms import EASGD
from nnlo_common.base._errors import ConfigurationError, DroppedError, PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Frame, Vector
from nnlo_common.protocol import (
    Action,
    Activity,
    Compute,
    Kind,
    Lost,
    Message,
    Received,
    Release,
    Send,
    Server,
    Shard,
    ShardClient,
    Standing,
    SubServer,
    Wait,
    Wire,
    Worker,
    decode,
    encode,
)
from nnlo_common.protocol._events import given
from nnlo_common.testing._schedules import ByTime, Interleaved, PendingRequest, RoundRobin, Schedule

__all__ = [
    "ServerDeath",
    "VirtualCluster",
    "VirtualTree",
    "advance",
    "bytes_of",
    "carried",
    "filled_unevenly",
    "in_parts",
    "pending",
    "tree_machines",
]

# -- steps that virtual clusters and trees have in common: workers' programs, waiting messages, copies.

#: Messages on their way, by receiver and sender, in order: when each arrives, the message, and perhaps more.
Channels: TypeAlias = Mapping[tuple[int, int], Sequence[tuple[Any, ...]]]


def advance(
    programs: MutableMapping[int, Activity],
    rank: int,
    schedule: Schedule,
    clock_s: MutableMapping[int, float],
    perform: Callable[[int, Sequence[Action]], None],
) -> None:
    """Run a worker's program until it waits for a reply that has not arrived; remove it once it has ended.

    Args:
        programs: those that run, by rank.
        rank: the worker.
        schedule: with `ByTime` it says how long a computation takes.
        clock_s: the virtual time of each rank.
        perform: performs actions of a rank.
    """
    for action in programs[rank]:
        if isinstance(action, Wait):
            return
        if isinstance(action, Compute):
            if isinstance(schedule, ByTime):
                clock_s[rank] += schedule.compute_s(rank)
            continue
        perform(rank, [action])
    del programs[rank]


def pending(channels: Channels) -> list[PendingRequest]:
    """Return the first message of each channel, by receiver and sender."""
    return [
        PendingRequest(to, sender, channel[0][1].message.kind, channel[0][0])
        for (to, sender), channel in sorted(channels.items())
        if channel
    ]


def carried(message: Message, frame: Frame) -> Received:
    """Copy a message, header and vector, into the receiver's memory, as a transport does."""
    if message.vector is not None:
        np.copyto(frame.vector[: message.vector.size], message.vector)
    return Received(decode(frame, encode(message, frame)), frame)


def filled_unevenly(message: Message, fill: Callable[[slice], None] | None) -> list[slice]:
    """Compute a vector in two parts, as a rank does while it sends a long one; return the parts."""
    if fill is None:
        return []
    size = 0 if message.vector is None else message.vector.size
    parts = [slice(0, size // 3), slice(size // 3, size)]
    for part in parts:
        fill(part)
    return parts


def in_parts(event: Received, parts: Sequence[slice]) -> Received:
    """Let a received vector arrive in these parts, if there are any."""
    vector = event.message.vector
    if vector is None or not parts:
        return event
    # What has not come is not in the receiver's memory, which may be used meanwhile.
    coming = [(part, vector[part].copy()) for part in parts]
    return Received(event.message, event.frame, partial(given, coming))


def bytes_of(message: Message) -> int:
    """Return the size of a message's vector."""
    return 0 if message.vector is None else message.vector.nbytes


# -- virtual tree: a server, sub-servers and workers in one thread, in an order that a schedule chooses.

_PULLS = 2  # the channel of sub-servers' pulls
#: Returns when a message arrives: called as arrives_s(source, destination, bytes, sent_s).
Arrival: TypeAlias = Callable[[int, int, int, float], float]


def tree_machines(
    algorithm: EASGD, start: FlatVector, branches: Sequence[Sequence[int]]
) -> tuple[dict[int, Server], dict[int, Worker]]:
    """Return the state machines of an elastic tree, by rank: those that serve, and the workers.

    Args:
        algorithm: its options.
        start: the centre at the start.
        branches: the ranks of each branch, its sub-server first; rank 0 is the top server.

    Example:
        >>> machines, workers = tree_machines(EASGD(sub_servers=1), FlatVector.of([np.ones(2, "f4")]),
        ...                                   [[1, 2, 3]])
        >>> sorted(machines), sorted(workers)
        ([0, 1], [2, 3])
    """
    subs, whole = [branch[0] for branch in branches], slice(0, start.vector.size)
    wire = Wire(algorithm, start.layout, whole)
    top = Server(algorithm.top_center(start.vector.copy(), len(subs)), subs, other_servers=subs, wire=wire)
    machines: dict[int, Server] = {0: top}
    workers: dict[int, Worker] = {}
    for sub, *ranks in branches:
        own = FlatVector(start.layout)
        client = ShardClient(sub, Shard(0, 0, whole), algorithm.sub_worker(), own, own, wire=wire)
        rule = algorithm.center(own.vector, len(ranks), None)
        shown: Vector = np.zeros_like(own.vector)
        machines[sub] = SubServer(rule, ranks, client=client, shown=shown, pulls=_PULLS, wire=wire)
        for rank in ranks:
            vectors = FlatVector.of(start.views()), FlatVector(start.layout)
            workers[rank] = Worker(rank, algorithm, *vectors, [Shard(0, sub, whole)], workers=len(ranks))
    return machines, workers


class VirtualTree:
    """Runs servers, sub-servers and workers' programs message by message; a schedule chooses the next one.

    To the schedule the shard of a `PendingRequest` is the rank that gets the message, and its worker the rank
    that sent it. With `ByTime` it chooses a message twice: when it is sent, and when it has arrived.

    Attributes:
        machines: those that serve, by rank.
        workers: the workers, by rank.
        trace: the receiver and the sender of each handled message, in order.
        now_s: the virtual time (with `ByTime`).

    Args:
        machines: see above.
        workers: see above.
        programs: the program of each worker, an activity that may also yield `Compute`.
        schedule: chooses the next message; `Interleaved` by default.
        losses: the workers that die, and the number of their handled messages before that.
        arrives_s: when a message arrives, in virtual time, called in the order of sending; by default as the
            schedule says.
        check: validate every invariant after every event.

    Example:
        >>> machines, workers = tree_machines(EASGD(sub_servers=1), FlatVector.of([np.ones(2, "f4")]),
        ...                                   [[1, 2]])
        >>> def program():
        ...     yield from workers[2].join()
        ...     yield from workers[2].leave()
        >>> tree = VirtualTree(machines, workers, {2: program()})
        >>> tree.run()
        >>> machines[0].finished, tree.trace[:3]  # the sub-server joins once its worker is there
        (True, [(1, 2), (0, 1), (1, 0)])
    """

    def __init__(
        self,
        machines: Mapping[int, Server],
        workers: Mapping[int, Worker],
        programs: Mapping[int, Activity],
        *,
        schedule: Schedule | None = None,
        losses: Mapping[int, int] | None = None,
        arrives_s: Arrival | None = None,
        check: bool = False,
    ) -> None:
        self.machines, self.workers = dict(machines), dict(workers)
        self.trace: list[tuple[int, int]] = []
        self.now_s = 0.0
        self._schedule: Schedule = Interleaved(0) if schedule is None else schedule
        self._programs, self._losses, self._check = dict(programs), dict(losses or {}), check
        self._arrives_s = arrives_s or self._travelled_s
        self._channels: dict[tuple[int, int], deque[tuple[float, Received, bool]]] = defaultdict(deque)
        self._clock_s: dict[int, float] = defaultdict(float)
        self._size = max(machine.rule.center.size for machine in self.machines.values())

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run until no message waits, or until `until()` holds; it is checked before each message.

        Raises:
            PeerLostError: a worker waits for a reply that no server will send.
        """
        for rank in list(self._programs):
            if rank in self._programs:
                self._advance(rank)
        self._go_on(until)

    def continue_with(self, rank: int, actions: Sequence[Action]) -> None:
        """Perform actions of a server that no message has caused, and go on."""
        self._perform(rank, actions)
        self._go_on(lambda: False)

    def _go_on(self, until: Callable[[], bool]) -> None:
        while waiting := pending(self._channels):
            if until():
                return
            chosen = self._schedule.choose(waiting)
            if chosen is None:
                return
            self._serve(chosen)
        if self._programs:
            raise PeerLostError(min(self._programs), "waits for a reply that no server will send")

    def _serve(self, chosen: PendingRequest) -> None:
        rank, sender = chosen.shard, chosen.worker
        at_s, event, landed = self._channels[rank, sender].popleft()
        if isinstance(self._schedule, ByTime) and not landed:
            # Links are taken in the order of sending, and servers in that of arrival.
            at_s = self._arrives_s(sender, rank, bytes_of(event.message), at_s)
            self._channels[rank, sender].appendleft((at_s, event, True))
            return
        self.trace.append((rank, sender))
        if isinstance(self._schedule, ByTime):
            start_s = max(at_s, self._clock_s[rank])
            self._clock_s[rank] = start_s + self._schedule.serve_s(bytes_of(event.message))
            self.now_s = max(self.now_s, self._clock_s[rank])
        self._perform(rank, self.machines[rank].handle(event))
        if self._losses.get(sender) == sum(one == sender for _, one in self.trace):
            self._lose(sender)

    def _lose(self, rank: int) -> None:
        self._programs.pop(rank, None)
        self._losses.pop(rank)
        sub = self.workers.pop(rank).shard_clients[0].shard.server
        self._channels.pop((sub, rank), None)
        self._perform(sub, self.machines[sub].handle(Lost(rank)))

    def _advance(self, rank: int) -> None:
        advance(self._programs, rank, self._schedule, self._clock_s, self._perform)

    def _perform(self, rank: int, actions: Sequence[Action]) -> None:
        if self._check and rank in self.machines:
            self.machines[rank].validate()
        for action in actions:
            if isinstance(action, Send):
                self._send(rank, action)

    def _send(self, sender: int, action: Send) -> None:
        filled_unevenly(action.message, action.fill)
        to, event = action.rank, carried(action.message, Frame(self._size))
        sent_s = self._clock_s[sender]
        if to in self.machines:
            self._channels[to, sender].append((sent_s, event, False))
        elif to in self.workers:
            arrival_s = self._arrives_s(sender, to, bytes_of(event.message), sent_s)
            self._clock_s[to] = max(self._clock_s[to], arrival_s)
            self._perform(to, self.workers[to].deliver(event))
            if to in self._programs:
                self._advance(to)

    def _travelled_s(self, source: int, to: int, size: int, sent_s: float) -> float:  # noqa: ARG002
        return sent_s + self._schedule.communicate_s(size) if isinstance(self._schedule, ByTime) else 0.0


_Channel: TypeAlias = deque[tuple[float, Received]]


@dataclass(frozen=True, slots=True)
class ServerDeath:
    """Death of a server, whose place another rank takes.

    Attributes:
        copied: the number of requests handled by all servers when the newest copy of its state was made.
        died: the same at its death.
        shard: the number of the shard that it serves.

    Example:
        >>> from nnlo_common import SGD, Downpour
        >>> from nnlo_common.testing import train_virtually
        >>> run = train_virtually(Downpour(), lambda x, rank: x, [8.0], workers=2, steps=3,
        ...                       optimizer=SGD(0.25), deaths=[ServerDeath(copied=3, died=6)])
        >>> (server,) = run.servers
        >>> server.rank, server.rule.clock, server.commits_lost  # of six; two more were under way
        (3, 1, 3)
    """

    copied: int
    died: int
    shard: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.copied <= self.died:
            raise ConfigurationError(
                f"copied={self.copied!r} with died={self.died!r} is not possible: a server is copied before "
                "it dies; give numbers of handled requests, from 0 on, the smaller one as copied"
            )


class VirtualCluster:
    """Runs servers and workers' programs message by message, without threads, clocks or chance.

    Every worker runs as far as it can; then the schedule picks the waiting request to handle; and so on until
    no request waits. The same schedule gives the same bits.

    Attributes:
        servers: the servers, one for each shard.
        workers: the workers, by rank.
        trace: for each shard the workers whose requests were handled, in order.
        now_s: the virtual time (with `ByTime`).
        refused: the errors of the ranks that were dropped, in the order of their ends.

    Args:
        servers: one for each shard.
        programs: the program of each worker, an activity that may also yield `Compute`.
        workers: the workers that the programs drive, by rank.
        schedule: chooses the next request; `RoundRobin` by default.
        losses: the ranks that die, and the number of handled requests before that.
        drops: the ranks that the servers drop as too silent, and the number of handled requests before that;
            they speak again later, and end with the answer.
        deaths: deaths of servers, in order; with as many `spares` of the same shards.
        spares: what serves in their place, each in turn; one with the rank of a worker is its heir's: that
            worker trains no more then.
        check: validate every invariant after every event.

    Example:
        `nnlo_common.testing.train_virtually` makes one; by hand:

        >>> import numpy as np
        >>> from nnlo_common import SGD, Downpour, FlatVector
        >>> from nnlo_common.protocol import Compute, Server, Shard, Worker
        >>> rule, start = Downpour(), [np.ones(1, "f4")]
        >>> server = Server(rule.center(np.ones(1, "f4"), 1, SGD(0.5)), [1])
        >>> worker = Worker(1, rule, FlatVector.of(start), FlatVector.of(start),
        ...                 [Shard(0, server=0, place=slice(0, 1))], workers=1)
        >>> def program():
        ...     yield from worker.join()
        ...     yield Compute()
        ...     yield from worker.step()  # with the gradient 1
        ...     yield from worker.leave()
        >>> cluster = VirtualCluster([server], {1: worker}, {1: program()})
        >>> cluster.run()
        >>> cluster.trace, server.rule.center
        ({0: [1, 1, 1]}, array([0.5], dtype=float32))
    """

    def __init__(
        self,
        servers: Sequence[Server],
        workers: Mapping[int, Worker],
        programs: Mapping[int, Activity],
        *,
        schedule: Schedule | None = None,
        losses: Mapping[int, int] | None = None,
        drops: Mapping[int, int] | None = None,
        deaths: Sequence[ServerDeath] = (),
        spares: Sequence[Server] = (),
        check: bool = False,
    ) -> None:
        self.servers, self.workers = list(servers), dict(workers)
        self._deaths, self._spares = list(deaths), list(spares)
        self._copies = {server.shard: server.copy() for server in self.servers}  # the newest
        self._left: set[tuple[int, int]] = set()  # shards, and workers that have told a spare that they leave
        self.trace: dict[int, list[int]] = {server.shard: [] for server in servers}
        self.now_s, self.refused = 0.0, list[DroppedError]()
        self._programs = dict(programs)
        self._schedule: Schedule = RoundRobin() if schedule is None else schedule
        self._losses, self._drops, self._check = dict(losses or {}), dict(drops or {}), check
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(deque)
        self._clock_s = dict.fromkeys(self.workers, 0.0)
        self._free_s = {server.shard: 0.0 for server in servers}
        self._frames: dict[int, list[Frame]] = defaultdict(list)
        self._lost: set[int] = set()
        self._handled: Counter[int] = Counter()

    def run(self) -> None:
        """Run until no request waits.

        Raises:
            PeerLostError: a worker waits for a reply that no server will send.
        """
        for rank in list(self._programs):
            if self._losses.get(rank) == 0:
                self._lose(rank)
                continue
            if self._drops.get(rank) == 0:
                self._drop(rank)
            self._advance(rank)
        self._strike()
        while (chosen := self._choose()) is not None:
            self._serve(chosen)
            self._strike()
        if self._programs and not pending(self._channels):
            rank = min(self._programs)
            raise PeerLostError(rank, "waits for a reply that no server will send: the protocol hangs")

    def _choose(self) -> PendingRequest | None:
        waiting = pending(self._channels)
        return self._schedule.choose(waiting) if waiting else None

    def _strike(self) -> None:
        """Copy the states of servers that die later, and let them die, when it is time."""
        handled = sum(self._handled.values())
        for shard in {one.shard for one in self._deaths if one.copied == handled}:
            self._copies[shard] = self.servers[shard].copy()
        while self._deaths and self._deaths[0].died <= handled:
            self._replace_server(self._deaths.pop(0).shard)

    def _replace_server(self, shard: int) -> None:
        """Let the next spare take the place of a shard's server, with the newest copy."""
        dead = self.servers[shard].rank
        spare = next((one for one in self._spares if one.shard == shard), None)
        if spare is None:
            raise PeerLostError(dead, "a server of the centre has died")
        self._spares.remove(spare)
        self.servers[shard] = spare
        for rank in self.workers:
            self._channels[shard, rank].clear()
        if spare.rank in self.workers:
            self._turn(spare)
        spare.take_over(self._copies[shard], {rank for index, rank in self._left if index == shard})
        for rank in self._lost - {spare.rank}:
            spare.handle(Lost(rank))
        self._go_on_without(dead)

    def _turn(self, heir: Server) -> None:
        """Let a worker serve: it trains no more, and nobody waits for what it would contribute."""
        self._programs.pop(heir.rank, None)
        self._lost.add(heir.rank)
        self._perform_worker(heir.rank, self.workers[heir.rank].let_go())
        heir.peers[heir.rank].standing = Standing.LOST
        turns = [Message(Kind.TURN, heir.rank, 0, shard=one.shard) for one in self.servers if one is not heir]
        self._perform_worker(heir.rank, [Send(self.servers[one.shard].rank, one) for one in turns])

    def _go_on_without(self, dead: int) -> None:
        """Let the workers go on after the death of a server, with the next one, or of its heir."""
        for rank in list(self._programs):
            left = self.workers[rank].go_on_without(dead)
            self._programs[rank] = chain(left, self._programs[rank])
            self._advance(rank)

    def elapsed_s(self, rank: int) -> float:
        """Return the virtual time of a worker (with `ByTime`)."""
        return self._clock_s[rank]

    def _serve(self, chosen: PendingRequest) -> None:
        shard, rank = chosen.shard, chosen.worker
        _, event = self._channels[shard, rank].popleft()
        self.trace[shard].append(rank)
        self._handled[rank] += 1
        if isinstance(self._schedule, ByTime):
            start_s = max(chosen.arrival_s, self._free_s[shard])
            self._free_s[shard] = start_s + self._schedule.serve_s(bytes_of(event.message))
            self.now_s = max(self.now_s, self._free_s[shard])
        self._perform_server(shard, self.servers[shard].handle(event))
        if self._losses.get(rank) == self._handled[rank]:
            self._lose(rank)
        elif self._drops.get(rank) == self._handled[rank]:
            self._drop(rank)

    def _perform_server(self, shard: int, actions: Sequence[Action]) -> None:
        if self._check:
            self.servers[shard].validate()
        for action in actions:
            if isinstance(action, Send):
                self._deliver(shard, action)
            elif isinstance(action, Release):
                self._free(action.frame)

    def _deliver(self, shard: int, reply: Send) -> None:
        rank = reply.rank
        parts = filled_unevenly(reply.message, reply.fill)
        event = in_parts(self._carried(reply.message), parts)
        assert reply.frame is not None  # servers reply in the request's frame
        self._free(reply.frame)
        if rank in self._lost:
            return
        self._clock_s[rank] = max(self._clock_s[rank], self._free_s[shard] + self._travel_s(event))
        self._work_on(rank, event)
        try:
            self._perform_worker(rank, self.workers[rank].deliver(event))
        except DroppedError as error:
            self.refused.append(error)
            self._programs.pop(rank, None)
            self._lost.add(rank)
        if rank in self._programs:
            self._advance(rank)

    def _advance(self, rank: int) -> None:
        advance(self._programs, rank, self._schedule, self._clock_s, self._perform_worker)

    def _perform_worker(self, rank: int, actions: Sequence[Action]) -> None:
        if self._check:
            self.workers[rank].validate()
        for action in actions:
            if isinstance(action, Send) and action.rank in self._waiting_spares():
                self._left.add((action.message.shard, rank))
            elif isinstance(action, Send):
                filled_unevenly(action.message, action.fill)
                event = self._carried(action.message)
                channel = self._channels[event.message.shard, rank]
                self._work_on(rank, event)
                arrival_s = self._clock_s[rank] + self._travel_s(event)
                # Messages between two ranks stay in order.
                channel.append((max(arrival_s, channel[-1][0] if channel else 0.0), event))
            elif isinstance(action, Release):
                self._free(action.frame)

    def _waiting_spares(self) -> set[int]:
        """Return the ranks of the spares that serve nothing yet."""
        return {spare.rank for spare in self._spares}

    def _lose(self, rank: int) -> None:
        if rank in {server.rank for server in self.servers}:
            raise PeerLostError(rank, "a server of the centre has died")
        self._programs.pop(rank, None)
        self._lost.add(rank)
        for (_, worker), channel in self._channels.items():
            if worker == rank:
                channel.clear()
        for server in self.servers:
            self._perform_server(server.shard, server.handle(Lost(rank)))
        if rank in self._waiting_spares():  # it would have served in the server's place
            self._spares = [one for one in self._spares if one.rank != rank]
            self._go_on_without(rank)

    def _drop(self, rank: int) -> None:
        for server in self.servers:
            self._perform_server(server.shard, server.drop(rank, 0.0))

    def _carried(self, message: Message) -> Received:
        rule = self.servers[message.shard].rule
        size = max(rule.center.size, rule.sampled)
        frames = self._frames[size]
        return carried(message, frames.pop() if frames else Frame(size))

    def _free(self, frame: Frame) -> None:
        self._frames[frame.vector.size].append(frame)

    def _work_on(self, rank: int, event: Received) -> None:
        """Let a worker's time pass while it works on a message that it sends or has got."""
        if isinstance(self._schedule, ByTime):
            self._clock_s[rank] += self._schedule.handle_s(rank, bytes_of(event.message))

    def _travel_s(self, event: Received) -> float:
        size, schedule = bytes_of(event.message), self._schedule
        return schedule.communicate_s(size) if isinstance(schedule, ByTime) else 0.0
