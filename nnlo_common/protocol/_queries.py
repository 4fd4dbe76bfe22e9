"""Query service on the first server, and the client of every other rank; both pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from nnlo_common.base._errors import ProtocolError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.protocol._dropping import heed, refusal
from nnlo_common.protocol._events import Action, Event, Lost, Received, Release, Send
from nnlo_common.protocol._messages import Kind, Message
from nnlo_common.protocol._query_messages import Answer, GoodbyeQuery, LeaveQuery, Query
from nnlo_common.protocol._query_wire import QUERY_NUMBERS, read_answer, read_query, written

__all__ = ["Answers", "Handlers", "QueryClient", "QueryHandler", "QueryService"]

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
        }
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
        return [self._waiting.pop(rank)] if rank in self._waiting else []

    def _take(self, rank: int, query: Query[Any]) -> list[Action]:
        return self.tell(self.handlers[type(query)](rank, query))

    def _leave(self, rank: int, query: LeaveQuery | GoodbyeQuery) -> Answers:  # noqa: ARG002 - a handler's
        return [(rank, Answer()), *self._without(rank)]

    def _goodbye(self, rank: int, query: GoodbyeQuery) -> Answers:
        self.present.discard(rank)
        return self._leave(rank, query)

    def _without(self, rank: int, *, lost: bool = False) -> Answers:
        if rank not in self._taking_part:
            return []
        self._taking_part.discard(rank)
        return [answer for part in self._parts for answer in part.gone(rank, lost=lost)]


class QueryClient:
    """Asks the query service for one rank, one query at a time.

    Attributes:
        answer: the answer to the last query; None: not ready.

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

    @property
    def busy(self) -> bool:
        """Whether a query is still unanswered."""
        return self._expected is not None

    def ask(self, query: Query[Any]) -> list[Action]:
        """Ask; `answer` will hold the answer."""
        vector = written(query, self._room)
        self.answer, self._expected = None, query.answered_by()
        self._sequence += 1
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
        is_answer = message.kind is Kind.ANSWER and message.sequence == self._sequence
        if not is_answer or message.vector is None or expected is None:
            raise ProtocolError(
                f"rank {self.rank} got {message}; expected the ANSWER to its query {self._sequence}"
            )
        numbers = message.vector.copy()  # the frame goes back to the transport
        self.answer = read_answer(expected, numbers, f"the answer from rank {message.sender}")
        self._expected = None
        return [Release(self.service, event.frame)]
