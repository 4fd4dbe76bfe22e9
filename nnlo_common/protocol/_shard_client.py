"""A worker's side of the protocol with one server, for one shard of the centre: a pure state machine."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnlo_common.algorithms import Ask, WorkerRule
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector, Frame, Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._events import Action, Received, Release, Send, Story
from nnlo_common.protocol._messages import REPLIES, Kind, Message
from nnlo_common.protocol._saved_messages import kept, restored

__all__ = ["ShardClient", "Phase", "Shard"]


class Phase(enum.Enum):
    """How far a worker is with one server."""

    OUTSIDE = "has not joined"
    JOINING = "has asked to join and waits for the centre"
    TRAINING = "is in"
    LEFT = "has left"


@dataclass(frozen=True, slots=True)
class Shard:
    """One piece of the centre: its number, the rank that serves it, its part of the vector."""

    index: int
    server: int
    place: slice

    def piece(self, vector: Vector) -> Vector:
        """Return that part of a vector; all of it is the vector itself, which can travel as it lies."""
        return vector if self.place == slice(0, vector.size) else vector[self.place]


_ASKS = {Ask.EXCHANGE: Kind.EXCHANGE, Ask.PUSH: Kind.PUSH, Ask.PULL: Kind.PULL, Ask.LOCK: Kind.LOCK}
_ANSWERED = frozenset({*_ASKS.values(), Kind.VIEW})
_NOTHING = 2.0**-60  # beside the weight of a step, in float32; a weight has to be above 0
_CONTRIBUTIONS = frozenset({Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT})


class ShardClient:
    """What one worker and one server have said to each other about one shard.

    Replies are absorbed in order and at fixed points: with a pipeline of L, the reply to exchange k when
    exchange k + L has been opened, however early it came. So the numbers never depend on timing.

    Attributes:
        rule: the worker's half of the algorithm for this shard.
        phase: how far it is.
        pulled_at: the centre's commits when its reply was last absorbed.
        weight: the share in a mean that each step has from now on, e.g. its number of samples.
        samples: how many samples it has taken so far.
        lent: the gradient stays as it is until its contribution has been answered.
        stop_requested: the server has asked to finish.
        rate: the learning rate that it has told last; 0: none.
        pause_requested: it has asked, in its latest reply, to pause at the next batch boundary.
        pausing: it has been asked for a pause and has not answered.
        paused: it has answered last that all workers pause.
        put_off: it has called a pause off, so the next may come after the next exchange or epoch.
        outgoing_frames: with a pipeline, what contributions travel from, each in its turn.
    """

    def __init__(
        self, rank: int, shard: Shard, rule: WorkerRule, parameters: FlatVector, gradient: FlatVector
    ) -> None:
        self.rank, self.shard, self.rule = rank, shard, rule
        self.parameters = shard.piece(parameters.vector)
        self._parameters, self._gradient = parameters, gradient
        self.phase = Phase.OUTSIDE
        self.pulled_at = 0
        self.weight = 1.0
        self._earlier = 0.0  # the weight of the steps since the last contribution, but for this one
        self._contributed = False  # in this step
        self.samples = 0
        self._overdue: Ask | None = None  # for the steps that were passed
        self.lent = False
        self.stop_requested, self.rate = False, 0.0
        self.pause_requested = self.pausing = self.paused = self.put_off = False
        self.keeps_parameters = False
        self.story = Story(f"worker rank {rank}, shard {shard.index}")
        self._sequence = 0
        self._look_into: Vector | None = None  # where a look at the centre goes
        self._refreshes = False  # whether the worker goes on from what it sees
        self._look_at = 0  # and the sequence that it was asked with
        self._asked: deque[tuple[Kind, int]] = deque()  # requests whose reply has not come
        self._replies: deque[Received] = deque()  # replies that came and are not absorbed
        self._opened = 0  # exchanges opened
        self._absorbed = 0  # and those whose reply is absorbed
        depth = rule.pipeline + 1 if rule.pipeline else 0
        self.outgoing_frames = [Frame(self.parameters.size) for _ in range(depth)]
        self._sent_at: list[Vector] = []
        if rule.keeps_progress:
            self._sent_at = [np.empty_like(self.parameters) for _ in range(depth)]

    @property
    def blocked(self) -> bool:
        """Whether the worker must not go on before the next reply."""
        return self.phase is Phase.JOINING or self._absorbed < self._opened - self.rule.pipeline

    @property
    def looking(self) -> bool:
        """Whether a look at the centre is still under way."""
        return self._look_into is not None

    @property
    def unanswered(self) -> int:
        """How many replies are still under way."""
        return len(self._asked)

    @property
    def gradient(self) -> Vector:
        """Its part of the gradient, wherever that lies now."""
        return self.shard.piece(self._gradient.vector)

    def use_gradient(self, gradient: FlatVector) -> None:
        """Take contributions from here from now on; they stay as they are until they have been answered."""
        self._gradient, self.lent = gradient, True

    def join(self) -> list[Action]:
        """Ask to be let in."""
        self._expect(Phase.OUTSIDE, "join")
        self.phase = Phase.JOINING
        return [self._request(Kind.JOIN)]

    @property
    def due(self) -> Ask | None:
        """What is to be asked for in this step, for those that were passed before it, too."""
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
        """Count a step; what is due in it will be done in the next step that is made."""
        self.rule.count_step()
        self._overdue = self.due
        self.rule.advance()

    def add_weight(self, weight: float) -> None:
        """Let the next contribution count for more, for steps that were passed."""
        self._earlier += weight

    def begin_step(self) -> None:
        """Begin a step with the gradient that lies ready."""
        self.rule.count_step()
        self.rule.observe(self.parameters, self.gradient)

    def end_step(self) -> None:
        """End a step."""
        if not self._contributed:
            self._earlier += self.weight
        self._contributed = False
        self.rule.advance()

    def exchange(self) -> list[Action]:
        """Open the exchange that is due in this step, if any."""
        self._expect(Phase.TRAINING, "exchange")
        ask, self._overdue = self.due, None
        return self._open(ask)

    def contribute_rest(self) -> list[Action]:
        """At an epoch's end: contribute what was gathered since the last exchange, if the rule does so."""
        self._expect(Phase.TRAINING, "contribute")
        self._overdue = None
        actions = self._between(self.rule.rest(self.gradient))
        self.rule.begin_epoch()
        return actions

    def last_round(self) -> list[Action]:
        """At the end of the training: contribute the steps since the last round."""
        self._expect(Phase.TRAINING, "contribute")
        return self._between(Ask.EXCHANGE)

    def _between(self, ask: Ask | None) -> list[Action]:
        """Open an exchange between two steps, for those before it; without any it counts for nothing."""
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
        if ask in (Ask.EXCHANGE, Ask.PUSH):
            gradient = self.gradient
            vector = self.rule.outgoing(self.parameters, gradient)
            if self.outgoing_frames and not (self.lent and vector is gradient):
                frame = self.outgoing_frames[slot]  # the worker goes on while this one travels
                np.copyto(frame.vector, vector)
                vector = frame.vector
            else:
                frame = self._frame_of(vector)
        if self._sent_at:
            np.copyto(self._sent_at[slot], self.parameters)
        self._opened += 1
        self.put_off = False
        return [self._request(_ASKS[ask], vector, frame), *self._absorb(self.rule.pipeline)]

    def receive(self, event: Received) -> list[Action]:
        """Take a reply.

        Raises:
            ProtocolError: it answers nothing that was asked.
        """
        message = event.message
        self.story.tell("received", message)
        if self.phase is Phase.JOINING and message.sequence == 0:
            self._check_reply(message, Kind.ACK if self.keeps_parameters else Kind.CENTER)
            return self._welcome(event)
        if message.kind is Kind.PAUSED and self.pausing:
            self._check_reply(message, Kind.PAUSED)
            self._note(message)
            self.pausing, self.paused, self.put_off = False, not message.called_off, message.called_off
            return [Release(self.shard.server, event.frame)]
        asked, sequence = self._asked[0] if self._asked else (None, None)
        if message.sequence != sequence:
            raise self.story.error(
                f"rank {message.sender} replied to sequence {message.sequence}; "
                f"the next due is {'none' if sequence is None else sequence}"
            )
        self._check_reply(message, Kind.ACK if asked is Kind.PUSH else Kind.CENTER)
        self._asked.popleft()
        self._note(message)
        if sequence == self._look_at:
            return self._seen(event)
        if asked is Kind.LOCK:
            return self._granted(event)
        self._replies.append(event)
        return self._absorb(self.rule.pipeline)

    def refresh(self) -> list[Action]:
        """Ask for the centre as it is once all have finished the epoch, to go on from it."""
        self._refreshes = True
        return self.look(self.parameters, when_all_are_there=True)

    def look(self, into: Vector, *, when_all_are_there: bool = False) -> list[Action]:
        """Ask for a copy of the centre that is not absorbed.

        Args:
            into: where to.
            when_all_are_there: only once all workers have finished as many epochs as this one.
        """
        self._expect(Phase.TRAINING, "look at the centre")
        self._look_into = into
        request = self._request(Kind.VIEW if when_all_are_there else Kind.PULL)
        self._look_at = self._sequence
        return [request]

    def pause(self) -> list[Action]:
        """Ask for a pause of all, between two steps; whatever is under way still comes."""
        self._expect(Phase.TRAINING, "pause")
        self.pausing, self.paused = True, False
        return [self._request(Kind.PAUSE)]

    def options(self, values: Vector) -> list[Action]:
        """Tell the server what to step this worker's contributions with from now on."""
        self._expect(Phase.TRAINING, "send options")
        return [self._request(Kind.OPTIONS, values)]

    def settle(self) -> list[Action]:
        """Absorb what has come of a pipeline, without waiting for the steps it was meant for."""
        return self._absorb(0)

    def finish_epoch(self) -> list[Action]:
        """Tell the server that one more epoch is done."""
        self._expect(Phase.TRAINING, "finish an epoch")
        self.put_off = False
        return [self._request(Kind.EPOCH)]

    def leave(self) -> list[Action]:
        """Tell the server not to wait any more; all replies must have been absorbed."""
        self._expect(Phase.TRAINING, "leave")
        if self._absorbed < self._opened:
            raise self.story.error(f"left with {self._opened - self._absorbed} replies not absorbed")
        self.phase = Phase.LEFT
        return [self._request(Kind.LEAVE)]

    def validate(self) -> None:
        """Check every invariant; tests call it after each event."""
        pending = self._opened - self._absorbed
        limit = self.rule.pipeline + 1
        if not 0 <= pending <= limit:
            raise AssertionError(f"broken invariant: {pending} open exchanges are at most {limit}")
        if len(self._asked) + len(self._replies) != pending + self.looking:
            raise AssertionError("broken invariant: each open exchange is either asked or answered")

    def state(self) -> State:
        """Return everything the next step depends on, with what is under way."""
        return {
            "rule": self.rule.state(),
            "pipeline": self.rule.pipeline,
            "pulled_at": self.pulled_at,
            "sequence": self._sequence,
            "earlier": self._earlier,
            "asked": [[kind.name, sequence] for kind, sequence in self._asked],
            "replies": [kept(event.message) for event in self._replies],
            "sent_at": [self._sent_at[slot].copy() for slot in self._open_slots()],
        }

    def check(self, state: object) -> None:
        """Refuse a state that `load` could not take, changing nothing."""
        self._expect(Phase.OUTSIDE, "load a state")
        owner, size = f"worker rank {self.rank}", self.parameters.size
        numbers = {"pulled_at": int, "sequence": int, "earlier": float}
        sent_at = [np.zeros(size, np.float32)]
        lists = {"asked": [list], "replies": [Mapping], "sent_at": sent_at}
        require(owner, state, rule=Mapping, pipeline=self.rule.pipeline, **numbers, **lists)
        assert isinstance(state, Mapping)  # require has seen to it
        self.rule.check(state["rule"])
        opened = len(state["asked"]) + len(state["replies"])
        for item in state["replies"]:
            restored(owner, item, size)
        if len(state["sent_at"]) != (opened if self._sent_at else 0) or opened > self.rule.pipeline:
            raise ConfigurationError(f"{owner}: {opened} open exchanges do not fit; is the state damaged?")

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where the shard_client that gave `state` stood, after joining again.

        Raises:
            ConfigurationError: it was saved with other options or another model; nothing was changed then.
        """
        self.check(state)
        self.rule.load(state["rule"])
        self.pulled_at, self._sequence = state["pulled_at"], state["sequence"]
        self._earlier = state["earlier"]
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
            problem = f"sent a reply that only rank {self.shard.server} can give"
        elif message.kind is not expected:
            problem = f"sent {message.kind.name} where {expected.name} was due"
        elif size not in (None, self.parameters.size):
            problem = f"sent {size} numbers for {self.parameters.size} parameters; is its model another one?"
        else:
            return
        raise self.story.error(f"rank {message.sender} {problem}")

    def _note(self, message: Message) -> None:
        """Take what every reply says besides its numbers."""
        self.stop_requested |= message.stop
        self.rate, self.pause_requested = message.rate, message.pause

    def _welcome(self, event: Received) -> list[Action]:
        self.phase = Phase.TRAINING
        message = event.message
        self._note(message)
        if message.vector is not None:
            self.rule.begin(self.parameters, message.vector)
            self.pulled_at = message.clock
        return [Release(self.shard.server, event.frame)]

    def _seen(self, event: Received) -> list[Action]:
        assert self._look_into is not None  # look has set it
        assert event.message.vector is not None  # the reply to a pull is a CENTER
        np.copyto(self._look_into, event.message.vector)
        if self._refreshes:
            self.pulled_at, self._refreshes = event.message.clock, False
        self._look_into, self._look_at = None, 0
        return [Release(self.shard.server, event.frame)]

    def _granted(self, event: Received) -> list[Action]:
        message = event.message
        assert message.vector is not None  # a grant is a CENTER
        self._absorbed += 1
        update = self.rule.commit(self.parameters, message.vector)
        # The commit says at which centre its gradient was taken; the next gradient's holds this commit.
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
                self.rule.incoming(self.parameters, message.vector)
                self.pulled_at = message.clock
            self._absorbed += 1
            actions.append(Release(self.shard.server, event.frame))
        return actions

    def _add_progress(self, reply: Vector) -> None:
        """Add to a late reply what the worker has moved by itself since it sent the request.

        What it moves by absorbing this reply is no progress of its own, so it is taken out of the
        requests that are still open.
        """
        first, *later = self._open_slots()
        reply -= self._sent_at[first]
        for slot in later:
            self._sent_at[slot] += reply
        reply += self.parameters

    def _open_slots(self) -> list[int]:
        """The memory of the exchanges whose replies are not absorbed, oldest first."""
        if not self._sent_at:
            return []
        return [index % (self.rule.pipeline + 1) for index in range(self._absorbed, self._opened)]

    def _frame_of(self, vector: Vector) -> Frame | None:
        """The memory that a whole vector lies in, with room for a header before it."""
        for flat in (self._gradient, self._parameters):
            if vector is flat.frame.vector:
                return flat.frame
        return None

    def _request(self, kind: Kind, vector: Vector | None = None, frame: Frame | None = None) -> Send:
        joining = kind is Kind.JOIN
        # A pause leaves no trace: a training with pauses has the same state as one without.
        self._sequence += not joining and kind is not Kind.PAUSE
        message = Message(
            kind,
            self.rank,
            0 if joining else self._sequence,
            self.rule.clock,
            self.pulled_at,
            self._share(kind),
            self.shard.index,
            False,
            (joining and self.keeps_parameters) or (kind is Kind.VIEW and self._refreshes),
            self.samples,
            vector,
        )
        self.story.tell("sent", message)
        if kind in _ANSWERED:
            self._asked.append((kind, self._sequence))
        return Send(self.shard.server, message, frame)

    def _share(self, kind: Kind) -> float:
        """Return what a message counts for in a mean: a contribution all steps since the one before."""
        if kind not in _CONTRIBUTIONS:
            return self.weight
        share, self._earlier, self._contributed = self._earlier + self.weight, 0.0, True
        return share

    def _expect(self, phase: Phase, what: str) -> None:
        if self.phase is not phase:
            raise self.story.error(f"cannot {what} now: it {self.phase.value}")
