"""Messages over MPI: header and vector in one piece, receives posted before they are needed.

Requirements that shaped this module:

* No pickling, no packing. A message is the bytes of a `Frame`, sent in place. A vector that has a frame (a
  worker's parameters or gradient) is sent from it; only pieces of a vector (several servers) and one-way
  updates are copied into a frame first.
* A server holds memory for every worker's next request, with the receive already posted. It answers from that
  memory and posts the receive again when the send completes.
* No rank spins: a wait polls with growing pauses (`Backoff`), since blocking MPI calls burn a core; a
  `Wakeup` ends a pause on the same host.
* A worker that computes while a reply is in flight leaves the endpoint to a thread (`OverlappedEndpoint`). A
  short reply from the same host it reads after its step instead: that costs less than sharing the interpreter
  with a thread. The server does not poll for the completion of such a reply.
* A worker that waits for a long reply gets it in parts, while the server computes later ones; a long vector
  may travel ahead of its message in parts, while the worker computes or packs others.
* A worker of this host reads a long reply where the centre lies: a copy of it would cost the server half as
  much as the step. So the server takes the next message once that has been read; it copies where another
  message is there already, or where ranks share cores, so that the worker may not even run.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import HEADER_BYTES, Apart, Frame, PartWork, Vector, put_together
from nnlo_common.base._spans import span
from nnlo_common.cluster.transport._backoff import LONGEST_S, Backoff, Wakeup
from nnlo_common.cluster.transport._deaths import Deaths
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import MPI
from nnlo_common.cluster.transport._parts import (
    PART,
    IncomingAhead,
    IncomingParts,
    OutgoingAhead,
    bytes_of,
    parts,
    tag_of_parts,
)
from nnlo_common.protocol import ONE_WAY, REPLIES, Event, Kind, Lost, Message, Received, decode, encode
from nnlo_common.protocol._events import Part, given
from nnlo_common.protocol._messages import announced, comes_in_parts, kind_in

__all__ = ["MPIEndpoint", "SHORT_BYTES"]

# Polls in a row while a message is expected or moving: long messages move only during polls.
_POLLS = 64
# A peer that has not answered within this time may be asleep: wake it.
_WAKE_AFTER_S = 500e-6
# Wake a peer at once when this rank has received no message for this time.
_IDLE_S = 1e-3
# Reading a reply of this size within a host costs less than one poll by a thread: 0.1 ms.
SHORT_BYTES = 1 << 20
# With them, what was sent ahead of another message has been sent in vain.
_LAST_OF_A_STEP = frozenset({Kind.EXCHANGE, Kind.PUSH, Kind.LEAVE})
# How often a rank that waits for a part looks for anything else.
_LOOK_EVERY_S = 1.0
# The longest pause where every peer can wake this rank; other peers need shorter pauses.
_LONGEST_PAUSE_S = 2e-3

# Memory that MPI may still read and write: of peers that were abandoned in the middle of a message.
_LEFT_TO_MPI: list[object] = []


class _Channel:
    """The receive slots of one link, in posting order.

    MPI matches the messages of one pair to receives in posting order, but may complete a short message before
    an earlier long one. So a message counts as received when all before it are.
    """

    __slots__ = ("incoming", "link", "long", "outgoing", "posted", "reads_late", "staging")

    def __init__(self, comm: MPI.Intracomm, link: Link, *, near: bool) -> None:
        self.link = link
        #: The peer reads short replies after its compute step, not through a progress thread.
        self.reads_late = near and link.depth > 1 and 4 * link.size <= SHORT_BYTES
        #: Long replies come in parts, because the worker waits for them; else a thread receives them.
        self.long = link.depth == 1 and link.size > PART
        self.posted: deque[_Slot] = deque()
        self.staging: deque[Frame] = deque()
        #: What travels ahead of messages from here, and to here.
        self.outgoing: OutgoingAhead | None = None
        self.incoming: IncomingAhead | None = None
        if link.ahead > PART and link.depth == 1:
            if link.serving:
                self.incoming = IncomingAhead(comm, link)
            else:
                self.outgoing = OutgoingAhead(comm, link)

    def staged(self) -> Frame:
        """Return the frame for the next outgoing copy: the least recently used one."""
        if not self.staging:
            self.staging.extend(Frame(self.link.size) for _ in range(self.link.depth + 1))
        self.staging.rotate()
        return self.staging[0]


class _Slot:
    """Memory for one message, its receive request and their state."""

    __slots__ = ("arrived", "channel", "frame", "index", "leaving", "parts", "receive", "replying")

    def __init__(self, channel: _Channel, index: int, frame: Frame, receive: MPI.Prequest) -> None:
        self.channel, self.index, self.frame, self.receive = channel, index, frame, receive
        self.arrived = self.replying = False
        self.leaving: list[MPI.Request] = []  # the parts of a reply before its last
        self.parts: IncomingParts | None = None  # since the first reply that came in parts

    def post(self) -> None:
        """Post the receive again."""
        self.arrived = self.replying = False
        self.frame.header[0] = 0  # see MPIEndpoint._moving
        self.channel.posted.append(self)
        self.receive.Start()
        if self.channel.incoming is not None:
            self.channel.incoming.post()

    def retire(self) -> None:
        """Stop expecting messages: the peer is dead."""
        self.arrived, self.replying = True, False
        self.leaving.clear()
        self.frame.header[0] = 0


class MPIEndpoint:
    """One rank's endpoint, on a communicator of its own.

    It is one class because one poll looks at all requests; parts, deaths and wake-ups have classes of theirs.

    Args:
        comm: the communicator; freed by `close`, unless messages may still be under way to this rank.
        links: the links to its peers.
        wakeup: the socket that wakes this rank.
        wakeups: the addresses of these sockets for the ranks of this host, by rank.
        naps: this host has fewer cores than ranks, so a rank that waits leaves its core to others.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        links: Sequence[Link],
        wakeup: Wakeup,
        wakeups: Mapping[int, str],
        *,
        naps: bool = False,
    ) -> None:
        self._comm, self.wakeup, self._wakeups = comm, wakeup, wakeups
        self._deaths = Deaths(comm)
        self._abandoned: set[int] = set()
        self._to_wake: set[str] = set()  # peers sent to and not yet woken
        self._heard_s = time.perf_counter()  # when the last message arrived
        self.near = all(link.peer in wakeups for link in links)
        self.longest_s, self._naps = _LONGEST_PAUSE_S if self.near else LONGEST_S, naps
        self._channels = {
            (link.peer, link.shard): _Channel(comm, link, near=link.peer in wakeups) for link in links
        }
        lagging = [one for one in self._channels.values() if one.link.depth > 1]
        #: Whether this worker reads all replies after its compute step and so needs no progress thread.
        self.reads_late = bool(lagging) and all(one.reads_late and not one.link.serving for one in lagging)
        # Workers that compute while we answer, with a progress thread asleep on the wake-up socket.
        self._threaded_peers = {one.link.peer for one in lagging if one.link.serving and not one.reads_late}
        self._flush_needed = False  # whether `flush` must complete the last send
        self._slots: list[_Slot] = []
        self._by_frame: dict[int, _Slot] = {}
        # Requests for Testsome, by slot: the posted receive, or the reply in flight.
        self._active: list[MPI.Request] = []
        self._ready: deque[Frame | Lost] = deque()  # received, in order
        self._leaving: dict[int, MPI.Request] = {}  # sends from frames without a slot, by id
        self._awaited = 0  # replies not yet received
        self._lent: set[_Slot] = set()  # whose replies a peer reads where they lie
        for channel in self._channels.values():
            for _ in range(channel.link.depth):
                self._add_slot(channel)

    def send(
        self, peer: int, message: Message, frame: Frame | None = None, fill: PartWork | None = None
    ) -> None:
        """Send `message` from the `frame` that holds its vector; then its receive is posted again."""
        slot = None if frame is None else self._by_frame.get(id(frame))
        gone = peer in self._deaths.known
        outgoing = self._channels[peer, message.shard].outgoing
        if fill is not None and not gone and outgoing is not None and outgoing.takes(message.vector):
            self._send_made(peer, message, frame, fill, outgoing)
            return
        in_parts = not gone and _goes_in_parts(message, slot)
        if fill is not None and message.vector is not None and not in_parts:
            fill(slice(0, message.vector.size))
            fill = None
        if gone:
            return
        if outgoing is not None and outgoing.open:
            if outgoing.is_of(message.vector):
                self._send_behind(peer, message, frame, outgoing)
                return
            if message.kind in _LAST_OF_A_STEP:
                self.withdraw(peer, message.shard)
        # Without a thread the next request waits anyway, which completes this one.
        self._flush_needed = not self.reads_late or message.kind in ONE_WAY
        threaded = peer in self._threaded_peers
        if peer in self._wakeups and not threaded:
            self._announce(self._wakeups[peer])
        if frame is not None and slot is not None:
            slot.replying = True
            if in_parts and (fill is not None or _lies_elsewhere(message, frame)):
                self._start_parts(slot, message, frame, fill)
            else:
                self._active[slot.index] = self._start(peer, _in_frame(message, frame), frame)
        else:
            frame = self._frame_for(peer, message, frame)
            self._leaving[id(frame)] = self._start(peer, message, frame)
        if threaded and peer in self._wakeups:
            self.wakeup.wake(self._wakeups[peer])  # a woken thread polls once, so wake it after the send

    def send_ahead(self, peer: int, shard: int, vector: Vector, start: int, apart: Apart = ()) -> None:
        """Begin to send what lies behind `start` in a vector whose message follows."""
        outgoing = self._channels[peer, shard].outgoing
        if outgoing is None or peer in self._deaths.known:
            put_together(vector, slice(start, vector.size), apart)
            return
        begins = not outgoing.open
        self._leave(outgoing.send(vector, start, apart))
        if begins and peer in self._wakeups:
            self.wakeup.wake(self._wakeups[peer])
        self._all_left()  # what has begun to leave moves inside MPI only

    def withdraw(self, peer: int, shard: int) -> None:
        """Let what was sent ahead of a message count for nothing: another one comes, or none."""
        outgoing = self._channels[peer, shard].outgoing
        if outgoing is not None and outgoing.open and peer not in self._deaths.known:
            self._send_behind(peer, Message(Kind.WITHDRAWN, 0, 0, shard=shard), None, outgoing)

    def _send_made(
        self, peer: int, message: Message, frame: Frame | None, fill: PartWork, outgoing: OutgoingAhead
    ) -> None:
        """Send a vector while it is made, and its message behind it."""
        assert message.vector is not None  # outgoing has taken it
        for part in parts(message.vector.size):
            fill(part)
            if peer in self._deaths.known:
                continue  # what is not sent must be made all the same
            self._leave(outgoing.send_part(message.vector, part))
            if not part.start and peer in self._wakeups:
                self._announce(self._wakeups[peer])
            self._all_left()  # what has begun to leave moves inside MPI only
        if peer not in self._deaths.known:
            self._send_behind(peer, message, frame, outgoing)

    def _send_behind(self, peer: int, message: Message, frame: Frame | None, outgoing: OutgoingAhead) -> None:
        """Send the rest of a vector that was sent ahead, and its message behind it."""
        self._leave(outgoing.rest())
        if peer in self._wakeups:
            self._announce(self._wakeups[peer])
        self._flush_needed = True
        header = self._freed(frame or self._channels[peer, message.shard].staged())
        self._leaving[id(header)] = self._start(peer, message, header, in_parts=True)

    def _leave(self, requests: Iterator[MPI.Request]) -> None:
        """Keep requests of sends until they are complete."""
        with self._noting_deaths():
            for request in requests:
                self._leaving[id(request)] = request

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None after `timeout_s`."""
        if not self._ready or self._lent:
            arrived = self._wait(timeout_s)
            self._heard_s = time.perf_counter()
            if not arrived:
                return None
        item = self._ready.popleft()
        if isinstance(item, Lost):
            return item
        slot = self._by_frame[id(item)]
        later = slot.parts or None
        return Received(decode(item), item, later and partial(self._arriving_in, slot, later))

    def _wait(self, timeout_s: float | None) -> bool:
        if self._poll_times(_POLLS):  # mostly so after a compute step
            return True
        backoff = self._backoff()
        while True:
            if timeout_s is not None and backoff.waited_s >= timeout_s:
                return False
            if self._to_wake and backoff.waited_s > _WAKE_AFTER_S:
                self._wake_peers()
            if self._poll_times(_POLLS if backoff.pause(self._moving) else 1):
                return True

    def _backoff(self) -> Backoff:
        return Backoff(self.longest_s, sleep=self.wakeup.wait, naps=self._naps)

    def _poll_times(self, polls: int) -> bool:
        """Poll up to `polls` times; return whether an event is ready."""
        for _ in range(polls):
            done = self._done()
            if done:
                self._take(done)
            if self._ready and not self._lent:
                return True
        return False

    def release(self, peer: int, frame: Frame) -> None:  # noqa: ARG002
        """Post the receive of `frame` again; do nothing for a frame without a slot."""
        slot = self._by_frame.get(id(frame))
        if slot is not None:
            self._finish_parts(slot)
            self._post(slot)

    def abandon(self, peer: int) -> None:
        """Never wait for this peer again; its receives stay posted."""
        self._abandoned.add(peer)
        self._lent = {slot for slot in self._lent if slot.channel.link.peer != peer}

    def flush(self) -> None:
        """Poll until all sends complete: MPI moves long messages only inside its calls."""
        backoff = Backoff(naps=self._naps)
        while self._flush_needed and not self._all_left():
            backoff.pause(lambda: True)

    @property
    def busy(self) -> bool:
        """Whether a message is in flight, as known without a poll."""
        return self._awaited > 0 or bool(self._leaving)

    @property
    def leaving(self) -> bool:
        """Whether a send was incomplete at the last poll."""
        return bool(self._leaving)

    def poll(self) -> bool:
        """Progress sends and receives; return whether any is still in flight."""
        for _ in range(_POLLS):
            done = self._done()
            if done:
                self._take(done)
                self._heard_s = time.perf_counter()
            elif not self._arriving():
                break
            if not self._awaited:
                break
        return self._awaited > 0 or not self._all_left()

    def close(self) -> None:
        """Complete all sends, cancel all receives, free the communicator."""
        slots = [slot for slot in self._slots if slot.channel.link.peer not in self._abandoned]
        replies = [
            one for slot in slots if slot.replying for one in (*slot.leaving, self._active[slot.index])
        ]
        for request in (*self._leaving.values(), *replies):
            with self._noting_deaths():
                request.Wait()
        for slot in slots:
            with self._noting_deaths():
                if slot in slot.channel.posted and not slot.arrived:
                    slot.receive.Cancel()
                    slot.receive.Wait()
                slot.receive.Free()
            self._finish_parts(slot)
            if slot.channel.incoming is not None:
                with self._noting_deaths():
                    slot.channel.incoming.close()
        if self._abandoned:
            _LEFT_TO_MPI.append((self._comm, self._slots))
        self._slots = []
        self._wake_peers()
        self.wakeup.close()
        # A spare or heir closes while others still tell it that they leave. MPI would take such a message
        # for one of the next communicator with this number, and lose one of that.
        sides = {channel.link.serving for channel in self._channels.values()}
        if self._abandoned or len(sides) > 1:
            return
        with self._noting_deaths():
            self._comm.Free()

    def _announce(self, address: str) -> None:
        """Wake the peer for the next send: now if it may be asleep, else when its answer is late.

        A worker that computes before it needs the answer skips this: the peer's pause costs it at most a
        tenth.
        """
        if not self.reads_late and time.perf_counter() - self._heard_s > _IDLE_S:
            self.wakeup.wake(address)
        else:
            self._to_wake.add(address)

    def _wake_peers(self) -> None:
        for address in self._to_wake:
            self.wakeup.wake(address)
        self._to_wake.clear()

    def _add_slot(self, channel: _Channel) -> None:
        link, frame = channel.link, Frame(channel.link.size)
        receive = self._comm.Recv_init([frame.bytes, MPI.BYTE], link.peer, _tag(link.shard, link.serving))
        slot = _Slot(channel, len(self._slots), frame, receive)
        self._slots.append(slot)
        self._active.append(receive)
        self._by_frame[id(frame)] = slot
        if channel.incoming is not None:
            self._by_frame[id(channel.incoming.frame)] = slot
        self._post(slot)

    def _post(self, slot: _Slot) -> None:
        """Post the receive again, unless the peer is dead."""
        if slot.channel.link.peer not in self._deaths.known:
            try:
                slot.post()
            except MPI.Exception as error:
                self._note_deaths(error)

    def _done(self) -> Sequence[int] | None:
        """The slots whose receive or send completed since the last poll."""
        try:
            return MPI.Request.Testsome(self._active)
        except MPI.Exception as error:
            self._note_deaths(error)
        # The failed Testsome did not report the other completed requests, so test each one.
        return [
            slot.index
            for slot in self._slots
            if (slot.replying or not slot.arrived) and self._active[slot.index].Test()
        ]

    @contextlib.contextmanager
    def _noting_deaths(self) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            self._note_deaths(error)

    def _note_deaths(self, error: MPI.Exception) -> None:
        """Retire the slots of newly dead ranks and queue a `Lost` for each; raise any other error."""
        for rank in self._deaths.new(error):
            for slot in self._slots:
                if slot.channel.link.peer == rank:
                    slot.retire()
                    self._lent.discard(slot)
                    self._active[slot.index] = MPI.REQUEST_NULL
            self._ready.append(Lost(rank))

    def _take(self, done: Iterable[int]) -> None:
        """Queue received messages in posting order; post the receives of completed replies again."""
        for index in done:
            slot = self._slots[index]
            if slot.replying:
                if self._parts_left(slot):
                    self._lent.discard(slot)
                    self._active[index] = slot.receive
                    self._post(slot)
                continue
            if not self._all_came_ahead(slot):
                continue
            slot.arrived = True
            if slot.channel.long and not slot.channel.link.serving and comes_in_parts(slot.frame):
                if slot.parts is None:
                    link = slot.channel.link
                    slot.parts = IncomingParts(self._comm, link, near=link.peer in self._wakeups)
                slot.parts.expect(announced(slot.frame))
            posted = slot.channel.posted
            while posted and posted[0].arrived:
                frame = _taken(posted.popleft())
                if slot.channel.incoming is not None and kind_in(frame) is Kind.WITHDRAWN:
                    self._post(slot)
                    continue
                self._ready.append(frame)
                if self._awaited:  # 0 if a reply answers a request from before a resume
                    self._awaited -= 1

    def _all_came_ahead(self, slot: _Slot) -> bool:
        """Whether what travels ahead of a message that is there has come; else a part of it is awaited."""
        incoming = slot.channel.incoming
        if incoming is None or not comes_in_parts(slot.frame):
            return True
        missing = incoming.missing(self._left)
        if slot.channel.link.peer in self._deaths.known:
            return False
        self._active[slot.index] = slot.receive if missing is None else missing
        return missing is None

    def _moving(self) -> bool:
        """Whether a message is partly sent or received, as far as is visible.

        MPI moves long messages piece by piece, only inside its calls. The first piece received holds the
        header; with a library that writes it last, a long message only takes a little longer.
        """
        return not self._all_left() or self._replying() or self._arriving()

    def _replying(self) -> bool:
        """Whether a peer is receiving a reply now; one that computes for long reads it later and wakes us."""
        idle = time.perf_counter() - self._heard_s > _IDLE_S
        return any(
            slot.replying
            and not (idle and slot.channel.reads_late)
            and slot.channel.link.peer not in self._abandoned
            for slot in self._slots
        )

    def _arriving(self) -> bool:
        """Whether a message has arrived in part."""
        return any(
            (slot.frame.header[0] or (slot.channel.incoming is not None and slot.channel.incoming.arriving))
            and not slot.arrived
            and slot.channel.link.peer not in self._abandoned
            for slot in self._slots
        )

    def _all_left(self) -> bool:
        """Whether all sends from frames without a slot are complete."""
        if self._leaving:
            try:
                if MPI.Request.Testall(list(self._leaving.values())):
                    self._leaving.clear()
            except MPI.Exception as error:
                self._note_deaths(error)
                self._leaving = {at: one for at, one in self._leaving.items() if not self._left(one)}
        return not self._leaving

    def _left(self, request: MPI.Request) -> bool:
        """True if the request completed or the peer died."""
        try:
            return request.Test()
        except MPI.Exception as error:
            self._note_deaths(error)
            return True

    def _start(self, peer: int, message: Message, frame: Frame, *, in_parts: bool = False) -> MPI.Request:
        size = encode(message, frame, in_parts=in_parts)
        size = HEADER_BYTES if in_parts else size
        to_server = message.kind not in REPLIES
        self._awaited += to_server and message.kind not in ONE_WAY
        try:
            return self._comm.Isend([frame.bytes[:size], MPI.BYTE], peer, _tag(message.shard, to_server))
        except MPI.Exception as error:
            self._note_deaths(error)
            return MPI.REQUEST_NULL

    def _start_parts(self, slot: _Slot, message: Message, frame: Frame, fill: PartWork | None) -> None:
        """Send a reply part by part, each as soon as it is computed.

        A vector that lies elsewhere a rank of this host reads there, at once, unless others wait; else it is
        copied.
        """
        assert message.vector is not None  # _goes_in_parts has seen to it
        peer, there = slot.channel.link.peer, message.vector
        near, elsewhere = peer in self._wakeups, _lies_elsewhere(message, frame)
        lends = near and elsewhere and not self._others_wait()
        encode(message.with_vector(frame.vector[: there.size]), frame, in_parts=True)
        sent = []
        for part in parts(there.size):
            if fill is not None:
                fill(part)
            if peer in self._deaths.known:
                continue  # the centre must move whether the worker lives or not
            memory = frame.bytes[bytes_of(part)]
            if lends and part.start:
                memory = there[part].view(np.uint8)
            elif elsewhere:
                np.copyto(frame.vector[part], there[part])
            with self._noting_deaths():
                tag = tag_of_parts(message.shard) if part.start else _tag(message.shard, to_server=False)
                sent.append(self._comm.Isend([memory, MPI.BYTE], peer, tag))
            if not part.start and near:
                self.wakeup.wake(self._wakeups[peer])
        if peer not in self._deaths.known:
            *slot.leaving, self._active[slot.index] = sent
            if lends:
                self._lent.add(slot)

    def _others_wait(self) -> bool:
        """Whether others may need what this rank does next: their message is there, or they need its core."""
        if self._naps:
            return True
        self._poll_times(1)
        return bool(self._ready) or self._arriving()

    def _parts_left(self, slot: _Slot) -> bool:
        """Whether all parts of a reply whose last has left have left; else one of the others is active."""
        while slot.leaving:
            request = slot.leaving.pop()
            if not self._left(request):
                self._active[slot.index] = request
                return False
        return True

    def _finish_parts(self, slot: _Slot) -> None:
        """Receive parts that nobody has taken, e.g. after an error: their sender waits for that."""
        if slot.parts:
            with self._noting_deaths():
                slot.parts.finish()

    def _arriving_in(self, slot: _Slot, later: IncomingParts, into: Vector | None) -> Iterator[Part | None]:
        """Give each part of a reply once it has arrived, and None now and then while it has not."""
        peer = slot.channel.link.peer
        with self._noting_deaths():
            later.post(into)
        yield from given([(later.first, slot.frame.vector[later.first])], into)
        while later:
            with span("wait", "part"):
                came = self._await_part(peer, later)
            if peer in self._deaths.known:
                later.forget()
                raise PeerLostError(peer, "a server of the centre has died in the middle of a reply")
            part = later.take() if came else None
            with self._noting_deaths():
                later.post(into)
            yield part

    def _await_part(self, peer: int, later: IncomingParts) -> bool:
        """Wait for the next part or its sender's death; return False when neither has come for a while."""
        backoff = self._backoff()
        while peer not in self._deaths.known and not any(self._left(later.next) for _ in range(_POLLS)):
            backoff.pause()
            if backoff.waited_s > _LOOK_EVERY_S:
                return False
        return True

    def _frame_for(self, peer: int, message: Message, holding: Frame | None) -> Frame:
        """Return the frame to send a message from, with its vector."""
        frame = self._freed(holding or self._channels[peer, message.shard].staged())
        if holding is None and message.vector is not None:
            np.copyto(frame.vector[: message.vector.size], message.vector)
        return frame

    def _freed(self, frame: Frame) -> Frame:
        """Wait for the previous send from this frame, then return it."""
        if (leaving := self._leaving.pop(id(frame), None)) is not None:
            try:  # without the context manager, which takes 5 us of an exchange's 25
                leaving.Wait()
            except MPI.Exception as error:
                self._note_deaths(error)
        return frame


def _taken(slot: _Slot) -> Frame:
    """Return the memory that holds a slot's message: what has travelled ahead of it has its own."""
    incoming = slot.channel.incoming
    return incoming.take(slot.frame) if incoming is not None and comes_in_parts(slot.frame) else slot.frame


def _lies_elsewhere(message: Message, frame: Frame) -> bool:
    """Whether a message's vector does not lie in the frame that the message is sent from."""
    return message.vector is not None and not np.may_share_memory(message.vector, frame.vector)


def _in_frame(message: Message, frame: Frame) -> Message:
    """Return a message with its vector in the frame, copied there if it lies elsewhere."""
    if message.vector is None or not _lies_elsewhere(message, frame):
        return message
    there = frame.vector[: message.vector.size]
    np.copyto(there, message.vector)
    return message.with_vector(there)


def _goes_in_parts(message: Message, slot: _Slot | None) -> bool:
    long = slot is not None and slot.channel.link.serving and slot.channel.long
    return long and message.vector is not None and message.vector.size > PART


def _tag(shard: int, to_server: bool) -> int:
    return 2 * shard + (not to_server)
