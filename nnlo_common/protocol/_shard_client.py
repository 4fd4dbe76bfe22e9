"""A worker's side of the protocol with one server, for one shard of the centre: a pure state machine."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from nnlo_common.algorithms import Ask, WorkerRule
from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Frame, PartWork, Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._events import Action, Part, Received, Release, Send, Story, kept, restored
from nnlo_common.protocol._messages import REPLIES, Kind, Message
from nnlo_common.protocol._wire import PLAIN, Wire, WireEnd

__all__ = ["Phase", "Shard", "ShardClient", "shards_without"]


class Phase(enum.Enum):
    """Phase of a worker's life with one server."""

    OUTSIDE = "has not joined"
    JOINING = "has asked to join and waits for the centre"
    TRAINING = "has joined"
    LEFT = "has left"


@dataclass(frozen=True, slots=True)
class Shard:
    """One piece of the centre.

    Attributes:
        index: its number.
        server: the rank that serves it.
        place: its part of the vector.
        spares: the ranks that serve it when that one has died, in this order.
    """

    index: int
    server: int
    place: slice
    spares: tuple[int, ...] = ()

    def without(self, rank: int) -> Shard | None:
        """Return the shard once this rank is dead; None: nobody can serve it."""
        servers = [one for one in (self.server, *self.spares) if one != rank]
        return replace(self, server=servers[0], spares=tuple(servers[1:])) if servers else None

    def without_spare(self, rank: int) -> Shard:
        """Return the shard with one rank less that serves it when the server has died."""
        return replace(self, spares=tuple(one for one in self.spares if one != rank))

    def piece(self, vector: Vector) -> Vector:
        """Return that part of a vector; the vector itself if it is all of it, to send it without a copy."""
        return vector if self.place == slice(0, vector.size) else vector[self.place]


def shards_without(shards: Sequence[Shard], rank: int) -> list[Shard]:
    """Return the shards once this rank is dead, in their order; a spare that now serves is nobody's spare.

    Which deaths a training survives does not depend on the order in which a rank hears of them.

    Raises:
        PeerLostError: nobody can serve one of them.
    """
    left = []
    for shard in shards:
        one = shard.without(rank)
        if one is None:
            raise PeerLostError(rank, "a server of the centre has died")
        left.append(one)
    serving = {one.server for one in left}
    return [replace(one, spares=tuple(spare for spare in one.spares if spare not in serving)) for one in left]


_ASKS = {Ask.EXCHANGE: Kind.EXCHANGE, Ask.PUSH: Kind.PUSH, Ask.PULL: Kind.PULL, Ask.LOCK: Kind.LOCK}
_ANSWERED = frozenset({*_ASKS.values(), Kind.VIEW})
_NOTHING = 2.0**-60  # a weight must be above 0; next to a step's weight this one vanishes in float32
_CONTRIBUTIONS = frozenset({Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT})
_NUMBERS = frozenset({Kind.EXCHANGE, Kind.PULL})  # answered by the rule's reply


class ShardClient:
    """Conversation of one worker with one server about one shard.

    Replies are absorbed in order and at fixed points: with a pipeline of L, the reply to exchange k is
    absorbed when exchange k + L is opened, however early it came. So the numbers never depend on timing.

    Attributes:
        rule: the worker's half of the algorithm for this shard.
        phase: the worker's phase with this server.
        pulled_at: the centre's commits in the last absorbed reply.
        weight: the share in a mean that each later step has, e.g. its number of samples.
        samples: the number of samples taken so far.
        waited: the share of the epoch that the worker has spent in exchanges.
        lent: the gradient stays unchanged until its contribution has been answered.
        stop_requested: the server has asked to finish.
        rate: the server's latest learning rate; 0: none.
        progress: the progress of the centre in the latest reply, and of this epoch, in samples.
        pause_requested: the server's latest reply asks to pause at the next batch boundary.
        pausing: a PAUSE is unanswered.
        paused: the last PAUSE was granted: all workers pause.
        pauses: the number of the last pause that was granted.
        together: how many workers make that pause; 0: it is not known.
        pause_cancelled: the last PAUSE was cancelled; do not ask again before the next exchange or epoch.
        absorbing: a long reply is arriving.
        sample: coordinates of the next contribution, of all shards, to send before it; None: none are sent.
        epochs: finished epochs, as the server counts them.
        outgoing_frames: with a pipeline or a packed wire, the frames of contributions, in turn.

    Args:
        rank: the worker.
        shard: the piece of the centre.
        rule: the worker's half of the algorithm.
        parameters: of the whole model.
        gradient: of the whole model.
        wire: how vectors travel.
        alone: there is no other shard.
    """

    def __init__(
        self,
        rank: int,
        shard: Shard,
        rule: WorkerRule,
        parameters: FlatVector,
        gradient: FlatVector,
        *,
        wire: Wire = PLAIN,
        alone: bool = True,
    ) -> None:
        self.rank, self.shard, self.rule = rank, shard, rule
        self._alone, self._round = alone, 0  # contributions of this epoch
        self.parameters = shard.piece(parameters.vector)
        self._parameters, self._gradient = parameters, gradient
        self.phase = Phase.OUTSIDE
        self.pulled_at = 0
        self.weight = 1.0
        self._earlier = 0.0  # the weight of the steps since the last contribution, without this step
        self._contributed = False  # in this step
        self.samples, self.waited = 0, 0.0
        self._overdue: Ask | None = None  # due in a passed step
        self.lent = False
        self.stop_requested, self.rate, self.progress = False, 0.0, (0, 0)
        self.pause_requested = self.pausing = self.paused = self.pause_cancelled = False
        self.together = self._together = 0  # in the last one, and in that which is asked for
        self.pauses = self._pause = 0  # the number of the last pause that was granted, and that was asked for
        self.keeps_parameters = self.absorbing = self._after_last_round = False
        self.sample: Vector | None = None
        self.epochs = 0
        self._views = 0  # of the centre together with all others
        self._options: Vector | None = None  # last sent
        self._again = False  # joins a rank that has taken over, or joins as a spare
        self._newly = False  # was a spare, and has made no pause yet
        self.story = Story(f"worker rank {rank}, shard {shard.index}")
        self._sequence = 0
        self._look_into: Vector | None = None  # destination of the look under way
        self._looks_by = Kind.PULL
        self._refreshes = False  # the worker continues from the centre it looks at
        self._look_at = 0  # the sequence of the look's request
        self._asked: deque[tuple[Kind, int]] = deque()  # requests without a reply
        self._replies: deque[Received] = deque()  # replies received but not absorbed
        self._opened = 0  # exchanges opened
        self._absorbed = 0  # exchanges whose reply is absorbed
        depth = rule.pipeline + 1 if rule.pipeline else 0
        self._wire = wire.end(serves=False) if wire.packs else None
        self.outgoing_frames = [Frame(self.parameters.size) for _ in range(depth)]
        if self._wire is not None:
            self.outgoing_frames = [Frame(self._wire.room()) for _ in range(rule.pipeline + 1)]
        self._sent_at: list[Vector] = []
        if rule.keeps_progress:
            self._sent_at = [np.empty_like(self.parameters) for _ in range(depth)]

    @property
    def blocked(self) -> bool:
        """Whether the worker must wait for the next reply."""
        return self.phase is Phase.JOINING or self._absorbed < self._opened - self.rule.pipeline

    @property
    def looking(self) -> bool:
        """Whether a look at the centre is still under way."""
        return self._look_into is not None

    @property
    def unanswered(self) -> int:
        """The number of replies still under way."""
        return len(self._asked) + (self._again and self.phase is Phase.JOINING)

    @property
    def gradient(self) -> Vector:
        """This shard's part of the current gradient."""
        return self.shard.piece(self._gradient.vector)

    def ahead(self, start: int) -> Vector | None:
        """Return this shard's part of the gradient if it may leave before the step; None: it may not.

        Args:
            start: the place in the whole gradient behind which all is made.
        """
        sends = self.rule.sends_each_gradient and self._wire is None and not self.outgoing_frames
        if not sends or self.phase is not Phase.TRAINING or start >= self.shard.place.stop:
            return None
        return self.gradient

    def use_gradient(self, gradient: FlatVector) -> None:
        """Take later contributions from `gradient`, which stays unchanged until they are answered."""
        self._gradient, self.lent = gradient, True

    def join(self) -> list[Action]:
        """Ask to join."""
        self._expect(Phase.OUTSIDE, "join")
        self.phase = Phase.JOINING
        return [self._request(Kind.JOIN)]

    def begin_in_place(self, epochs: int, views: int, pauses: int) -> None:
        """Begin where the others are, in the place of a dead worker; call it before `join`.

        Args:
            epochs: those that are finished.
            views: how often this rank has viewed the centre together with all others.
            pauses: the number of the last pause.
        """
        self._expect(Phase.OUTSIDE, "begin in a dead worker's place")
        self.epochs, self._views, self.pauses, self._again = epochs, views, pauses, True
        self._newly = True

    def go_on_without(self, shard: Shard) -> list[Action]:
        """Go on with the rank that has taken over from a dead server; what that one had not answered is lost.

        Args:
            shard: this shard, with the rank that serves it now.
        """
        released = [Release(self.shard.server, event.frame) for event in self._replies]
        self.shard = shard
        self.absorbing = False
        if self.phase not in (Phase.JOINING, Phase.TRAINING):
            return [*released]
        self.keeps_parameters |= self.phase is Phase.TRAINING
        self._asked.clear()
        self._replies.clear()
        self._absorbed, self._sequence = self._opened, 0
        self._again, self.phase = True, Phase.JOINING
        self.story.tell("goes on with rank", shard.server)
        return [*released, self._request(Kind.JOIN)]

    @property
    def due(self) -> Ask | None:
        """The request due in this step, including those of passed steps before it."""
        due = self.rule.due()
        return due if self._overdue is None else self._overdue.joined(due)

    def due_within(self, steps: int) -> bool:
        """Whether one of the next steps exchanges."""
        rule, clock = self.rule, self.rule.clock
        try:
            for rule.clock in range(clock, clock + steps):
                if rule.due() is not None:
                    return True
        finally:
            rule.clock = clock
        return False

    def pass_step(self) -> None:
        """Count a step without making it; its request is sent in the next step that is made."""
        self.rule.count_step()
        self._overdue = self.due
        self.rule.advance()

    def add_weight(self, weight: float) -> None:
        """Add the weight of passed steps to the next contribution."""
        self._earlier += weight

    def begin_step(self) -> None:
        """Begin a step with the gradient that is ready."""
        self.rule.count_step()
        self.rule.observe(self.parameters, self.gradient)

    def end_step(self) -> None:
        """End a step."""
        if not self._contributed:
            self._earlier += self.weight
        self._contributed = False
        self.rule.advance()

    def exchange(self) -> list[Action]:
        """Open the exchange due in this step, if any."""
        self._expect(Phase.TRAINING, "exchange")
        ask, self._overdue = self.due, None
        return self._open(ask)

    def contribute_rest(self) -> list[Action]:
        """Contribute the steps since the last exchange, at an epoch's end, if the rule does so."""
        self._expect(Phase.TRAINING, "contribute")
        self._overdue = None
        actions = self._between(self.rule.rest(self.gradient))
        self.rule.begin_epoch()
        return actions

    def last_round(self) -> list[Action]:
        """Contribute the steps since the last round, at the end of the training."""
        self._expect(Phase.TRAINING, "contribute")
        self._after_last_round = True
        return self._between(Ask.EXCHANGE)

    def _between(self, ask: Ask | None) -> list[Action]:
        """Open an exchange for the steps before it; with no such steps its weight is negligible."""
        weight, self.weight = self.weight, _NOTHING
        actions = self._open(ask)
        self.weight, self._contributed = weight, False
        return actions

    def _open(self, ask: Ask | None) -> list[Action]:
        if ask is None or ask is Ask.OBSERVE:
            return []
        self.rule.asked(ask)
        slot = self._opened % (self.rule.pipeline + 1)
        vector, frame = None, None
        fill: PartWork | None = None
        if ask in (Ask.EXCHANGE, Ask.PUSH):
            gradient = self.gradient
            vector = self.rule.outgoing(self.parameters, gradient)
            self._round += 1
            if self._wire is not None:
                frame = self.outgoing_frames[slot]
                if self.rule.pipeline:  # a reply that has come changes the parameters before this one leaves
                    vector = self._wire.pack(vector, frame.vector)
                else:
                    vector, fill = self._wire.packing(vector, frame.vector)
            elif self.outgoing_frames and not (self.lent and vector is gradient):
                frame = self.outgoing_frames[slot]  # the worker trains on while this frame is sent
                np.copyto(frame.vector, vector)
                vector = frame.vector
            else:
                frame = self._frame_of(vector)
        if self._sent_at:
            np.copyto(self._sent_at[slot], self.parameters)
        self._opened += 1
        self.pause_cancelled = False
        first = (
            [self._request(Kind.SAMPLE, self.sample)]
            if vector is not None and self.sample is not None
            else []
        )
        return [*first, self._request(_ASKS[ask], vector, frame, fill), *self._absorb(self.rule.pipeline)]

    def receive(self, event: Received) -> list[Action]:
        """Take a reply.

        Raises:
            ProtocolError: it does not answer the next open request.
        """
        message = event.message
        self.story.tell("received", message)
        if self.phase is Phase.JOINING and message.sequence == 0:
            resumes = self.keeps_parameters and not self._again
            self._check_reply(message, Kind.ACK if resumes else Kind.CENTER)
            return self._welcome(event)
        if message.kind is Kind.PAUSED and self.pausing:
            self._check_reply(message, Kind.PAUSED)
            self._note(message)
            self.pausing, self.paused, self.pause_cancelled = False, not message.cancelled, message.cancelled
            if self.paused:
                self.pauses, self.together, self._newly = message.pauses, message.pausing, False
            return [Release(self.shard.server, event.frame)]
        asked, sequence = self._asked[0] if self._asked else (None, None)
        if message.sequence != sequence:
            raise self.story.error(
                f"rank {message.sender} replied to sequence {message.sequence}; "
                f"expected a reply to {'no request' if sequence is None else sequence}"
            )
        if self._wire is not None and asked in _NUMBERS and sequence != self._look_at:
            event = self._unpacked(event, self._wire)
            message = event.message
        self._check_reply(message, Kind.ACK if asked is Kind.PUSH else Kind.CENTER)
        self._asked.popleft()
        self._note(message)
        if sequence == self._look_at:
            return self._seen(event)
        if asked is Kind.LOCK:
            return self._granted(event)
        self._replies.append(event.whole() if self.rule.pipeline else event)
        return self._absorb(self.rule.pipeline)

    def refresh(self) -> list[Action]:
        """Ask for the centre once all have finished the epoch, and continue from it."""
        self._refreshes = True
        return self.look(self.parameters, when_all_are_there=True)

    def look(self, into: Vector, *, when_all_are_there: bool = False) -> list[Action]:
        """Ask for a copy of the centre, without absorbing it.

        Args:
            into: the destination.
            when_all_are_there: wait until all workers have finished as many epochs as this one.
        """
        self._expect(Phase.TRAINING, "look at the centre")
        self._look_into, self._looks_by = into, Kind.VIEW if when_all_are_there else Kind.PULL
        return [self._look()]

    def _look(self) -> Send:
        request = self._request(self._looks_by)
        self._look_at = self._sequence
        return request

    def pause(self, first: ShardClient | None = None) -> list[Action]:
        """Ask for a pause of all workers, between two steps; replies under way still arrive.

        Args:
            first: that of the first server, which has granted the pause; None: this is it.
        """
        self._expect(Phase.TRAINING, "pause")
        self.pausing, self.paused = True, False
        self._pause = self.pauses + 1 if first is None else first.pauses
        self._together = 0 if first is None else first.together
        return [self._request(Kind.PAUSE)]

    def options(self, values: Vector) -> list[Action]:
        """Send the server options for this worker's later contributions."""
        self._expect(Phase.TRAINING, "send options")
        self._options = values.copy()
        return [self._request(Kind.OPTIONS, values)]

    def settle(self) -> list[Action]:
        """Absorb the pipeline's received replies now, ahead of their fixed points."""
        return self._absorb(0)

    def finish_epoch(self) -> list[Action]:
        """Report one more finished epoch to the server."""
        self._expect(Phase.TRAINING, "finish an epoch")
        self.pause_cancelled = False
        self.progress = self.progress[0], 0
        self.epochs += 1
        self._round = 0
        return [self._request(Kind.EPOCH)]

    def leave(self) -> list[Action]:
        """Leave the server; all replies must have been absorbed."""
        self._expect(Phase.TRAINING, "leave")
        if self._absorbed < self._opened:
            raise self.story.error(
                f"cannot leave now: {self._opened - self._absorbed} replies are not absorbed"
            )
        self.phase = Phase.LEFT
        request = self._request(Kind.LEAVE)
        spares = [spare for spare in self.shard.spares if spare != self.rank]
        return [request, *(Send(spare, request.message) for spare in spares)]

    def let_go(self) -> list[Action]:
        """Release the replies that are not absorbed, and wait for no other: this rank is a worker no more."""
        released = [Release(self.shard.server, event.frame) for event in self._replies]
        self._asked.clear()
        self._replies.clear()
        self._absorbed, self._look_into, self.phase = self._opened, None, Phase.LEFT
        return [*released]

    def validate(self) -> None:
        """Check every invariant; tests call it after each event."""
        pending = self._opened - self._absorbed
        limit = self.rule.pipeline + 1
        if not 0 <= pending <= limit:
            raise AssertionError(f"broken invariant: {pending} exchanges are open; the limit is {limit}")
        if len(self._asked) + len(self._replies) != pending + (self.looking and not self._again):
            raise AssertionError("broken invariant: each open exchange is either asked or answered")

    def state(self) -> State:
        """Return all that the next step depends on, including open requests and replies."""
        return {
            "rule": self.rule.state(),
            "pipeline": self.rule.pipeline,
            "pulled_at": self.pulled_at,
            "sequence": self._sequence,
            "earlier": self._earlier,
            "progress": list(self.progress),
            "asked": [[kind.name, sequence] for kind, sequence in self._asked],
            "replies": [kept(event.message) for event in self._replies],
            "sent_at": [self._sent_at[slot].copy() for slot in self._open_slots()],
            **({} if self._wire is None else {"wire": self._wire.state()}),
        }

    def check(self, state: object) -> None:
        """Raise if `load` cannot take this state; changes nothing."""
        self._expect(Phase.OUTSIDE, "load a state")
        owner, size = f"worker rank {self.rank}", self.parameters.size
        numbers = {"pulled_at": int, "sequence": int, "earlier": float}
        sent_at = [np.zeros(size, np.float32)]
        lists = {"asked": [list], "progress": [int], "replies": [Mapping], "sent_at": sent_at}
        wire = {} if self._wire is None else {"wire": Mapping}
        require(owner, state, rule=Mapping, pipeline=self.rule.pipeline, **numbers, **lists, **wire)
        assert isinstance(state, Mapping)  # require has seen to it
        self.rule.check(state["rule"])
        if self._wire is not None:
            self._wire.check(state["wire"])
        opened = len(state["asked"]) + len(state["replies"])
        for item in state["replies"]:
            restored(owner, item, size)
        if len(state["sent_at"]) != (opened if self._sent_at else 0) or opened > self.rule.pipeline:
            raise ConfigurationError(
                f"{owner}: the state has {opened} open exchanges, which does not fit a pipeline of "
                f"{self.rule.pipeline}; is it damaged?"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state` of a shard client; `join` afterwards.

        Raises:
            ConfigurationError: it was saved with other options or another model; nothing is changed then.
        """
        self.check(state)
        self.rule.load(state["rule"])
        if self._wire is not None:
            self._wire.load(state["wire"])
        self.pulled_at, self._sequence = state["pulled_at"], state["sequence"]
        self._earlier, self.progress = state["earlier"], (state["progress"][0], state["progress"][1])
        self.keeps_parameters = True
        self._asked.extend((Kind[name], sequence) for name, sequence in state["asked"])
        for item in state["replies"]:
            self._replies.append(restored(f"worker rank {self.rank}", item, self.parameters.size))
        self._opened = len(self._asked) + len(self._replies)
        for slot, vector in zip(self._open_slots(), state["sent_at"], strict=True):
            np.copyto(self._sent_at[slot], vector)

    # -- inside ---------------------------------------------------------------------------------------

    def _check_reply(self, message: Message, expected: Kind) -> None:
        size = None if message.vector is None else message.vector.size
        if message.kind not in REPLIES:
            problem = f"sent {message.kind.name}, which only workers send"
        elif message.sender != self.shard.server:
            problem = f"sent a reply for shard {self.shard.index}, which only rank {self.shard.server} serves"
        elif message.kind is not expected:
            problem = f"sent {message.kind.name}; expected {expected.name}"
        elif size not in (None, self.parameters.size):
            problem = (
                f"sent {size} numbers for {self.parameters.size} parameters; build one model on all ranks"
            )
        else:
            return
        raise self.story.error(f"rank {message.sender} {problem}")

    def _note(self, message: Message) -> None:
        """Take the flags and the rate of a reply."""
        self.stop_requested |= message.stop
        self.rate, self.pause_requested = message.rate, message.pause
        if message.kind is not Kind.PAUSED:
            self.progress = message.progress, message.progress - message.progress_before

    def _welcome(self, event: Received) -> list[Action]:
        self.phase = Phase.TRAINING
        message = event.message
        self._note(message)
        again, self._again = self._again, False
        if message.vector is not None:
            if not (again and self.keeps_parameters and self.rule.keeps_own):
                self.rule.begin(self.parameters, message.vector)
            if self._wire is not None:
                self._wire.begin(message.vector, again=again)
            self.pulled_at = message.clock
        return [Release(self.shard.server, event.frame), *(self._asked_again() if again else ())]

    def _asked_again(self) -> Iterator[Action]:
        """Send the rank that has taken over what the dead server knew."""
        if not self._alone:
            yield self._request(Kind.ROUND)
        if self._options is not None:
            yield self._request(Kind.OPTIONS, self._options)
        if self._look_into is not None:
            yield self._look()
        if self.pausing:
            yield self._request(Kind.PAUSE, again=True)

    def _unpacked(self, event: Received, wire: WireEnd) -> Received:
        """Return a reply with its vector as the rule has made it."""
        message, frame, parts = event
        if message.vector is None:
            return event
        if parts is not None:
            out = frame.vector[: self.parameters.size]
            return Received(message.with_vector(out), frame, partial(self._arriving, event, wire, out))
        try:
            vector = wire.unpack_in_place(message.vector, frame)
        except ValueError as error:
            raise self.story.error(
                f"rank {message.sender} sent a vector that cannot be read: {error}"
            ) from None
        return Received(message.with_vector(vector), frame)

    def _arriving(
        self, event: Received, wire: WireEnd, memory: Vector, into: Vector | None
    ) -> Iterator[Part | None]:
        """Give the parts of a packed reply, unpacked, as they arrive."""
        assert event.message.vector is not None  # _unpacked has seen to it
        try:
            room = wire.memory(event.message.vector.size)
            yield from wire.arriving(event.coming(room), room, memory if into is None else into)
        except ValueError as error:
            raise self.story.error(
                f"rank {event.message.sender} sent a vector that cannot be read: {error}"
            ) from None

    def _seen(self, event: Received) -> list[Action]:
        assert self._look_into is not None  # look has set it
        assert event.message.vector is not None  # the reply to a pull is a CENTER
        np.copyto(self._look_into, event.message.vector)
        self._views += self._looks_by is Kind.VIEW and not self._refreshes
        if self._refreshes:
            self.pulled_at, self._refreshes = event.message.clock, False
        self._look_into, self._look_at = None, 0
        return [Release(self.shard.server, event.frame)]

    def _granted(self, event: Received) -> list[Action]:
        message = event.message
        assert message.vector is not None  # a grant is a CENTER
        self._absorbed += 1
        update = self.rule.commit(self.parameters, message.vector)
        # The commit carries the clock its gradient was taken at; the next gradient includes this commit.
        commit = self._request(Kind.COMMIT, update)
        self.pulled_at = message.clock + 1
        return [commit, Release(self.shard.server, event.frame)]

    def _absorb(self, pipeline: int) -> list[Action]:
        actions: list[Action] = []
        while self._replies and self._absorbed < self._opened - pipeline:
            event = self._replies.popleft()
            message = event.message
            if message.vector is not None:
                if self._sent_at:
                    self._add_progress(message.vector)
                self._take(event, message.vector)
                self.pulled_at = message.clock
            self._absorbed += 1
            actions.append(Release(self.shard.server, event.frame))
        return actions

    def _take(self, event: Received, reply: Vector) -> None:
        self.absorbing = event.parts is not None
        if self.rule.replaces:
            for _ in event.arriving(self.parameters):
                pass
        elif self.rule.absorbs_parts:
            for place, numbers in event.arriving():
                self.rule.incoming(self.parameters[place], numbers)
        else:
            event.whole()
            self.rule.incoming(self.parameters, reply)
        self.absorbing = False

    def _add_progress(self, reply: Vector) -> None:
        """Add the worker's own progress since the request to a late reply.

        The jump from absorbing this reply is not the worker's own progress, so shift the starting points of
        the requests still open by it.
        """
        first, *later = self._open_slots()
        reply -= self._sent_at[first]
        for slot in later:
            self._sent_at[slot] += reply
        reply += self.parameters

    def _open_slots(self) -> list[int]:
        """The slots of exchanges whose replies are not absorbed, oldest first."""
        if not self._sent_at:
            return []
        return [index % (self.rule.pipeline + 1) for index in range(self._absorbed, self._opened)]

    def _frame_of(self, vector: Vector) -> Frame | None:
        """The frame of a whole vector, with room for a header; None for a part or another vector."""
        for flat in (self._gradient, self._parameters):
            if vector is flat.frame.vector:
                return flat.frame
        return None

    def _request(
        self,
        kind: Kind,
        vector: Vector | None = None,
        frame: Frame | None = None,
        fill: PartWork | None = None,
        *,
        again: bool = False,
    ) -> Send:
        joining = kind is Kind.JOIN
        # PAUSE takes no sequence number, so that pauses do not change the saved state.
        self._sequence += not joining and kind is not Kind.PAUSE
        rejoins = joining and self._again
        clocks = {Kind.PAUSE: self._pause, Kind.ROUND: self._round}
        message = Message(
            kind,
            self.rank,
            0 if joining else self._sequence,
            self.epochs if rejoins else clocks.get(kind, self.rule.clock),
            self.pulled_at,
            self._scalar(kind, rejoins=rejoins),
            self.shard.index,
            rejoins or again,
            (joining and (self._after_last_round if rejoins else self.keeps_parameters))
            or (kind is Kind.VIEW and self._refreshes)
            or (kind is Kind.PULL and self.looking),
            self.pauses if rejoins else self.samples,
            vector,
            rejoins and self._newly,
        )
        self.story.tell("sent", message)
        if kind in _ANSWERED:
            self._asked.append((kind, self._sequence))
        return Send(self.shard.server, message, frame, fill)

    def _scalar(self, kind: Kind, *, rejoins: bool) -> float:
        if rejoins:
            return self._views
        others = {Kind.EPOCH: self.waited, Kind.PAUSE: self._together}
        return others[kind] if kind in others else self._share(kind)

    def _share(self, kind: Kind) -> float:
        """Return a message's weight in a mean; a contribution counts all steps since the previous one."""
        if kind not in _CONTRIBUTIONS:
            return self.weight
        share, self._earlier, self._contributed = self._earlier + self.weight, 0.0, True
        return share

    def _expect(self, phase: Phase, what: str) -> None:
        if self.phase is not phase:
            raise self.story.error(f"cannot {what} now: the worker {self.phase.value}")
