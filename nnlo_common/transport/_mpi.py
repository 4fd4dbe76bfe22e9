"""Messages over MPI: header and vector in one piece, receives posted before they are needed.

Requirements that shaped this module:

* Nothing is pickled and nothing is packed. A message is the bytes of a `Frame`, sent as it lies. A vector
  that has a frame of its own (a worker's parameters or gradient) leaves from there; only pieces of a
  vector (several servers) and one-way updates are copied into a frame first.
* A server has memory for every worker's next request, with the receive already posted; the request is
  answered from that same memory, and the receive posted again when the answer has left.
* Nobody spins: a wait looks with growing pauses (`Backoff`), since blocking MPI calls burn a core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np

from nnlo_common._flat import FlatVector, Frame, Vector
from nnlo_common._guard import engage
from nnlo_common.protocol import REPLIES, Event, Message, Received, decode, encode
from nnlo_common.transport._backoff import Backoff
from nnlo_common.transport._endpoint import Link
from nnlo_common.transport._world import MPI, World

__all__ = ["MPIEndpoint", "MPIWorld"]


class MPIWorld:
    """The ranks of one communicator.

    Args:
        world: the facts about it.

    Example:
        >>> world = MPIWorld(World())
        >>> world.gather_text("hello")
        ['hello']
    """

    def __init__(self, world: World) -> None:
        self.facts = world
        self.rank, self.size, self.host = world.rank, world.size, world.host

    def gather_text(self, text: str) -> list[str]:
        """Give every rank the texts of all ranks (collective)."""
        return self.facts.gather_text(text)

    def open(self, links: Sequence[Link], own: Iterable[FlatVector] = ()) -> MPIEndpoint:
        """Open this rank's door on a communicator of its own (collective)."""
        return MPIEndpoint(self.facts.comm.Dup(), links, own)

    def engage(self) -> Callable[[], None]:
        """Make this rank's failure or early end everybody's, until the returned function is called."""
        return engage(self.facts)

    def abort(self, code: int) -> NoReturn:
        """End all ranks now."""
        self.facts.abort(code)


class _Channel:
    """The memory that messages of one link arrive in, in the order in which it was posted.

    MPI matches messages of one pair to receives in the order of posting, but may complete a short message
    before a long one that was sent earlier. So a message counts as there when all before it are.
    """

    __slots__ = ("link", "posted", "staging")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.posted: deque[_Slot] = deque()
        self.staging: deque[Frame] = deque()

    def staged(self) -> Frame:
        """The next frame to copy an outgoing message into; the one used longest ago."""
        if not self.staging:
            self.staging.extend(Frame(self.link.size) for _ in range(self.link.depth + 1))
        self.staging.rotate()
        return self.staging[0]


class _Slot:
    """Memory for one message, and what is going on with it."""

    __slots__ = ("arrived", "channel", "frame", "index", "receive", "replying")

    def __init__(self, channel: _Channel, index: int, frame: Frame, receive: MPI.Prequest) -> None:
        self.channel, self.index, self.frame, self.receive = channel, index, frame, receive
        self.arrived = self.replying = False

    def post(self) -> None:
        """Be ready for a message again."""
        self.arrived = self.replying = False
        self.channel.posted.append(self)
        self.receive.Start()


class MPIEndpoint:
    """One rank's door on a communicator that nobody else uses.

    Args:
        comm: the communicator; freed by `close`.
        links: whom it talks with.
        own: vectors whose frames messages may be sent from directly.
    """

    def __init__(self, comm: MPI.Intracomm, links: Sequence[Link], own: Iterable[FlatVector] = ()) -> None:
        self._comm = comm
        self._channels = {(link.peer, link.shard): _Channel(link) for link in links}
        self._own = {_address(flat.vector): flat.frame for flat in own}
        self._slots: list[_Slot] = []
        self._by_frame: dict[int, _Slot] = {}
        # What Testsome looks at, slot by slot: the posted receive, or the reply that is leaving.
        self._active: list[MPI.Request] = []
        self._ready: deque[Received] = deque()
        self._leaving: dict[int, MPI.Request] = {}  # what leaves from frames without a slot, by frame
        for channel in self._channels.values():
            for _ in range(channel.link.depth):
                self._add_slot(channel)

    def send(self, peer: int, message: Message, frame: Frame | None = None) -> None:
        """Send `message`; with a `frame`, from there, and post its receive again once it has left."""
        slot = None if frame is None else self._by_frame.get(id(frame))
        if frame is not None and slot is not None:
            slot.replying = True
            self._active[slot.index] = self._start(peer, message, frame)
        else:
            frame = self._frame_for(peer, message)
            self._leaving[id(frame)] = self._start(peer, message, frame)

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next message; None if none came within `timeout_s`."""
        if self._ready:
            return self._ready.popleft()
        backoff = Backoff()
        while not self._look():
            if timeout_s is not None and backoff.waited_s >= timeout_s:
                return None
            backoff.pause()
        return self._ready.popleft()

    def release(self, peer: int, frame: Frame) -> None:  # noqa: ARG002
        """Post the receive of `frame` again; a frame that is not ours needs nothing."""
        slot = self._by_frame.get(id(frame))
        if slot is not None:
            slot.post()

    def close(self) -> None:
        """Let everything leave that was sent, withdraw what was posted, free the communicator."""
        replies = [self._active[slot.index] for slot in self._slots if slot.replying]
        MPI.Request.Waitall([*self._leaving.values(), *replies])
        for slot in self._slots:
            if slot in slot.channel.posted and not slot.arrived:
                slot.receive.Cancel()
                slot.receive.Wait()
            slot.receive.Free()
        self._slots.clear()
        self._comm.Free()

    def _add_slot(self, channel: _Channel) -> None:
        link, frame = channel.link, Frame(channel.link.size)
        receive = self._comm.Recv_init([frame.bytes, MPI.BYTE], link.peer, _tag(link.shard, link.serving))
        slot = _Slot(channel, len(self._slots), frame, receive)
        self._slots.append(slot)
        self._active.append(receive)
        self._by_frame[id(frame)] = slot
        slot.post()

    def _look(self) -> bool:
        """Take what has come and what has left; say whether a message is there."""
        for index in MPI.Request.Testsome(self._active) or ():
            slot = self._slots[index]
            if slot.replying:
                self._active[index] = slot.receive
                slot.post()
                continue
            slot.arrived = True
            posted = slot.channel.posted
            while posted and posted[0].arrived:
                frame = posted.popleft().frame
                self._ready.append(Received(decode(frame), frame))
        return bool(self._ready)

    def _start(self, peer: int, message: Message, frame: Frame) -> MPI.Request:
        size = encode(message, frame)
        to_server = message.kind not in REPLIES
        return self._comm.Isend([frame.bytes[:size], MPI.BYTE], peer, _tag(message.shard, to_server))

    def _frame_for(self, peer: int, message: Message) -> Frame:
        """The memory to send from: the vector's own where it has one, else a copy."""
        vector = message.vector
        frame = None if vector is None else self._own.get(_address(vector))
        in_place = frame is not None and vector is not None and frame.vector.size == vector.size
        if frame is None or not in_place:
            frame = self._channels[peer, message.shard].staged()
        if (leaving := self._leaving.pop(id(frame), None)) is not None:
            leaving.Wait()
        if vector is not None and not in_place:
            np.copyto(frame.vector[: vector.size], vector)
        return frame


def _address(vector: Vector) -> int:
    address: int = vector.__array_interface__["data"][0]
    return address


def _tag(shard: int, to_server: bool) -> int:
    return 2 * shard + (not to_server)
