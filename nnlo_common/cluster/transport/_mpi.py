"""Messages over MPI: header and vector in one piece, receives posted before they are needed.

Requirements that shaped this module:

* Nothing is pickled and nothing is packed. A message is the bytes of a `Frame`, sent as it lies. A vector
  that has a frame (a worker's parameters or gradient) leaves from there; only pieces of a vector (several
  servers) and one-way updates are copied into a frame first.
* A server has memory for every worker's next request, with the receive already posted; the request is
  answered from that same memory, and the receive posted again when the answer has left.
* Nobody spins: a wait looks with growing pauses (`Backoff`), since blocking MPI calls burn a core; a
  `Doorbell` ends a pause on the same host.
* Who may compute while a reply is under way leaves the door to a thread meanwhile (`OverlappedEndpoint`);
  but a short reply of this host is read when its owner is back: that takes less time than to share the
  interpreter with a thread. Nobody keeps looking whether it has been read.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from nnlo_common.base._flat_vector import Frame
from nnlo_common.cluster.transport._backoff import LONGEST_S, Backoff
from nnlo_common.cluster.transport._deaths import Deaths
from nnlo_common.cluster.transport._doorbell import Doorbell
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._world import MPI
from nnlo_common.protocol import ONE_WAY, REPLIES, Event, Lost, Message, Received, decode, encode

__all__ = ["SHORT_BYTES", "MPIEndpoint"]

# Looks in a row while a message is expected or moving: long messages move only while somebody looks.
_LOOKS = 64
# Who does not answer within this time may be asleep.
_PATIENCE_S = 500e-6
# And who has had nothing to do with us for this time, too.
_DROWSY_S = 1e-3
# To read so much within a host costs less than a look of a thread: a tenth of a millisecond.
SHORT_BYTES = 1 << 20
# The longest pause where every peer can ring; others are looked out for more often.
_LONGEST_PAUSE_S = 2e-3


class _Channel:
    """The memory that messages of one link arrive in, in the order in which it was posted.

    MPI matches messages of one pair to receives in the order of posting, but may complete a short message
    before a long one that was sent earlier. So a message counts as there when all before it are.
    """

    __slots__ = ("link", "patient", "posted", "staging")

    def __init__(self, link: Link, *, near: bool) -> None:
        self.link = link
        #: The peer computes while it is answered, and reads the answer when it is back.
        self.patient = near and link.depth > 1 and 4 * link.size <= SHORT_BYTES
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
        self.frame.header[0] = 0  # see MPIEndpoint._moving
        self.channel.posted.append(self)
        self.receive.Start()

    def retire(self) -> None:
        """Expect nothing any more: the peer is dead."""
        self.arrived, self.replying = True, False
        self.frame.header[0] = 0


class MPIEndpoint:
    """One rank's door on a communicator that nobody else uses.

    Args:
        comm: the communicator; freed by `close`.
        links: whom it talks with.
        bell: what wakes this rank.
        bells: the addresses of the bells of this rank's host, by rank.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        links: Sequence[Link],
        bell: Doorbell,
        bells: Mapping[int, str],
    ) -> None:
        self._comm, self.bell, self._bells = comm, bell, bells
        self._deaths = Deaths(comm)
        self._unrung: set[str] = set()  # to whom something was sent since they were rung for
        self._heard_s = time.perf_counter()  # when the last message came
        self.near = all(link.peer in bells for link in links)
        self.longest_s = _LONGEST_PAUSE_S if self.near else LONGEST_S
        self._channels = {(link.peer, link.shard): _Channel(link, near=link.peer in bells) for link in links}
        lagging = [one for one in self._channels.values() if one.link.depth > 1]
        #: Whether this worker, which need not wait for each reply, does without a thread.
        self.patient = bool(lagging) and all(one.patient and not one.link.serving for one in lagging)
        # Who computes while we answer, and has a thread asleep on the bell.
        self._absent = {one.link.peer for one in lagging if one.link.serving and not one.patient}
        self._seen_off = False  # whether the owner is to stay until what it has sent last has left
        self._slots: list[_Slot] = []
        self._by_frame: dict[int, _Slot] = {}
        # What Testsome looks at, slot by slot: the posted receive, or the reply that is leaving.
        self._active: list[MPI.Request] = []
        self._ready: deque[Frame | Lost] = deque()  # what has come, in order
        self._leaving: dict[int, MPI.Request] = {}  # what leaves from frames without a slot, by frame
        self._awaited = 0  # replies that have not come
        for channel in self._channels.values():
            for _ in range(channel.link.depth):
                self._add_slot(channel)

    def send(self, peer: int, message: Message, frame: Frame | None = None) -> None:
        """Send `message`, from the `frame` that holds its vector; post its receive again, if it has one."""
        if peer in self._deaths.known:
            return
        self._seen_off = not self.patient or message.kind in ONE_WAY  # the next request comes with a wait
        absent = peer in self._absent
        if peer in self._bells and not absent:
            self._announce(self._bells[peer])
        slot = None if frame is None else self._by_frame.get(id(frame))
        if frame is not None and slot is not None:
            slot.replying = True
            self._active[slot.index] = self._start(peer, message, frame)
        else:
            frame = self._frame_for(peer, message, frame)
            self._leaving[id(frame)] = self._start(peer, message, frame)
        if absent and peer in self._bells:
            self.bell.ring(self._bells[peer])  # whom it wakes looks once, so not before there is something

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next message; None if none came within `timeout_s`."""
        if not self._ready:
            arrived = self._wait(timeout_s)
            self._heard_s = time.perf_counter()
            if not arrived:
                return None
        news = self._ready.popleft()
        return news if isinstance(news, Lost) else Received(decode(news), news)

    def _wait(self, timeout_s: float | None) -> bool:
        if self._comes(_LOOKS):  # as mostly where the worker has computed meanwhile
            return True
        backoff = Backoff(self.longest_s, sleep=self.bell.wait)
        while True:
            if timeout_s is not None and backoff.waited_s >= timeout_s:
                return False
            if self._unrung and backoff.waited_s > _PATIENCE_S:
                self._ring()
            if self._comes(_LOOKS if backoff.pause(self._moving) else 1):
                return True

    def _comes(self, looks: int) -> bool:
        """Look so many times in a row, or until something has come."""
        for _ in range(looks):
            done = self._done()
            if done:
                self._take(done)
            if self._ready:
                return True
        return False

    def release(self, peer: int, frame: Frame) -> None:  # noqa: ARG002
        """Post the receive of `frame` again; a frame that is not ours needs nothing."""
        slot = self._by_frame.get(id(frame))
        if slot is not None:
            self._post(slot)

    def flush(self) -> None:
        """Keep MPI going until everything has left: it moves long messages only while it is called."""
        backoff = Backoff()
        while self._seen_off and not self._all_left():
            backoff.pause(lambda: True)

    @property
    def busy(self) -> bool:
        """Whether anything is under way, as far as is known without a look."""
        return self._awaited > 0 or bool(self._leaving)

    @property
    def leaving(self) -> bool:
        """Whether something that was sent had not left when last looked."""
        return bool(self._leaving)

    def look(self) -> bool:
        """Let move what is under way and take in what has come; say whether anything still is."""
        for _ in range(_LOOKS):
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
        """Let everything leave that was sent, withdraw what was posted, free the communicator."""
        replies = [self._active[slot.index] for slot in self._slots if slot.replying]
        for request in (*self._leaving.values(), *replies):
            with self._mourning():
                request.Wait()
        for slot in self._slots:
            with self._mourning():
                if slot in slot.channel.posted and not slot.arrived:
                    slot.receive.Cancel()
                    slot.receive.Wait()
                slot.receive.Free()
        self._slots.clear()
        self._ring()
        self.bell.close()
        with self._mourning():
            self._comm.Free()

    def _announce(self, address: str) -> None:
        """Ring for a message that is about to be sent: at once if the peer may be asleep, else later.

        Who computes before it needs the answer leaves the peer asleep for a tenth of that time at most.
        """
        if not self.patient and time.perf_counter() - self._heard_s > _DROWSY_S:
            self.bell.ring(address)
        else:
            self._unrung.add(address)

    def _ring(self) -> None:
        for address in self._unrung:
            self.bell.ring(address)
        self._unrung.clear()

    def _add_slot(self, channel: _Channel) -> None:
        link, frame = channel.link, Frame(channel.link.size)
        receive = self._comm.Recv_init([frame.bytes, MPI.BYTE], link.peer, _tag(link.shard, link.serving))
        slot = _Slot(channel, len(self._slots), frame, receive)
        self._slots.append(slot)
        self._active.append(receive)
        self._by_frame[id(frame)] = slot
        self._post(slot)

    def _post(self, slot: _Slot) -> None:
        """Be ready for a message of a living peer."""
        if slot.channel.link.peer not in self._deaths.known:
            try:
                slot.post()
            except MPI.Exception as error:
                self._mourn(error)

    def _done(self) -> Sequence[int] | None:
        """Which slots something has come to, or left from, since the last look."""
        try:
            return MPI.Request.Testsome(self._active)
        except MPI.Exception as error:
            self._mourn(error)
        # MPI has not said what else was done, and forgets it when it is asked once more.
        return [
            slot.index
            for slot in self._slots
            if (slot.replying or not slot.arrived) and self._active[slot.index].Test()
        ]

    @contextlib.contextmanager
    def _mourning(self) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            self._mourn(error)

    def _mourn(self, error: MPI.Exception) -> None:
        """Expect nothing more of those who have died, and have that known."""
        for rank in self._deaths.news(error):
            for slot in self._slots:
                if slot.channel.link.peer == rank:
                    slot.retire()
                    self._active[slot.index] = MPI.REQUEST_NULL
            self._ready.append(Lost(rank))

    def _take(self, done: Iterable[int]) -> None:
        """Take what has come and what has left."""
        for index in done:
            slot = self._slots[index]
            if slot.replying:
                self._active[index] = slot.receive
                self._post(slot)
                continue
            slot.arrived = True
            posted = slot.channel.posted
            while posted and posted[0].arrived:
                self._ready.append(posted.popleft().frame)
                if self._awaited:  # after a resume there are replies to what was asked before
                    self._awaited -= 1

    def _moving(self) -> bool:
        """Whether a message is on its way in or out right now, as far as one can see.

        MPI moves long messages piece by piece, and only while it is called. The first piece that comes in
        holds the header; should a library write it last, a long message merely takes a little longer.
        """
        return not self._all_left() or self._replying() or self._arriving()

    def _replying(self) -> bool:
        """Whether a reply is being read; who is away for long reads it when back, and rings then."""
        away = time.perf_counter() - self._heard_s > _DROWSY_S
        return any(slot.replying and not (away and slot.channel.patient) for slot in self._slots)

    def _arriving(self) -> bool:
        """Whether the first piece of a message has come, and not all of it."""
        return any(slot.frame.header[0] and not slot.arrived for slot in self._slots)

    def _all_left(self) -> bool:
        """Whether everything has left that was sent from frames without a slot."""
        if self._leaving:
            try:
                if MPI.Request.Testall(list(self._leaving.values())):
                    self._leaving.clear()
            except MPI.Exception as error:
                self._mourn(error)
                self._leaving = {at: one for at, one in self._leaving.items() if not self._left(one)}
        return not self._leaving

    def _left(self, request: MPI.Request) -> bool:
        """Whether nothing more will come of it; so it is, too, where the peer is dead."""
        try:
            return request.Test()
        except MPI.Exception as error:
            self._mourn(error)
            return True

    def _start(self, peer: int, message: Message, frame: Frame) -> MPI.Request:
        size = encode(message, frame)
        to_server = message.kind not in REPLIES
        self._awaited += to_server and message.kind not in ONE_WAY
        try:
            return self._comm.Isend([frame.bytes[:size], MPI.BYTE], peer, _tag(message.shard, to_server))
        except MPI.Exception as error:
            self._mourn(error)
            return MPI.REQUEST_NULL

    def _frame_for(self, peer: int, message: Message, holding: Frame | None) -> Frame:
        """The memory to send from, when what has left from there before has left."""
        frame = holding or self._channels[peer, message.shard].staged()
        if (leaving := self._leaving.pop(id(frame), None)) is not None:
            try:
                leaving.Wait()
            except MPI.Exception as error:
                self._mourn(error)
        if holding is None and message.vector is not None:
            np.copyto(frame.vector[: message.vector.size], message.vector)
        return frame


def _tag(shard: int, to_server: bool) -> int:
    return 2 * shard + (not to_server)
