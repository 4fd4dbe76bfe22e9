"""Query service on the first server, and the client of every other rank; both pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import State
from nnlo_common.protocol._events import Action, Event, Lost, Received, Release, Send
from nnlo_common.protocol._messages import Kind, Message
from nnlo_common.protocol._query_messages import (
    QUERY_NUMBERS,
    Answer,
    BroadcastAnswer,
    BroadcastQuery,
    EpochMeanQuery,
    GoodbyeQuery,
    LeaveQuery,
    MeanAnswer,
    MeanQuery,
    NoteQuery,
    PauseAnswer,
    PauseQuery,
    PlaceAnswer,
    PlaceQuery,
    Query,
    ReturnQuery,
    read_answer,
    read_query,
    written,
)
from nnlo_common.protocol._returning import Record, Returned, Returns, means_told
from nnlo_common.protocol._waiting_requests import heed, refusal

__all__ = [
    "Answers",
    "Broadcasts",
    "EpochMeans",
    "Handlers",
    "Means",
    "Notes",
    "PausesBetween",
    "Places",
    "QueryClient",
    "QueryHandler",
    "QueryService",
]

#: Ranks and their answers.
Answers: TypeAlias = list[tuple[int, Answer]]
#: For each kind of query, a function that takes a rank and its query and returns the answers now ready.
Handlers: TypeAlias = Mapping[type[Query[Any]], Callable[[int, Any], Answers]]


class QueryHandler(Protocol):
    """Answers some kinds of queries, at once or later, in any order."""

    handlers: Handlers

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Stop waiting for `rank`; return the answers that are now ready."""


class QueryService:
    """Takes queries and sends the answers of its handlers; does no input or output.

    Attributes:
        present: the ranks that may still ask.
        answer: the answer to the server's own last query; None: not ready.
        busy: always False: it takes a query at any time.
        handlers: the handler of each kind of query.

    Args:
        rank: the server's rank.
        shard: the number of the channel.
        members: the ranks that may ask, including the server's own.
        parts: the handlers to add.
    """

    busy = False

    def __init__(self, rank: int, shard: int, members: Iterable[int], parts: Iterable[QueryHandler]) -> None:
        self.rank, self.shard = rank, shard
        self.present = set(members)
        self.answer: Answer | None = None
        self.handlers: dict[type[Query[Any]], Callable[[int, Any], Answers]] = {
            LeaveQuery: self._leave,
            GoodbyeQuery: self._goodbye,
            ReturnQuery: self._return,
        }
        self._returns: Returns | None = None
        self._held: dict[int, Query[Any]] = {}  # until all ranks have told what they have had
        self._parts: list[QueryHandler] = []
        self._taking_part = set(members)
        self._waiting: dict[int, Received] = {}
        self._dropped: dict[int, float] = {}  # after how long a silence
        for part in parts:
            self.add(part)

    def add(self, part: QueryHandler) -> None:
        """Add a handler for more kinds of queries."""
        self._parts.append(part)
        self.handlers.update(part.handlers)

    def handle(self, event: Event) -> list[Action]:
        """Take a query, or the loss of a rank.

        Raises:
            ProtocolError: the message is not a query of a member, or no handler answers it.
        """
        if isinstance(event, Lost):
            released = [Release(event.rank, item.frame) for item in self._forget(event.rank)]
            return [*released, *self.gone(event.rank, lost=True)]
        message = event.message
        if message.sender in self._dropped:
            return [refusal(event, self.rank, self._dropped[message.sender])]
        if message.sender not in self.present or message.kind is not Kind.ASK or message.vector is None:
            raise ProtocolError(
                f"the query service on rank {self.rank} got {message}; expected an ASK from one of the ranks "
                f"{sorted(self.present)}"
            )
        query = read_query(self.handlers, message.vector, f"the query from rank {message.sender}")
        self._waiting[message.sender] = event
        return self._take(message.sender, query)

    def take_over(self, own: ReturnQuery) -> list[Action]:
        """Take over from a dead service: hear from all ranks what they have had before any query is answered.

        Args:
            own: what this rank has had itself.
        """
        self._returns = Returns(self.present)
        return self.tell(self._return(self.rank, own)[1:])

    @property
    def heard(self) -> bool:
        """Whether all ranks have told what they have had, where this service has taken over."""
        return self._returns is None or not self._returns.awaited

    def drop(self, rank: int, after_s: float) -> list[Action]:
        """Treat a rank as dead though it may ask again; return the actions to perform.

        Args:
            rank: the rank.
            after_s: how long it has been silent.
        """
        self._dropped[rank] = after_s
        refused = [refusal(item, self.rank, after_s) for item in self._forget(rank)]
        return [*refused, *self.gone(rank, lost=True)]

    def ask(self, query: Query[Any]) -> list[Action]:
        """Ask on behalf of the server itself; `answer` will hold the answer."""
        self.answer = None
        return self._take(self.rank, query)

    def takes_part(self, rank: int) -> bool:
        """Whether `rank` still takes part in collective queries."""
        return rank in self._taking_part

    def has_asked(self, rank: int) -> bool:
        """Whether `rank` waits for an answer."""
        return rank in self._waiting

    def tell(self, answers: Answers) -> list[Action]:
        """Send answers to their ranks."""
        actions: list[Action] = []
        for rank, answer in answers:
            if rank == self.rank:
                self.answer = answer
                continue
            event = self._waiting.pop(rank)
            vector = written(answer, event.frame.vector)
            reply = Message(Kind.ANSWER, self.rank, event.message.sequence, shard=self.shard, vector=vector)
            actions.append(Send(rank, reply, event.frame))
        return actions

    def gone(self, rank: int, *, lost: bool = False) -> list[Action]:
        """Stop waiting for `rank`; it may still send queries that are answered at once."""
        return self.tell(self._without(rank, lost=lost))

    def _forget(self, rank: int) -> list[Received]:
        """Take no more queries of a lost rank; return the one that it waits for."""
        self.present.discard(rank)
        self._held.pop(rank, None)
        return [self._waiting.pop(rank)] if rank in self._waiting else []

    def _take(self, rank: int, query: Query[Any]) -> list[Action]:
        returns = self._returns
        if returns is not None and returns.awaited and not isinstance(query, ReturnQuery):
            self._held[rank] = query
            return []
        return self.tell(self._answered(rank, query))

    def _answered(self, rank: int, query: Query[Any]) -> Answers:
        missed = None if self._returns is None else self._returns.missed(rank, query)
        return self.handlers[type(query)](rank, query) if missed is None else [(rank, missed)]

    def _return(self, rank: int, told: ReturnQuery) -> Answers:
        if self._returns is None:
            raise ProtocolError(
                f"rank {rank} returns to rank {self.rank}, which has not taken over the query service"
            )
        self._returns.take(rank, told)
        return [(rank, Answer()), *self._go_on()]

    def _go_on(self) -> Answers:
        """Once all ranks have told what they have had, answer the queries that have come meanwhile."""
        if self._returns is None or self._returns.awaited:
            return []
        told, self._returns.told = self._returns.told, {}
        answers: Answers = []
        for rank, one in sorted(told.items()):
            for part in self._parts:
                if isinstance(part, Returned):
                    part.returned(rank, one)
            if one.left:
                answers += self._without(rank)
        held, self._held = self._held, {}
        for rank, query in sorted(held.items()):
            answers += self._answered(rank, query)
        return answers

    def _leave(self, rank: int, query: LeaveQuery | GoodbyeQuery) -> Answers:  # noqa: ARG002 - a handler's
        return [(rank, Answer()), *self._without(rank)]

    def _goodbye(self, rank: int, query: GoodbyeQuery) -> Answers:
        self.present.discard(rank)
        return self._leave(rank, query)

    def _without(self, rank: int, *, lost: bool = False) -> Answers:
        if rank not in self._taking_part:
            return []
        self._taking_part.discard(rank)
        answers = [answer for part in self._parts for answer in part.gone(rank, lost=lost)]
        if self._returns is not None and rank in self._returns.awaited:
            self._held.pop(rank, None)
            self._returns.forget(rank)
            answers += self._go_on()
        return answers


class QueryClient:
    """Asks the query service for one rank, one query at a time.

    Attributes:
        answer: the answer to the last query; None: not ready.
        record: what a service is told that takes over from a dead one.

    Args:
        rank: the rank that asks.
        service: the rank of the query service.
        shard: the number of the channel.
        numbers: the most numbers that a query carries after its JSON.
    """

    def __init__(self, rank: int, service: int, shard: int, numbers: int = 0) -> None:
        self.rank, self.service, self.shard = rank, service, shard
        self.answer: Answer | None = None
        self._expected: type[Answer] | None = None
        self._room: Vector = np.zeros(QUERY_NUMBERS + numbers, np.float32)
        self._sequence = 0
        self._query: Query[Any] = Query()  # the last
        self.record = Record()
        self._returning = 0  # the sequence of the `ReturnQuery` that is not answered; 0: none

    @property
    def busy(self) -> bool:
        """Whether a query is still unanswered."""
        return self._expected is not None

    def ask(self, query: Query[Any]) -> list[Action]:
        """Ask; `answer` will hold the answer."""
        self._query, self.answer, self._expected = query, None, query.answered_by()
        return [] if self._returning else self._send(query)

    def return_to(self, service: int) -> list[Action]:
        """Go on with the rank that has taken over from a dead service; then an open query is asked again."""
        self.service = service
        actions = self._send(self.record.told())
        self._returning = self._sequence
        return actions

    @property
    def returning(self) -> bool:
        """Whether a rank that has taken over has not answered yet."""
        return self._returning > 0

    def told(self) -> ReturnQuery:
        """Return what this rank has had, for a service on this rank itself."""
        return self.record.told()

    @property
    def open(self) -> Query[Any] | None:
        """The query that is not answered."""
        return self._query if self.busy else None

    def drop(self) -> None:
        """Wait no more for the answer to the last query."""
        self._expected = None

    def _send(self, query: Query[Any]) -> list[Action]:
        self._sequence += 1
        vector = written(query, self._room)
        message = Message(Kind.ASK, self.rank, self._sequence, shard=self.shard, vector=vector)
        return [Send(self.service, message)]

    def handle(self, event: Event) -> list[Action]:
        """Take the answer; ignore lost ranks, which the service handles.

        Raises:
            ProtocolError: the message is not the answer to this rank's query.
            DroppedError: the others have dropped this rank.
        """
        if isinstance(event, Lost):
            return []
        message, expected = event.message, self._expected
        heed(message, self.rank)
        if message.kind is Kind.ANSWER and message.sender != self.service:
            return [Release(message.sender, event.frame)]  # the last word of a dead one
        if self._returning and message.kind is Kind.ANSWER and message.sequence == self._returning:
            self._returning = 0
            released = Release(message.sender, event.frame)
            return [released, *(self._send(self._query) if self.busy else ())]
        is_answer = message.kind is Kind.ANSWER and message.sequence == self._sequence
        if not is_answer or message.vector is None or expected is None:
            raise ProtocolError(
                f"rank {self.rank} got {message}; expected the ANSWER to its query {self._sequence}"
            )
        numbers = message.vector.copy()  # the frame goes back to the transport
        self.answer = read_answer(expected, numbers, f"the answer from rank {message.sender}")
        self._expected = None
        self.record.take(self._query, self.answer)
        return [Release(self.service, event.frame)]


# -- collective queries: means over ranks, means over workers, broadcasts from the first server, and notes --


class Means:
    """Weighted means of named numbers over all ranks; the answer waits until every rank has sent its part.

    Parts are added in rank order, so the result is the same to the bit on every run.

    Args:
        members: the ranks that take part.
        kind: the type of query to answer.
    """

    def __init__(self, members: Iterable[int], kind: type[MeanQuery] = MeanQuery) -> None:
        self.handlers: Handlers = {kind: self.ask}
        self._members = set(members)
        self._parts: dict[int, MeanQuery] = {}

    @property
    def waiting(self) -> Mapping[int, MeanQuery]:
        """The parts received so far, by rank."""
        return self._parts

    def ask(self, rank: int, query: MeanQuery) -> Answers:
        """Take one rank's part."""
        for other, part in self._parts.items():
            # A rank without samples may not know the names it would have measured: it sends none.
            here, there = sorted(query.values), sorted(part.values)
            if here and there and here != there:
                raise ConfigurationError(
                    f"rank {rank} asked for the means of {here}, but rank {other} asked for the means of "
                    f"{there}; use the same names on all ranks"
                )
        self._parts[rank] = query
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Wait for `rank` no more; what it brought before it died does not count."""
        self._members.discard(rank)
        if lost:
            self._parts.pop(rank, None)
        return self._ready()

    def _ready(self) -> Answers:
        if not self._parts or not self._members <= self._parts.keys():
            return []
        ranks, answer = sorted(self._parts), _weighted([self._parts[rank] for rank in sorted(self._parts)])
        self._parts = {}
        return [(rank, answer) for rank in ranks]


class EpochMeans:
    """Weighted means of the workers' values at each epoch's end; the answer waits for all workers.

    A worker with fewer epochs announces its end, so the others do not wait for it. Servers and spares have no
    values and the weight 0, and nobody waits for them: a long validation on a server does not delay workers.

    Args:
        workers: the ranks that send values.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.handlers: Handlers = {EpochMeanQuery: self.ask}
        self._expected = set(workers)
        self._parts: dict[int, dict[int, EpochMeanQuery]] = {}
        self._means: dict[int, MeanAnswer] = {}
        self._waiting: dict[int, int] = {}  # the epoch that each rank waits for

    def ask(self, rank: int, query: EpochMeanQuery) -> Answers:
        """Take the part; answer once all workers have sent theirs."""
        if query.epoch is None:
            return [(rank, MeanAnswer(means={}, weight=0)), *self.gone(rank, lost=False)]
        if query.epoch not in self._means:
            # A spare's, too: it may be called to train after it has sent it, and does not send it again.
            self._parts.setdefault(query.epoch, {})[rank] = query
        self._waiting[rank] = query.epoch
        return self._ready()

    def admit(self, rank: int) -> None:
        """Wait from now on for a spare, too, that trains in the place of a dead worker."""
        self._expected.add(rank)

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Wait for `rank` no more; what it brought before it died does not count."""
        self._expected.discard(rank)
        if lost:
            self._waiting.pop(rank, None)
            for parts in self._parts.values():
                parts.pop(rank, None)
        return self._ready()

    def returned(self, rank: int, told: ReturnQuery) -> None:
        """Take up the means that a rank has had."""
        self._means.update(means_told(told))
        if told.ended:
            self._expected.discard(rank)

    def _ready(self) -> Answers:
        for epoch in sorted(set(self._waiting.values()) - self._means.keys()):
            parts = self._parts.get(epoch, {})
            if self._expected <= parts.keys():
                self._means[epoch] = _weighted([parts[rank] for rank in sorted(parts)])
                self._parts.pop(epoch, None)
        ready = [rank for rank, epoch in sorted(self._waiting.items()) if epoch in self._means]
        return [(rank, self._means[self._waiting.pop(rank)]) for rank in ready]


class Broadcasts:
    """Broadcasts from the source to all ranks; the answer waits until every rank has asked.

    Attributes:
        source: the rank that sends the values.

    Args:
        members: the ranks that take part.
        source: the rank that sends the values.
    """

    def __init__(self, members: Iterable[int], source: int) -> None:
        self.handlers: Handlers = {BroadcastQuery: self.ask}
        self._members, self.source = set(members), source
        self._asked: dict[int, BroadcastQuery] = {}

    def ask(self, rank: int, query: BroadcastQuery) -> Answers:
        """Take one rank's query; ignore values from any rank but the source."""
        self._asked[rank] = query
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Wait for `rank` no more."""
        self._members.discard(rank)
        if lost:
            self._asked.pop(rank, None)
        return self._ready()

    def _ready(self) -> Answers:
        if self.source not in self._asked or not self._members <= self._asked.keys():
            return []
        brought, ranks = self._asked[self.source], sorted(self._asked)
        self._asked = {}
        return [(rank, BroadcastAnswer(values=brought.values, numbers=brought.numbers)) for rank in ranks]


class Notes:
    """Weighted means of the named numbers that workers note per epoch; no query waits for another rank."""

    def __init__(self) -> None:
        self.handlers: Handlers = {NoteQuery: self.ask}
        self._notes: dict[int, dict[int, NoteQuery]] = {}  # by rank and epoch

    def ask(self, rank: int, query: NoteQuery) -> Answers:
        """Store the note unless it is empty, and return the means up to that epoch.

        Each worker counts with its last note; notes of later epochs are left out. One that serves by now
        asks with the weight 0, and counts no more.
        """
        if not query.weight:
            self._notes.pop(rank, None)
        if query.values:
            self._notes.setdefault(rank, {})[query.epoch] = query
        else:
            self._forget_before(query.epoch)
        notes = [
            by_epoch[last]
            for by_epoch in self._by_rank()
            if (last := _last(by_epoch, query.epoch)) is not None
        ]
        means = {}
        for name in sorted({name for note in notes for name in note.values}):
            having = [note for note in notes if name in note.values]
            total = sum(note.weight for note in having)
            means[name] = sum(note.weight * note.values[name] for note in having) / total
        return [(rank, MeanAnswer(means=means, weight=sum(note.weight for note in notes)))]

    def gone(self, rank: int, *, lost: bool) -> Answers:
        """Keep the worker's notes; one that has died counts with no epoch after its last."""
        if lost and (known := self._notes.get(rank)):
            after = max(known) + 1
            known[after] = NoteQuery(epoch=after, values={}, weight=0)
        return []

    def state(self) -> State:
        """Return the notes of each rank and epoch."""
        return {
            str(rank): {str(epoch): [dict(note.values), note.weight] for epoch, note in by_epoch.items()}
            for rank, by_epoch in self._notes.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._notes = {
            int(rank): {
                int(epoch): NoteQuery(epoch=int(epoch), values=values, weight=weight)
                for epoch, (values, weight) in by_epoch.items()
            }
            for rank, by_epoch in state.items()
        }

    def _by_rank(self) -> list[dict[int, NoteQuery]]:
        return [self._notes[rank] for rank in sorted(self._notes)]

    def _forget_before(self, epoch: int) -> None:
        """Drop notes that no later query can ask for."""
        for by_epoch in self._by_rank():
            last = _last(by_epoch, epoch)
            for old in [one for one in by_epoch if last is not None and one < last]:
                del by_epoch[old]


class PausesBetween:
    """Tells servers that have taken over from dead ones which pauses between two epochs are over.

    Attributes:
        numbers: that of each of these pauses, in order; 0 where only another rank has known it.

    Args:
        known: how many of them another rank has known.
    """

    def __init__(self, known: int = 0) -> None:
        self.handlers: Handlers = {PauseQuery: self.ask}
        self.numbers = [0] * known
        self._told: dict[int, int] = {}  # by rank: how many it has known, when this service took over

    def returned(self, rank: int, told: ReturnQuery) -> None:
        """Note how many a rank has known."""
        self._told[rank] = told.saves

    def behind(self, known: int) -> bool:
        """Whether a rank had known fewer than `known` when this service took over."""
        return any(one < known for one in self._told.values())

    def ask(self, rank: int, query: PauseQuery) -> Answers:
        """Answer at once."""
        made = query.saves <= len(self.numbers)
        return [(rank, PauseAnswer(number=self.numbers[query.saves - 1] if made else None))]

    def gone(self, rank: int, *, lost: bool) -> Answers:  # noqa: ARG002 - a handler's
        """Do nothing: nobody waits."""
        return []


class Places:
    """Tells spares in whose places they train; an answer waits until the server begins the next epoch, too.

    Attributes:
        told: those that have been told of a place.
        place_of: returns the dead worker in whose place a spare is called, and the epochs after which; None:
            it is not.
        pauses: returns the number of the last pause.

    Args:
        own: the rank of the service, which takes nobody's place.
    """

    def __init__(self, own: int) -> None:
        self.handlers: Handlers = {PlaceQuery: self.ask}
        self.told = set[int]()
        self.place_of: Callable[[int], tuple[int, int] | None] = lambda rank: None
        self.pauses: Callable[[], int] = lambda: 0
        self._own, self._decided, self._waiting = own, 0.0, dict[int, int]()

    def ask(self, rank: int, query: PlaceQuery) -> Answers:
        """Answer once it is decided who trains after these epochs."""
        self._waiting[rank] = query.epochs
        return self._ready()

    def decide(self, epochs: float) -> Answers:
        """Answer what is asked for after these epochs and before: all who are called by then are known."""
        self._decided = max(self._decided, epochs)
        return self._ready()

    def gone(self, rank: int, *, lost: bool) -> Answers:  # noqa: ARG002 - a handler's
        """Answer a rank no more."""
        self._waiting.pop(rank, None)
        return []

    def _ready(self) -> Answers:
        answers: Answers = []
        for rank, epochs in sorted(self._waiting.items()):
            if rank != self._own and epochs > self._decided:
                continue
            called = None if rank == self._own else self.place_of(rank)
            place = called[0] if called is not None and called[1] <= epochs else None
            if place is not None:
                self.told.add(rank)
            answers.append((rank, PlaceAnswer(place=place, pauses=self.pauses())))
        for rank, _ in answers:
            del self._waiting[rank]
        return answers


def _last(by_epoch: Mapping[int, object], epoch: int) -> int | None:
    return max((one for one in by_epoch if one <= epoch), default=None)


def _weighted(parts: Sequence[MeanQuery | EpochMeanQuery]) -> MeanAnswer:
    """Return the means, and the sum of the weights."""
    # A mean over no samples may be NaN, and NaN times its weight of 0 is NaN: skip it.
    counted = [part for part in parts if part.weight]
    weight = sum(part.weight for part in counted)
    names = sorted({name for part in parts for name in part.values})
    sums = {name: sum(part.weight * part.values.get(name, 0.0) for part in counted) for name in names}
    means = {name: total / weight if weight else float("nan") for name, total in sums.items()}
    return MeanAnswer(means=means, weight=weight)
