"""Virtual cluster, deterministic: many ranks in one thread, in an order that a schedule chooses."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from nnlo_common.base._errors import DroppedError, PeerLostError
from nnlo_common.base._flat_vector import Frame
from nnlo_common.protocol import (
    Action,
    Activity,
    Lost,
    Message,
    Received,
    Release,
    Send,
    Server,
    Worker,
)
from nnlo_common.testing._schedules import ByTime, PendingRequest, RoundRobin, Schedule
from nnlo_common.testing._virtual_steps import (
    advance,
    bytes_of,
    carried,
    filled_unevenly,
    in_parts,
    pending,
)

__all__ = ["VirtualCluster"]

_Channel: TypeAlias = deque[tuple[float, Received]]


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
        check: bool = False,
    ) -> None:
        self.servers, self.workers = list(servers), dict(workers)
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
        while (chosen := self._choose()) is not None:
            self._serve(chosen)
        if self._programs and not pending(self._channels):
            rank = min(self._programs)
            raise PeerLostError(rank, "waits for a reply that no server will send: the protocol hangs")

    def _choose(self) -> PendingRequest | None:
        waiting = pending(self._channels)
        return self._schedule.choose(waiting) if waiting else None

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
            if isinstance(action, Send):
                event = self._carried(action.message)
                channel = self._channels[event.message.shard, rank]
                arrival_s = self._clock_s[rank] + self._travel_s(event)
                # Messages between two ranks stay in order.
                channel.append((max(arrival_s, channel[-1][0] if channel else 0.0), event))
            elif isinstance(action, Release):
                self._free(action.frame)

    def _lose(self, rank: int) -> None:
        self._programs.pop(rank, None)
        self._lost.add(rank)
        for (_, worker), channel in self._channels.items():
            if worker == rank:
                channel.clear()
        for server in self.servers:
            self._perform_server(server.shard, server.handle(Lost(rank)))

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

    def _travel_s(self, event: Received) -> float:
        size, schedule = bytes_of(event.message), self._schedule
        return schedule.communicate_s(size) if isinstance(schedule, ByTime) else 0.0
