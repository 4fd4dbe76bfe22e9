"""Virtual tree: a server, sub-servers and workers in one thread, in an order that a schedule chooses."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from nnlo_common.algorithms import EASGD
from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Frame, Vector
from nnlo_common.protocol import (
    Action,
    Activity,
    Lost,
    Received,
    Send,
    Server,
    Shard,
    ShardClient,
    SubServer,
    Wire,
    Worker,
)
from nnlo_common.testing._schedules import ByTime, Interleaved, PendingRequest, Schedule
from nnlo_common.testing._virtual_steps import advance, bytes_of, carried, pending

__all__ = ["VirtualTree", "tree_machines"]

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
