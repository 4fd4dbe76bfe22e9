"""Threads as ranks: whole programs in one process, with failures at points you name."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, DroppedError, PeerLostError
from nnlo_common.base._flat_vector import Apart, Frame, PartWork, Vector, put_together
from nnlo_common.cluster.transport._endpoint import Link, MemberLostError, Numbers
from nnlo_common.protocol import REPLIES, Event, Lost, Message, Received, decode, encode
from nnlo_common.testing._points import InjectedFault, Points
from nnlo_common.testing._virtual import filled_unevenly, in_parts

__all__ = ["InjectedFault", "MemoryCluster", "MemoryGroup", "MemoryWorld"]

# -- group of threads as ranks -------------------------------------------------------------------------

# A rank that only looks, over and over, must let the others of its process compute.
_YIELD_S = 1e-5


class SharedItems(Protocol):
    """What ranks bring to operations of their groups; the cluster has it."""

    def share(self, key: Hashable, rank: int, item: object) -> None:
        """Bring something to an operation of a group."""

    def shared(
        self, key: Hashable, ranks: Sequence[int], readers: int, timeout_s: float | None = None
    ) -> list[Any] | None:
        """Return what these ranks have brought to an operation; None after `timeout_s`."""

    def living(self, key: Hashable, rank: int, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of these that live, once all of them have called it."""


class RankInside(Protocol):
    """One rank of the cluster."""

    @property
    def rank(self) -> int:
        """Its number."""

    def reach(self, point: str) -> None:
        """Reach a named point of the program."""


class MemoryGroup:
    """The ranks of one logical worker.

    Args:
        cluster: the cluster.
        world: this rank's world.
        ranks: the numbers of its ranks in the training.
        inside: their numbers in the cluster.
        channel: names the group.
    """

    def __init__(
        self,
        cluster: SharedItems,
        world: RankInside,
        ranks: Sequence[int],
        inside: Sequence[int],
        channel: Hashable,
    ) -> None:
        self._cluster, self._world, self._inside = cluster, world, tuple(inside)
        self._channel = channel, self._inside
        self.ranks, self.index = tuple(ranks), self._inside.index(world.rank)
        self._turn = self._twins = 0

    def gather(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks, a row for each."""
        self._world.reach("gather in group")
        rows: Numbers = np.stack(self._everyone(numbers.copy()))
        return rows

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by index."""
        self._world.reach("gather bytes in group")
        return self._everyone(data)

    def add_up(self, vector: Vector) -> None:
        """Replace the vector by the sum over all ranks, added in their order."""
        self._world.reach("add up in group")
        first, *others = self._everyone(vector.copy())
        np.copyto(vector, first)
        for other in others:
            vector += other

    def deal(self, rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Give each rank its row; return the rows that all have for this one, by rank."""
        self._world.reach("deal in group")
        return np.stack([other[self.index] for other in self._everyone(np.array(rows))])

    def show(self, row: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Return the rows of all ranks, equally long."""
        self._world.reach("show in group")
        return np.stack(self._everyone(np.array(row)))

    def broadcast(self, data: npt.NDArray[np.uint8]) -> MemoryBroadcast:
        """Begin to copy the lead's bytes into those of the others."""
        self._world.reach("broadcast in group")
        key = self._next()
        if self.index == 0:
            self._cluster.share(key, self._inside[0], data.copy())
        return MemoryBroadcast(self._cluster, key, self._inside, data)

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self._world.reach("barrier in group")
        self._everyone(None)

    def twin(self) -> MemoryGroup:
        """Return another group of the same ranks, which another thread may use."""
        self._twins += 1
        channel = ("twin", self._twins, self._channel)
        return MemoryGroup(self._cluster, self._world, self.ranks, self._inside, channel)

    def communicator(self) -> None:
        """Return None: the ranks are threads."""

    def without_dead(self) -> MemoryGroup:
        """Return the group of the ranks that live (collective over them)."""
        channel = ("living", self._channel)
        left = self._cluster.living(channel, self._world.rank, self._inside)
        ranks = [rank for rank, inside in zip(self.ranks, self._inside, strict=True) if inside in left]
        return MemoryGroup(self._cluster, self._world, ranks, left, channel)

    def end(self, dead: int) -> NoReturn:
        """End this rank as a death that the others survive."""
        raise InjectedFault(f"rank {self._world.rank} ends, because rank {dead} of its group has died")

    def close(self) -> None:
        """Do nothing: a group holds no resources."""

    def _next(self) -> Hashable:
        self._turn += 1
        return self._channel, self._turn

    def _everyone(self, item: Any) -> list[Any]:
        key = self._next()
        self._cluster.share(key, self._world.rank, item)
        everyone = self._cluster.shared(key, self._inside, len(self._inside))
        assert everyone is not None  # there is no time limit
        return everyone


class MemoryBroadcast:
    """A broadcast under way."""

    def __init__(
        self, cluster: SharedItems, key: Hashable, ranks: Sequence[int], data: npt.NDArray[np.uint8]
    ) -> None:
        self._cluster, self._key, self._ranks, self._data = cluster, key, ranks, data

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete here; False after `timeout_s`."""
        brought = self._cluster.shared(self._key, self._ranks[:1], len(self._ranks), timeout_s)
        if brought is not None:
            np.copyto(self._data, brought[0])
        return brought is not None


_NO_RANK = -1  # no rank: the event goes to all ranks


@dataclass(frozen=True, slots=True)
class _SentText:
    """Event: a text from another rank."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class _Failed:
    """Event: another rank ended with an error, which ends the run."""

    rank: int
    error: BaseException


class MemoryCluster:
    """Runs one program on several ranks, each in a thread of this process.

    Every message a rank sends or receives passes a point named after it, e.g. "send EXCHANGE" or
    "receive CENTER"; programs name further points with `MemoryWorld.reach`. The run fails if a point of
    `fail` or `hold` is not reached, so that a misspelt one does not let a test pass.

    Args:
        size: how many ranks, at least 1.

    Example:
        >>> with MemoryCluster(2) as cluster:
        ...     cluster.run(lambda world: world.gather_text(f"hello from {world.rank}")[0])
        ['hello from 0', 'hello from 0']
    """

    def __init__(self, size: int) -> None:
        self.size = whole_number("size", size, 1)
        self.points = Points(self.size)
        self._changed = threading.Condition()
        self._forget()

    def _forget(self) -> None:
        """Reset for another run, except the points of `fail` and `hold`."""
        self._texts: list[list[str]] = [[] for _ in range(self.size)]
        self._inboxes: dict[tuple[int, Hashable], queue.SimpleQueue[Event | _SentText | _Failed]] = {}
        self._shared: dict[Hashable, dict[int, Any]] = {}  # by operation of a group and rank
        self._read: Counter[Hashable] = Counter()  # how many ranks have read it
        self._ended: dict[int, Lost | _Failed | None] = {}  # by rank; None: without an error
        self.points.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.points.open_gates()

    def fail(self, rank: int, point: str, occurrence: int = 1, *, may_miss: bool = False) -> None:
        """Let `rank` die at the given occurrence of `point`; the others then see it as lost.

        Args:
            rank: the rank.
            point: the name of the point.
            occurrence: 1 for the first time that the rank reaches the point.
            may_miss: accept a run that does not reach the point; else `run` raises an error.
        """
        self.points.fail(rank, point, occurrence, may_miss=may_miss)

    def hold(self, rank: int, point: str, occurrence: int = 1, *, may_miss: bool = False) -> threading.Event:
        """Let `rank` wait at `point` until the returned event is set, or another rank fails.

        The arguments are those of `fail`.
        """
        return self.points.hold(rank, point, occurrence, may_miss=may_miss)

    def run(self, program: Callable[[MemoryWorld], Any], timeout_s: float = 60.0) -> list[Any]:
        """Run `program` on every rank and return what each returned.

        In place of that it is an `InjectedFault` if the rank died, a `DroppedError` if the others dropped it.

        Raises:
            ConfigurationError: a point of `fail` or `hold` was missed; the message names the reached ones.
                A run that fails for another reason gets this as a note.
            PeerLostError: ranks have not ended in time; the message names them and their last points.
            BaseException: the error of the first failed rank, with a note that names the rank.
        """
        self._forget()
        results: list[Any] = [None] * self.size
        worlds = [MemoryWorld(self, rank) for rank in range(self.size)]
        threads = [
            threading.Thread(target=self._run_rank, args=(program, world, results), daemon=True)
            for world in worlds
        ]
        for thread in threads:
            thread.start()
        self._join(threads, worlds, timeout_s)
        failures = [result for result in results if isinstance(result, BaseException)]
        errors = [failure for failure in failures if not isinstance(failure, (InjectedFault, DroppedError))]
        missed = self.points.missed()
        if errors:
            raise _noted(min(errors, key=lambda error: isinstance(error, PeerLostError)), missed)
        if missed:
            raise ConfigurationError(missed)
        return results

    def _join(self, threads: list[threading.Thread], worlds: list[MemoryWorld], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        late = [world for world, thread in zip(worlds, threads, strict=True) if thread.is_alive()]
        if not late:
            return
        where = ", ".join(f"rank {world.rank} last at {world.last!r}" for world in late)
        error = PeerLostError(late[0].rank, f"has not ended after {timeout_s} s: {where}")
        broken = next((event for event in self._ended.values() if isinstance(event, _Failed)), None)
        self._end_rank(_NO_RANK, _Failed(late[0].rank, error))  # free all waiting ranks
        for thread in threads:
            thread.join(1.0)
        raise _noted(error, self.points.missed()) from (None if broken is None else broken.error)

    def _run_rank(
        self, program: Callable[[MemoryWorld], Any], world: MemoryWorld, results: list[Any]
    ) -> None:
        end: Lost | _Failed | None = None
        try:
            results[world.rank] = program(world)
        except InjectedFault as fault:
            results[world.rank] = fault
            end = Lost(world.rank)
        except DroppedError as error:  # the others have done without it for a while
            results[world.rank] = error
        except BaseException as error:  # `run` raises it again
            error.add_note(f"on rank {world.rank} of {self.size}, last at {world.last!r}")
            results[world.rank] = error
            end = _Failed(world.rank, error)
        self._end_rank(world.rank, end)

    def _end_rank(self, rank: int, event: Lost | _Failed | None) -> None:
        with self._changed:
            self._ended[rank] = event
            for (other, _), inbox in self._inboxes.items():
                if other != rank and event is not None:
                    inbox.put(event)
            self._changed.notify_all()
        if isinstance(event, _Failed):
            self.points.open_gates()

    def inbox(self, rank: int, channel: Hashable) -> queue.SimpleQueue[Event | _SentText | _Failed]:
        """Return the inbox of a rank for a channel; it starts with the earlier deaths."""
        with self._changed:
            if (rank, channel) not in self._inboxes:
                self._inboxes[rank, channel] = queue.SimpleQueue()
                for other, event in self._ended.items():
                    if other != rank and event is not None:
                        self._inboxes[rank, channel].put(event)
            return self._inboxes[rank, channel]

    def share(self, key: Hashable, rank: int, item: object) -> None:
        """Bring something to an operation of a group."""
        with self._changed:
            self._shared.setdefault(key, {})[rank] = item
            self._changed.notify_all()

    def shared(
        self, key: Hashable, ranks: Sequence[int], readers: int, timeout_s: float | None = None
    ) -> list[Any] | None:
        """Return what these ranks have brought to an operation; None after `timeout_s`.

        Args:
            key: the operation.
            ranks: the ranks.
            readers: how many ranks call this; then it is forgotten.
            timeout_s: how long to wait.
        """
        with self._changed:
            while missing := [rank for rank in ranks if rank not in self._shared.get(key, {})]:
                for other, event in self._ended.items():
                    if other in missing and isinstance(event, Lost):
                        raise MemberLostError(other, "ended while its group waited for it")
                    if other in missing or isinstance(event, _Failed):
                        raise PeerLostError(other, "ended while its group waited for it")
                if not self._changed.wait(timeout_s):
                    return None
            items = [self._shared[key][rank] for rank in ranks]
            self._read[key] += 1
            if self._read[key] == readers:
                del self._shared[key], self._read[key]
            return items

    def living(self, key: Hashable, rank: int, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of these that live, once all of them have called it."""
        with self._changed:
            here = self._shared.setdefault(key, {})
            here[rank] = None
            self._changed.notify_all()
            while not set(ranks) <= here.keys() | self._ended.keys():
                self._changed.wait()
            for other, event in self._ended.items():
                if isinstance(event, _Failed):
                    raise PeerLostError(other, "ended while its group waited for it")
            return [one for one in ranks if one in here]

    def gather(self, rank: int, text: str) -> list[str]:
        """Collect a text from every rank."""
        with self._changed:
            self._texts[rank].append(text)
            self._changed.notify_all()
            turn = len(self._texts[rank])
            while behind := [other for other, texts in enumerate(self._texts) if len(texts) < turn]:
                for other, event in self._ended.items():
                    if other in behind or isinstance(event, _Failed):
                        raise PeerLostError(other, f"ended while rank {rank} waited in gather_text")
                self._changed.wait()
            return [texts[turn - 1] for texts in self._texts]


def _noted(error: BaseException, note: str) -> BaseException:
    if note:
        error.add_note(note)
    return error


class MemoryWorld:
    """The ranks of a `MemoryCluster` as a program on one of them sees them; replaces those of MPI.

    Attributes:
        last: the last point that this rank reached.

    Example:
        >>> def program(world):
        ...     world.reach("half way")
        ...     return world.rank, world.last
        >>> with MemoryCluster(2) as cluster:
        ...     cluster.fail(1, "half way")
        ...     cluster.run(program)
        [(0, 'half way'), InjectedFault("rank 1 dies at 'half way', occurrence 1")]
    """

    # A rank must not change process-wide settings such as the number of compute threads.
    own_process = False
    survives_loss = True
    of_trial = recalled = False

    def __init__(self, cluster: MemoryCluster, rank: int) -> None:
        self._cluster = cluster
        self.rank, self.size, self.host = rank, cluster.size, "memory"
        self.last = "start"
        self._opened = self._groups = 0
        self._engaged = False

    def reach(self, point: str) -> None:
        """Reach a named point of the program, at which `MemoryCluster.fail` and `hold` act."""
        self.last = point
        self._cluster.points.reach(self.rank, point)

    def gather_text(self, text: str, *, patient: bool = False) -> list[str]:  # noqa: ARG002 - never reports
        """Give every rank the texts of all ranks (collective)."""
        self.reach("gather")
        return self._cluster.gather(self.rank, text)

    def gather_from_living(self, text: str) -> list[str | None]:
        """Give every rank the texts of all ranks (collective); here none has died."""
        return [*self.gather_text(text)]

    def open(self, links: Sequence[Link]) -> MemoryEndpoint:
        """Open an endpoint (collective)."""
        self._opened += 1
        return MemoryEndpoint(self._cluster, self, links, self._opened)

    def group(
        self,
        ranks: Sequence[int],
        *,
        naps: bool,  # noqa: ARG002 - waits sleep anyway
        lasting: bool = False,  # noqa: ARG002 - the cluster says who has died in any case
    ) -> MemoryGroup:
        """Return the group of these ranks, this one among them, lead first."""
        self._groups += 1
        return self._grouped(ranks)

    def _grouped(self, ranks: Sequence[int]) -> MemoryGroup:
        return MemoryGroup(self._cluster, self, ranks, ranks, self._groups)

    def engage(self) -> Callable[[], None]:
        """Refuse a second open training; the cluster itself ends the run on a failure."""
        if self._engaged:
            raise ConfigurationError(f"rank {self.rank}: a training is open already; finish it first")
        self._engaged = True
        return self._disengage

    def _disengage(self) -> None:
        self._engaged = False

    def at_end(
        self,
        call: Callable[[], object],  # noqa: ARG002
        in_middle: Callable[[], bool] = lambda: False,  # noqa: ARG002
    ) -> Callable[[], None]:
        """Do nothing: the end of a thread is not the end of the process."""
        return lambda: None

    def at_meeting(self, call: Callable[[], object]) -> None:
        """Do nothing: without a search no rank waits outside of a training."""

    def mail(self) -> MemoryMail:
        """Open this rank's mailbox (collective)."""
        self._opened += 1
        return MemoryMail(self._cluster, self, self._opened)

    def part(self, ranks: Sequence[int]) -> MemoryPart:
        """Return the world of these ranks, this one among them."""
        return MemoryPart(self._cluster, self, ranks)

    def drop(self, rank: int) -> bool:  # noqa: ARG002
        """Return True: the others continue; a thread cannot be killed, so it may speak again."""
        return True

    def cast_off(self) -> None:
        """Do nothing: the end of this rank does not end the run."""

    def abort(self, code: int) -> NoReturn:
        """End this rank, and with it the run."""
        raise SystemExit(code)


class MemoryPart(MemoryWorld):
    """Some ranks of a cluster, renumbered from 0; it only opens endpoints and groups."""

    def __init__(
        self, cluster: MemoryCluster, world: MemoryWorld, ranks: Sequence[int], within: Hashable = ()
    ) -> None:
        super().__init__(cluster, world.rank)
        self.rank, self.size = ranks.index(world.rank), len(ranks)
        self._world, self._ranks = world, tuple(ranks)
        self._channel = (self._ranks, within) if within else self._ranks  # names what it opens
        self._divided = 0  # how often

    def part(self, ranks: Sequence[int]) -> MemoryPart:
        """Return the world of these ranks, this one among them."""
        self._divided += 1
        within = (self._ranks, self._divided)
        return MemoryPart(self._cluster, self._world, [self._ranks[rank] for rank in ranks], within)

    def reach(self, point: str) -> None:
        """Reach a named point of the program."""
        self._world.reach(point)

    def open(self, links: Sequence[Link]) -> MemoryEndpoint:
        """Open an endpoint (collective)."""
        self._opened += 1
        channel = (self._channel, self._opened)
        return MemoryEndpoint(self._cluster, self._world, links, channel, self._ranks)

    def _grouped(self, ranks: Sequence[int]) -> MemoryGroup:
        inside = [self._ranks[rank] for rank in ranks]
        return MemoryGroup(self._cluster, self._world, ranks, inside, (self._channel, self._groups))

    def revoke(self) -> None:
        """Do nothing: ranks open endpoints without waiting for each other."""

    def close(self) -> None:
        """Do nothing: a part holds no resources."""


class MemoryMail:
    """One rank's mailbox."""

    def __init__(self, cluster: MemoryCluster, world: MemoryWorld, channel: Hashable) -> None:
        self._cluster, self._rank, self._channel = cluster, world.rank, channel
        self._inbox = cluster.inbox(world.rank, channel)
        self._failed: _Failed | None = None

    def send(self, peer: int, text: str) -> None:
        """Put a text into the peer's inbox."""
        self._cluster.inbox(peer, self._channel).put(_SentText(self._rank, text))

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        """Return the next sender and text, or a death; None after `timeout_s`."""
        try:
            event = self._failed or self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, _SentText):
            return event.rank, event.text
        if isinstance(event, Lost):
            return event
        assert isinstance(event, _Failed)
        self._failed = event  # later calls raise it too
        raise PeerLostError(event.rank, f"failed: {event.error!r}") from event.error

    def close(self) -> None:
        """Nothing is under way that would have to leave."""


class MemoryEndpoint:
    """One rank's endpoint; sending copies a message into memory of its own."""

    def __init__(
        self,
        cluster: MemoryCluster,
        world: MemoryWorld,
        links: Sequence[Link],
        channel: Hashable,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._cluster, self._world, self._channel = cluster, world, channel
        self._ranks = range(cluster.size) if ranks is None else ranks  # by their numbers in links
        self._sizes = {(link.peer, link.shard): link.size for link in links}
        self._may_be_ahead = {(link.peer, link.shard) for link in links if link.ahead and not link.serving}
        self._ahead: dict[tuple[int, int], tuple[Vector, Vector, int]] = {}  # vector, copy of what has left
        self._inbox = cluster.inbox(world.rank, channel)

    def send(
        self,
        peer: int,
        message: Message,
        frame: Frame | None = None,  # noqa: ARG002 - it is copied
        fill: PartWork | None = None,
    ) -> None:
        """Put a copy of the message into the peer's inbox; what is computed meanwhile comes in parts."""
        parts = filled_unevenly(message, fill)
        message = self._with_what_left(peer, message)
        self._world.reach(f"send {message.kind.name}")
        copy = Frame(self._sizes[peer, message.shard])
        if message.vector is not None:
            np.copyto(copy.vector[: message.vector.size], message.vector)
        received = Received(decode(copy, encode(message, copy)), copy)
        if message.kind in REPLIES:  # a server gets a request once all of it is there
            received = in_parts(received, parts)
        self._cluster.inbox(self._ranks[peer], self._channel).put(received)

    def send_ahead(self, peer: int, shard: int, vector: Vector, start: int, apart: Apart = ()) -> None:
        """Copy what lies behind `start` in a vector, as it is now; its message has these numbers."""
        if (peer, shard) not in self._may_be_ahead:
            put_together(vector, slice(start, vector.size), apart)
            return
        self._world.reach("send AHEAD")
        _, left, stop = self._ahead.get((peer, shard), (vector, np.empty_like(vector), vector.size))
        if start < stop:
            np.copyto(left[start:stop], vector[start:stop])
            put_together(left, slice(start, stop), apart)
        self._ahead[peer, shard] = vector, left, min(start, stop)

    def withdraw(self, peer: int, shard: int) -> None:
        """Forget what has been copied."""
        if self._ahead.pop((peer, shard), None) is not None:
            self._world.reach("send WITHDRAWN")

    def _with_what_left(self, peer: int, message: Message) -> Message:
        """Return a message with the numbers that have left ahead of it."""
        vector, left, stop = self._ahead.get((peer, message.shard), (None, None, 0))
        if message.vector is None or vector is None or left is None or message.vector.size != vector.size:
            return message
        if message.vector.ctypes.data != vector.ctypes.data:
            return message
        del self._ahead[peer, message.shard]
        np.copyto(left[:stop], vector[:stop])
        return message.with_vector(left)

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None after `timeout_s`."""
        if timeout_s == 0 and self._inbox.empty():
            time.sleep(_YIELD_S)
        try:
            event = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, _Failed):
            raise PeerLostError(event.rank, f"failed: {event.error!r}") from event.error
        assert not isinstance(event, _SentText)  # texts have channels of their own
        if isinstance(event, Lost):
            # A death reaches every endpoint, also those of parts without the dead rank.
            member = event.rank in self._ranks
            return Lost(self._ranks.index(event.rank)) if member else self.receive(timeout_s)
        if isinstance(event, Received):
            self._world.reach(f"receive {event.message.kind.name}")
        return event

    def release(self, peer: int, frame: Frame) -> None:
        """Do nothing: Python frees the memory."""

    def abandon(self, peer: int) -> None:
        """Do nothing: no operation waits for a peer."""

    def flush(self) -> None:
        """Do nothing: `send` completes at once."""

    def close(self) -> None:
        """Nothing is under way that would have to leave."""
