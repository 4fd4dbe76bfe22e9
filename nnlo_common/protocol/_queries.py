"""Queries beside the exchange: a service on the first server, and a client on every other rank.

Questions are few (an epoch's end, a range of samples), so they are JSON, with numbers behind it where there
are many. The query service knows nothing of what it is asked about: that is the affair of its counters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.protocol._events import Action, Lost, Received, Release, Send, Wait
from nnlo_common.protocol._messages import Kind, Message
from nnlo_common.protocol._worker import Activity

__all__ = ["QUERY_NUMBERS", "Answer", "QueryClient", "Counter", "QueryService", "Query"]

#: Room for the JSON of a question or an answer, counted in float32 numbers.
QUERY_NUMBERS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """What `rank` asks: a plain tree, and numbers where there are many."""

    rank: int
    content: Mapping[str, Any]
    numbers: Vector | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What `rank` is told."""

    rank: int
    content: Mapping[str, Any]
    numbers: Vector | None = None


class Counter(Protocol):
    """One kind of question; it answers at once or later, in any order."""

    def ask(self, question: Query) -> list[Answer]:
        """Take a question and return the answers that can be given now."""

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:
        """Expect no more questions of `rank`; return the answers that this makes possible."""


class QueryService:
    """Takes questions and hands out the answers of its counters; does no input or output.

    Attributes:
        present: the ranks that may still ask.
        own: the answer to the server's own question.

    Args:
        rank: the server's.
        shard: the number of the channel.
        members: the ranks that may ask; the server's own too.
        counters: by what a question asks for.
    """

    def __init__(
        self, rank: int, shard: int, members: Iterable[int], counters: Mapping[str, Counter]
    ) -> None:
        self.rank, self.shard, self.counters = rank, shard, counters
        self.present = set(members)
        self._taking_part = set(members)
        self.own: Answer | None = None
        self._waiting: dict[int, Received] = {}

    def handle(self, event: Received | Lost) -> list[Action]:
        """Take a question, or the news that somebody is dead."""
        if isinstance(event, Lost):
            waiting = self._waiting.pop(event.rank, None)
            released = [] if waiting is None else [Release(event.rank, waiting.frame)]
            self.present.discard(event.rank)
            return [*released, *self.gone(event.rank, lost=True)]
        message = event.message
        if message.sender not in self.present or message.kind is not Kind.ASK or message.vector is None:
            raise ProtocolError(
                f"the query service on rank {self.rank} got {message}; expected a query of a member"
            )
        content, numbers = unpacked(message.vector)
        self._waiting[message.sender] = event
        return self._ask(Query(message.sender, content, numbers))

    def has_asked(self, rank: int) -> bool:
        """Whether `rank` waits for an answer."""
        return rank in self._waiting

    def ask_here(self, content: Mapping[str, Any], numbers: Vector | None = None) -> list[Action]:
        """Ask a question of the server's own; the answer will lie in `own`."""
        self.own = None
        return self._ask(Query(self.rank, content, numbers))

    def tell(self, answers: Iterable[Answer]) -> list[Action]:
        """Hand out answers that have become possible otherwise than by a question."""
        return self._sent(answers)

    def gone(self, rank: int, *, lost: bool = False) -> list[Action]:
        """Wait for `rank` no more; it may still ask what is answered at once."""
        if rank not in self._taking_part:
            return []
        self._taking_part.discard(rank)
        answers = [answer for counter in self.counters.values() for answer in counter.gone(rank, lost=lost)]
        return self._sent(answers)

    def _ask(self, question: Query) -> list[Action]:
        if question.content["ask"] in ("leave", "goodbye"):
            if question.content["ask"] == "goodbye":
                self.present.discard(question.rank)
            return [*self._sent([Answer(question.rank, {})]), *self.gone(question.rank)]
        return self._sent(self.counters[question.content["ask"]].ask(question))

    def _sent(self, answers: Iterable[Answer]) -> list[Action]:
        actions: list[Action] = []
        for answer in answers:
            if answer.rank == self.rank:
                self.own = answer
                continue
            event = self._waiting.pop(answer.rank)
            vector = packed(answer.content, answer.numbers, event.frame.vector)
            reply = Message(Kind.ANSWER, self.rank, event.message.sequence, shard=self.shard, vector=vector)
            actions.append(Send(answer.rank, reply, event.frame))
        return actions


class QueryClient:
    """Asks the query service for one rank, one question at a time.

    Args:
        rank: who asks.
        queries: the rank of the query service.
        shard: the number of the channel.
        numbers: how many numbers the largest question holds beside its content.
    """

    def __init__(self, rank: int, queries: int, shard: int, numbers: int = 0) -> None:
        self.rank, self.queries, self.shard = rank, queries, shard
        self.answer: tuple[Mapping[str, Any], Vector] | None = None
        self._room: Vector = np.zeros(QUERY_NUMBERS + numbers, np.float32)
        self._sequence = 0

    def ask(self, content: Mapping[str, Any], numbers: Vector | None = None) -> Activity:
        """Ask, and wait until `answer` has come."""
        self.answer = None
        self._sequence += 1
        vector = packed(content, numbers, self._room)
        question = Message(Kind.ASK, self.rank, self._sequence, shard=self.shard, vector=vector)
        yield Send(self.queries, question)
        while self.answer is None:
            yield Wait()

    def receive(self, event: Received) -> list[Action]:
        """Take the answer."""
        message = event.message
        if message.kind is not Kind.ANSWER or message.sequence != self._sequence or message.vector is None:
            raise ProtocolError(f"rank {self.rank} got {message} as the answer to its query {self._sequence}")
        content, numbers = unpacked(message.vector)
        self.answer = content, numbers.copy()
        return [Release(self.queries, event.frame)]


def packed(content: Mapping[str, Any], numbers: Vector | None, room: Vector) -> Vector:
    """Write the content's JSON and the numbers into `room`; return the part that is used."""
    text = json.dumps(content, separators=(",", ":")).encode()
    start = 1 + -(-len(text) // 4)
    if start > QUERY_NUMBERS:
        raise ConfigurationError(
            f"{content.get('ask', 'an answer')!r}: {len(text)} bytes do not fit into one question of "
            f"{4 * QUERY_NUMBERS}; give fewer or shorter names"
        )
    room[:1].view(np.uint32)[0] = len(text)
    room[1:start].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    stop = start if numbers is None else start + numbers.size
    if numbers is not None:
        np.copyto(room[start:stop], numbers)
    return room[:stop]


def unpacked(vector: Vector) -> tuple[dict[str, Any], Vector]:
    """Read what `packed` wrote; the numbers are a view."""
    length = int(vector[:1].view(np.uint32)[0])
    start = 1 + -(-length // 4)
    content: dict[str, Any] = json.loads(vector[1:start].view(np.uint8)[:length].tobytes())
    return content, vector[start:]
