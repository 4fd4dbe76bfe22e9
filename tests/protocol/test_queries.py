"""The query service: queries on the wire, its counters, and leases of data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError, Frame, ProtocolError
from nnlo_common.data import Lease
from nnlo_common.protocol import (
    QUERY_NUMBERS,
    Action,
    Answers,
    Averages,
    Broadcasts,
    EpochMeans,
    Kind,
    Leasing,
    Lost,
    Means,
    Message,
    Notes,
    QueryClient,
    QueryService,
    Received,
    Release,
    Send,
    decode,
    encode,
)
from nnlo_common.protocol import _query_messages as query_messages
from nnlo_common.protocol._query_messages import (
    Answer,
    AverageAnswer,
    AverageQuery,
    BroadcastQuery,
    EpochMeanQuery,
    GiveBackQuery,
    GoodbyeQuery,
    HeldLeasesAnswer,
    HeldLeasesQuery,
    LeaseAnswer,
    LeaseQuery,
    LeaveQuery,
    LedgerQuery,
    LoadLedgerQuery,
    MeanAnswer,
    MeanQuery,
    NoteQuery,
    PartQuery,
    Query,
    ReadLedgerQuery,
    SampledData,
    packed,
    read_answer,
    read_query,
    unpacked,
    written,
)

F4 = np.float32
exactly = settings(max_examples=60)


# --- on the wire -----------------------------------------------------------------------------------------

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
BITS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def bits(vector: np.ndarray) -> list[int]:
    return vector.view(np.uint32).tolist()


@pytest.mark.slow
@exactly
@given(st.dictionaries(st.text(max_size=8), TREES, max_size=4), BITS)
def test_a_question_survives_the_wire(content: dict[str, Any], numbers: list[int]) -> None:
    """Any names and numbers, NaN and infinity among them; and the numbers bit for bit."""
    room = np.full(QUERY_NUMBERS + len(numbers), 77, F4)
    sent = packed(content, np.array(numbers, np.uint32).view(F4), room)
    assert np.shares_memory(sent, room)
    found, behind = unpacked(sent.copy())
    assert repr(found) == repr(content)  # NaN is not equal to itself
    assert bits(behind) == numbers


@pytest.mark.parametrize("name", ["", "é", "Genauigkeit 🎯", "a\0b", '"\\', "損失", "\ud800"])
def test_any_name_can_be_measured(name: str) -> None:
    content = {"values": {name: 0.1, "nan": math.nan, "huge": math.inf, "small": -math.inf}}
    found, numbers = unpacked(packed(content, None, np.zeros(QUERY_NUMBERS, F4)))
    assert repr(found) == repr(content)
    assert numbers.size == 0


def test_a_question_has_its_limit_and_the_numbers_do_not_count() -> None:
    room, most = np.zeros(QUERY_NUMBERS + 3, F4), 4 * (QUERY_NUMBERS - 1)
    frame = len('{"kind":""}')
    content = {"kind": "x" * (most - frame)}
    found, numbers = unpacked(packed(content, np.arange(3, dtype=F4), room))
    assert (found, numbers.tolist()) == (content, [0, 1, 2])
    with pytest.raises(
        ConfigurationError, match=f"{most + 1} bytes of JSON are more than .*fewer or shorter names"
    ):
        packed({"kind": "x" * (most - frame + 1)}, None, room)


def test_a_question_that_is_too_large_names_what_was_asked() -> None:
    queries = QueryClient(1, service=0, shard=1)
    values = {f"the accuracy of class {number}": 0.5 for number in range(1000)}
    with pytest.raises(ConfigurationError, match=r"'MeanQuery': .* bytes of JSON are more than"):
        queries.ask(MeanQuery(values=values, weight=1))


KINDS = [
    kind
    for name in query_messages.__all__
    if isinstance(kind := getattr(query_messages, name), type)
    and issubclass(kind, Query | Answer)
    and kind not in (Query, LedgerQuery)
]
VALUES = st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)
FIELDS = {
    "int": st.integers(-(2**53), 2**53),
    "float": st.floats(allow_nan=False) | st.integers(0, 2**53),
    "str": st.text(max_size=9),
    "bool": st.booleans(),
    "int | None": st.none() | st.integers(),
    "Lease | None": st.none() | st.builds(Lease, *[st.integers(0, 99)] * 3),
    "tuple[Lease, ...]": st.lists(st.builds(Lease, *[st.integers(0, 99)] * 3), max_size=3).map(tuple),
    "Mapping[str, float]": VALUES,
    "Mapping[str, Any]": VALUES,
    "Mapping[str, Any] | None": st.none() | VALUES,
    "SampledData": st.builds(SampledData, st.text(max_size=5), *[st.integers()] * 2, st.text(max_size=5)),
    "Vector": st.lists(st.floats(width=32), max_size=9).map(lambda numbers: np.array(numbers, F4)),
}


def read(kind: Any, vector: np.ndarray, whose: str = "the query from rank 3") -> Any:
    return read_answer(kind, vector, whose) if issubclass(kind, Answer) else read_query([kind], vector, whose)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_query_and_answer_survives_the_wire(kind: Any) -> None:
    @exactly
    @given(st.builds(kind, **{one.name: FIELDS[one.type] for one in fields(kind)}))
    def survives(sent: Any) -> None:
        came = read(kind, written(sent, np.zeros(QUERY_NUMBERS + 9, F4)).copy())
        assert came == sent
        assert type(came) is kind
        if "numbers" in kind.__slots__:
            assert bits(came.numbers) == bits(sent.numbers)

    survives()


PART: dict[str, Any] = {
    "kind": "PartQuery",
    "number": 1,
    "file": "a",
    "size": 2,
    "blake2b": "b",
    "trouble": "",
}
LEASE = {"kind": "LeaseQuery", "data": ["training", 8, 1, "seed", False], "epoch": 0, "unused": 0}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {**PART, "kind": "parts"},
            r"the query from rank 3 is of kind 'parts'; expected one of \['LeaseQuery', 'PartQuery'\]",
        ),
        ({}, "is of kind None; expected one of"),
        ([1], "is of kind None; expected one of"),
        ({**PART, "kind": ["PartQuery"]}, r"is of kind \['PartQuery'\]; expected one of"),
        (
            {"kind": "PartQuery", "number": 1},
            r"'PartQuery', has the fields \['number'\]; expected \['blake2b', 'file',",
        ),
        ({**PART, "more": 1}, r"'PartQuery', has the fields .*'more'.*; expected \['blake2b'"),
        ({**PART, "number": "1"}, "'PartQuery', has number='1'; expected int"),
        ({**PART, "number": True}, "'PartQuery', has number=True; expected int"),
        ({**PART, "number": 1.0}, "'PartQuery', has number=1.0; expected int"),
        ({**PART, "file": None}, "'PartQuery', has file=None; expected str"),
        ({**LEASE, "data": ["training", 8, 1]}, "'LeaseQuery', has data=.*; expected SampledData"),
        ({**LEASE, "data": ["training", 8, 1, 7]}, "'LeaseQuery', has data=.*; expected SampledData"),
        ({**LEASE, "epoch": None}, "'LeaseQuery', has epoch=None; expected int"),
    ],
    ids=str,
)
def test_a_query_that_is_not_of_its_kind_is_refused_and_it_is_said_why(content: Any, problem: str) -> None:
    vector = packed(content, None, np.zeros(QUERY_NUMBERS, F4)) if isinstance(content, dict) else None
    if vector is None:
        text = np.frombuffer(b"[1] ", np.uint8)
        vector = np.concatenate([np.array([3], np.uint32).view(F4), text.view(F4)])
    with pytest.raises(ProtocolError, match=problem):
        read_query([PartQuery, LeaseQuery], vector, "the query from rank 3")


def test_numbers_behind_a_query_that_has_none_are_refused() -> None:
    vector = packed(PART, np.ones(2, F4), np.zeros(QUERY_NUMBERS, F4))
    with pytest.raises(ProtocolError, match="'PartQuery', has 2 numbers after its JSON; expected none"):
        read_query([PartQuery], vector, "the query from rank 3")


@pytest.mark.parametrize("vector", [[], [7], [1, 2**31 - 1], [2, 0x7B7B7B7B]], ids=str)
def test_what_is_no_json_is_refused(vector: list[int]) -> None:
    with pytest.raises(ProtocolError, match="the query from rank 3 is malformed"):
        read_query([PartQuery], np.array(vector, np.uint32).view(F4), "the query from rank 3")


def test_a_service_refuses_a_query_that_nobody_answers_there() -> None:
    client, room = QueryClient(1, service=0, shard=2), Room(Echo())
    (send,) = client.ask(LeaveQuery())
    assert room.queries.handle(room.carry(send.message))
    (send,) = client.ask(PartQuery(number=1))
    with pytest.raises(
        ProtocolError, match=r"the query from rank 1 is of kind 'PartQuery'; expected one of \['EchoQuery'"
    ):
        room.queries.handle(room.carry(send.message))


# --- a query service and its clients ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoAnswer(Answer):
    """For whom it is."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoQuery(Query[EchoAnswer]):
    """Whatever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEchoQuery(EchoQuery):
    """Another."""


class Echo:
    """A handler that answers when it is told to."""

    def __init__(self, kind: type[Query[Any]] = EchoQuery) -> None:
        self.handlers = {kind: self.ask}
        self.asked: list[int] = []
        self.left: list[tuple[int, bool]] = []
        self.ready: list[int] = []

    def ask(self, rank: int, query: Query[Any]) -> Answers:
        self.asked.append(rank)
        return [(one, EchoAnswer(rank=one)) for one in self.ready]

    def gone(self, rank: int, *, lost: bool) -> Answers:
        self.left.append((rank, lost))
        return []


class Room:
    """A query service on rank 0, a client on every other rank; messages are carried as a transport does."""

    def __init__(self, *parts: Any, members: int = 4, numbers: int = 0) -> None:
        self.numbers = numbers
        self.queries = QueryService(0, 2, range(members), parts)
        self.clients = {rank: QueryClient(rank, 0, 2, numbers) for rank in range(1, members)}
        self.answered: list[int] = []

    def carry(self, message: Message) -> Received:
        frame = Frame(QUERY_NUMBERS + self.numbers)
        if message.vector is not None:
            frame.vector[: message.vector.size] = message.vector
        return Received(decode(frame, encode(message, frame)), frame)

    def ask(self, rank: int, query: Query[Any]) -> None:
        if rank == 0:
            self.perform(self.queries.ask(query))
            return
        (send,) = self.clients[rank].ask(query)
        assert isinstance(send, Send)
        assert self.clients[rank].busy
        self.perform(self.queries.handle(self.carry(send.message)))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.frame is not None  # the query's own carries the answer
                (release,) = self.clients[action.rank].handle(self.carry(action.message))
                assert isinstance(release, Release)
                assert not self.clients[action.rank].busy
                self.answered.append(action.rank)

    def lose(self, rank: int) -> list[Action]:
        actions = self.queries.handle(Lost(rank))
        self.perform(actions)
        return actions

    def answer(self, rank: int) -> Any:
        answer = self.queries.answer if rank == 0 else self.clients[rank].answer
        assert answer is not None
        return answer


def test_a_question_is_answered_when_its_handler_knows() -> None:
    echo = Echo()
    room = Room(echo)
    for rank in (3, 0, 1):
        room.ask(rank, EchoQuery())
        assert room.queries.answer is None
        assert room.answered == []
    echo.ready = [0, 3, 2, 1]
    room.ask(2, EchoQuery())
    assert room.answered == [3, 2, 1]
    assert [room.answer(rank) for rank in range(4)] == [EchoAnswer(rank=rank) for rank in range(4)]
    assert echo.asked == [3, 0, 1, 2]


def test_an_answer_may_hold_more_numbers_than_its_question() -> None:
    room = Room(Averages(np.arange(5, dtype=F4)), numbers=5)
    room.ask(1, AverageQuery(views=0))
    assert room.answer(1).numbers.tolist() == [0, 1, 2, 3, 4]


def test_an_answer_is_a_copy_of_its_message() -> None:
    queries = QueryClient(1, service=0, shard=2, numbers=2)
    (sent,) = queries.ask(AverageQuery(views=0))
    frame = Frame(QUERY_NUMBERS + 2)
    vector = written(AverageAnswer(numbers=np.ones(2, F4)), frame.vector)
    queries.handle(Received(Message(Kind.ANSWER, 0, sent.message.sequence, shard=2, vector=vector), frame))
    frame.vector[:] = 7
    assert queries.answer.numbers.tolist() == [1, 1]


@pytest.mark.parametrize("end", [LeaveQuery(), GoodbyeQuery(), "lost"], ids=str)
def test_whoever_goes_is_told_to_every_handler_once(end: Any) -> None:
    first, second = Echo(), Echo(OtherEchoQuery)
    room = Room(first, second)
    if end == "lost":
        room.lose(2)
    else:
        room.ask(2, end)
        assert room.answer(2) == Answer()
    assert first.left == second.left == [(2, end == "lost")]
    room.lose(2)  # it may die all the same
    assert room.queries.gone(2) == []
    assert first.left == [(2, end == "lost")]
    assert room.queries.present == {0, 1, 3}


def test_who_has_left_may_still_ask_but_not_after_its_goodbye() -> None:
    room = Room(Averages(np.zeros(0, F4)))
    room.ask(1, LeaveQuery())
    room.ask(1, AverageQuery(views=0))
    assert room.answer(1) == AverageAnswer()
    room.ask(1, GoodbyeQuery())
    assert room.queries.present == {0, 2, 3}
    with pytest.raises(ProtocolError, match="expected an ASK from one of the ranks"):
        room.ask(1, AverageQuery(views=0))


def test_the_frame_of_one_who_died_waiting_is_given_back() -> None:
    room = Room(Echo())
    room.ask(1, EchoQuery())
    (release,) = room.lose(1)
    assert isinstance(release, Release)
    assert release.rank == 1


QUESTION = Message(Kind.ASK, 1, 1, shard=2, vector=written(EchoQuery(), np.zeros(QUERY_NUMBERS, F4)))


@pytest.mark.parametrize(
    "wrong",
    [
        QUESTION._replace(sender=4),
        QUESTION._replace(kind=Kind.ANSWER),
        QUESTION._replace(kind=Kind.PULL, vector=None),
        QUESTION._replace(vector=None),
    ],
    ids=str,
)
def test_a_service_refuses_what_is_no_question_of_a_member(wrong: Message) -> None:
    echo = Echo()
    queries = QueryService(0, 2, range(4), [echo])
    with pytest.raises(ProtocolError, match="the query service on rank 0 got"):
        queries.handle(Received(wrong, Frame(QUERY_NUMBERS)))
    assert echo.asked == []


@pytest.mark.parametrize(
    "changes", [{"kind": Kind.CENTER}, {"sequence": 0}, {"sequence": 2}, {"vector": None}], ids=str
)
def test_a_client_refuses_what_is_no_answer_to_its_question(changes: dict[str, Any]) -> None:
    queries = QueryClient(1, service=0, shard=2)
    queries.ask(EchoQuery())
    vector = written(EchoAnswer(rank=1), np.zeros(QUERY_NUMBERS, F4))
    answer = Message(Kind.ANSWER, 0, 1, shard=2, vector=vector)._replace(**changes)
    with pytest.raises(ProtocolError, match="expected the ANSWER to its query 1"):
        queries.handle(Received(answer, Frame(QUERY_NUMBERS)))
    assert queries.answer is None


# --- means -----------------------------------------------------------------------------------------------


def part(values: Mapping[str, float], weight: float = 1) -> MeanQuery:
    return MeanQuery(values=dict(values), weight=weight)


def means_of(parts: Mapping[int, MeanQuery], order: Any = None) -> Answers:
    """What all are told in the end; nobody is told anything before."""
    means, answers = Means(parts), []
    for rank in parts if order is None else order:
        assert answers == []
        answers = means.ask(rank, parts[rank])
    return answers


def test_a_mean_waits_for_all_and_answers_in_the_order_of_the_ranks() -> None:
    parts = {0: part({"loss": 1.0}), 1: part({"loss": 2.0}), 2: part({"loss": 6.0})}
    for order in itertools.permutations(parts):
        answers = means_of(parts, order)
        assert [rank for rank, _ in answers] == [0, 1, 2]
        assert all(answer == MeanAnswer(means={"loss": 3.0}, weight=3) for _, answer in answers)


@exactly
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 1000)), min_size=1, max_size=6), st.randoms())
def test_a_mean_is_weighted_and_does_not_depend_on_the_order_of_arrival(
    given_parts: list[tuple[float, int]], draw: Any
) -> None:
    parts = {rank: part({"x": value}, weight) for rank, (value, weight) in enumerate(given_parts)}
    order = draw.sample(sorted(parts), len(parts))
    ((_, first), *_), ((_, again), *_) = means_of(parts), means_of(parts, order)
    total = sum(weight for _, weight in given_parts)
    assert first.weight == again.weight == total
    if not total:
        assert math.isnan(first.means["x"])
        return
    assert first.means == again.means
    exact = math.fsum(value * weight for value, weight in given_parts) / total
    assert first.means["x"] == pytest.approx(exact, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_without_samples_need_not_know_the_names(silent: int) -> None:
    parts = {rank: part({"b": 4.0, "a": float(rank)}, 2) for rank in range(3) if rank != silent}
    answers = means_of({**parts, silent: part({}, 0)})
    assert [rank for rank, _ in answers] == [0, 1, 2]
    measured = [rank for rank in range(3) if rank != silent]
    assert answers[0][1] == MeanAnswer(means={"a": sum(measured) / 2, "b": 4.0}, weight=4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_rank_without_samples_measured_does_not_count(value: float) -> None:
    """A mean of no samples is often NaN."""
    answers = means_of({0: part({"loss": value}, 0), 1: part({"loss": 0.5}, 10)})
    assert answers[1][1] == MeanAnswer(means={"loss": 0.5}, weight=10)


def test_where_nobody_has_samples_a_mean_is_nan() -> None:
    ((_, answer), _) = means_of({0: part({"loss": 1.0}, 0), 1: part({}, 0)})
    assert math.isnan(answer.means["loss"])
    assert means_of({0: part({}, 0)})[0][1] == MeanAnswer(means={}, weight=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_loss_shows_in_the_mean(value: float) -> None:
    ((_, answer), _) = means_of({0: part({"loss": value}), 1: part({"loss": 0.5})})
    assert not math.isfinite(answer.means["loss"])


def test_different_names_are_refused_and_both_are_told() -> None:
    means = Means([0, 1])
    means.ask(0, part({"loss": 1.0}))
    with pytest.raises(
        ConfigurationError, match=r"rank 1 asked .*\['acc'\], but rank 0 asked for the means of \['loss"
    ):
        means.ask(1, part({"acc": 1.0}))


def test_one_mean_does_not_leak_into_the_next() -> None:
    means = Means([0, 1])
    for turn in range(3):
        means.ask(1, part({f"turn {turn}": 1.0}))
        ((_, answer), _) = means.ask(0, part({f"turn {turn}": 3.0}))
        assert answer.means == {f"turn {turn}": 2.0}


@pytest.mark.parametrize("lost", [False, True])
def test_nobody_waits_for_whoever_has_gone(lost: bool) -> None:
    means = Means([0, 1, 2])
    means.ask(0, part({"loss": 1.0}))
    means.ask(1, part({"loss": 3.0}))
    first, second = means.gone(2, lost=lost)
    assert [first[0], second[0]] == [0, 1]
    assert first[1].means == {"loss": 2.0}
    assert means.gone(1, lost=lost) == []  # nobody waits
    ((_, alone),) = means.ask(0, part({"loss": 5.0}))
    assert alone.means == {"loss": 5.0}


def test_what_the_dead_have_brought_does_not_count() -> None:
    room = Room(Means(range(4)))
    for rank, loss in ((1, 100.0), (2, 3.0), (3, 5.0)):
        room.ask(rank, part({"loss": loss}))
    room.lose(1)
    assert room.answered == []
    room.ask(0, part({}, 0))
    assert room.answered == [2, 3]
    assert room.answer(0) == room.answer(3) == MeanAnswer(means={"loss": 4.0}, weight=2)


@pytest.mark.parametrize("end", [LeaveQuery(), GoodbyeQuery()], ids=str)
def test_a_mean_is_given_out_when_the_last_one_missing_goes(end: Query[Any]) -> None:
    room = Room(Means(range(4)))
    for rank in (0, 1, 2):
        room.ask(rank, part({"loss": float(rank)}))
    room.ask(3, end)
    assert room.answered == [3, 1, 2]
    assert room.answer(0).means == {"loss": 1.0}


# --- means of epochs -------------------------------------------------------------------------------------


def of_epoch(epoch: int | None, loss: float | None = None, weight: float = 1) -> EpochMeanQuery:
    return EpochMeanQuery(epoch=epoch, values={} if loss is None else {"loss": loss}, weight=weight)


def told(answers: Answers) -> dict[int, float | None]:
    """Who is told what the mean loss is."""
    return {rank: answer.means.get("loss") for rank, answer in answers}


def test_workers_wait_for_each_other_but_not_for_a_server() -> None:
    means = EpochMeans([1, 2])
    assert means.ask(1, of_epoch(0, 1.0, weight=1)) == []
    assert told(means.ask(2, of_epoch(0, 5.0, weight=3))) == {1: 4.0, 2: 4.0}
    assert means.ask(1, of_epoch(1, 2.0)) == []
    assert told(means.ask(0, of_epoch(0, weight=0))) == {0: 4.0}  # a server that has validated for long
    assert means.ask(0, of_epoch(1, weight=0)) == []
    assert told(means.ask(2, of_epoch(1, 4.0))) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_who_says_that_no_more_will_come_is_not_waited_for() -> None:
    means = EpochMeans([1, 2])
    means.ask(1, of_epoch(0, 1.0))
    assert told(means.ask(2, of_epoch(None))) == {2: None, 1: 1.0}
    assert told(means.ask(1, of_epoch(1, 2.0))) == {1: 2.0}
    assert told(means.ask(0, of_epoch(1))) == {0: 2.0}


def test_of_those_who_are_gone_only_the_dead_do_not_count() -> None:
    for lost in (False, True):
        means = EpochMeans([1, 2, 3])
        means.ask(1, of_epoch(0, 1.0))
        means.ask(2, of_epoch(0, 3.0))
        assert means.gone(2, lost=lost) == []
        answers = told(means.ask(3, of_epoch(0, 5.0)))
        assert answers == ({1: 3.0, 3: 3.0} if lost else {1: 3.0, 2: 3.0, 3: 3.0})


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_spare_that_trains_counts_from_the_first_epoch_on_whose_means_it_has_not_had(
    asked_before: bool,
) -> None:
    means = EpochMeans([1, 2])
    means.ask(1, of_epoch(0, 1.0))
    if asked_before:
        means.ask(3, of_epoch(0, weight=0))
    means.admit(3)
    answers = means.ask(2, of_epoch(0, 3.0))
    if not asked_before:
        assert answers == []
        answers = means.ask(3, of_epoch(0, weight=0))
    assert told(answers) == {1: 2.0, 2: 2.0, 3: 2.0}
    means.ask(1, of_epoch(1, 1.0))
    assert means.ask(2, of_epoch(1, 1.0)) == []
    assert told(means.ask(3, of_epoch(1, 7.0))) == {1: 3.0, 2: 3.0, 3: 3.0}


# --- copies ----------------------------------------------------------------------------------------------


def test_all_get_what_the_source_brings_once_all_have_asked() -> None:
    copies = Broadcasts([0, 1, 2], source=0)
    for turn in range(2):
        assert copies.ask(1, BroadcastQuery(values={"turn": "mine"}, numbers=np.zeros(2, F4))) == []
        assert copies.ask(0, BroadcastQuery(values={"turn": turn}, numbers=np.full(2, turn, F4))) == []
        answers = copies.ask(2, BroadcastQuery(values={}))
        assert [rank for rank, _ in answers] == [0, 1, 2]
        for _, answer in answers:
            assert answer.values == {"turn": turn}
            assert answer.numbers.tolist() == [turn, turn]


@pytest.mark.parametrize("lost", [False, True])
def test_copies_are_given_out_when_the_last_one_missing_goes(lost: bool) -> None:
    copies = Broadcasts([0, 1, 2], source=0)
    copies.ask(0, BroadcastQuery(values={}))
    copies.ask(2, BroadcastQuery(values={}))
    assert [rank for rank, _ in copies.gone(1, lost=lost)] == [0, 2]


# --- averages --------------------------------------------------------------------------------------------

VECTORS = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=5)


def brought(averages: Averages, rank: int, numbers: Any, weight: float = 1, views: int = 0) -> np.ndarray:
    query = AverageQuery(weight=weight, views=views, numbers=np.array(numbers, F4))
    ((told_rank, answer),) = averages.ask(rank, query)
    assert told_rank == rank
    return answer.numbers.copy()


def average_for(averages: Averages, rank: int, views: int = 0) -> list[float]:
    ((_, answer),) = averages.ask(rank, AverageQuery(views=views))
    return answer.numbers.tolist()


@exactly
@given(VECTORS, st.floats(0.001, 1e6))
def test_the_average_of_one_worker_is_what_it_brought_bit_for_bit(
    numbers: list[float], weight: float
) -> None:
    averages = Averages(np.ones(len(numbers), F4))
    assert bits(brought(averages, 3, numbers, weight)) == bits(np.array(numbers, F4))


@exactly
@given(VECTORS, st.lists(st.integers(1, 100), min_size=1, max_size=7))
def test_the_average_of_equal_vectors_is_that_vector_bit_for_bit(
    numbers: list[float], weights: list[int]
) -> None:
    averages = Averages(np.zeros(len(numbers), F4))
    for rank, weight in enumerate(weights):
        value = brought(averages, rank, numbers, weight)
        assert value.tolist() == np.array(numbers, F4).tolist()


def test_an_average_is_weighted_and_of_what_each_has_brought_last() -> None:
    averages = Averages(np.array([7], F4))
    assert brought(averages, 1, [], 0).tolist() == [7]  # before anybody has brought anything
    assert average_for(averages, 0) == [7]
    assert brought(averages, 1, [8], 3).tolist() == [8]
    assert brought(averages, 2, [0], 1).tolist() == [6]
    assert brought(averages, 1, [4], 1).tolist() == [2]
    assert averages.gone(2, lost=False) == []
    assert brought(averages, 1, [6], 3).tolist() == [4.5]


def test_what_is_brought_after_a_view_does_not_count_for_those_who_have_not_had_it() -> None:
    averages = Averages(np.array([7], F4))
    brought(averages, 1, [10])
    brought(averages, 2, [20])
    assert brought(averages, 1, [30], views=1).tolist() == [25]  # 1 is past the first view, 2 not yet
    assert brought(averages, 1, [40], views=1).tolist() == [30]
    assert average_for(averages, 2) == average_for(averages, 0) == [15]
    assert average_for(averages, 2, views=1) == [30]
    brought(averages, 2, [0], views=1)
    assert average_for(averages, 1, views=1) == [20]
    assert average_for(averages, 0) == [15]
    brought(averages, 1, [2], views=2)
    assert average_for(averages, 2, views=1) == [20]
    assert averages.state()["value"].tolist() == [1]


def test_before_anybody_has_had_a_view_nothing_counts_that_comes_after_it() -> None:
    averages = Averages(np.array([7], F4))
    brought(averages, 1, [10], views=1)
    assert average_for(averages, 2) == [7]


def test_what_a_dead_worker_has_brought_counts_until_another_brings_something() -> None:
    averages = Averages(np.array([7], F4))
    brought(averages, 1, [10])
    assert averages.gone(1, lost=True) == []
    assert average_for(averages, 2) == [10]
    assert brought(averages, 2, [20]).tolist() == [20]


def test_averages_that_are_loaded_count_before_any_view() -> None:
    averages, again = Averages(np.array([7], F4)), Averages(np.array([0], F4))
    brought(averages, 1, [10], views=2)
    brought(averages, 2, [20], views=2)
    again.load(averages.state())
    assert average_for(again, 1) == [15]
    assert brought(again, 1, [30]).tolist() == [25]


def test_an_average_keeps_a_copy_of_what_was_brought() -> None:
    averages, mine = Averages(np.zeros(1, F4)), np.ones(1, F4)
    averages.ask(1, AverageQuery(weight=1, views=0, numbers=mine))
    mine[0] = 100
    assert brought(averages, 2, [3]).tolist() == [2]


@exactly
@given(st.permutations(range(4)))
def test_an_average_does_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    draw = np.random.default_rng(1)
    vectors, weights = draw.standard_normal((4, 3)).astype(F4), [3, 1, 7, 2]
    averages = Averages(np.zeros(3, F4))
    for rank in order:
        value = brought(averages, rank, vectors[rank], weights[rank])
    want = (np.array(weights) / 13) @ vectors.astype(np.float64)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    again = Averages(np.zeros(3, F4))
    for rank in range(4):
        reference = brought(again, rank, vectors[rank], weights[rank])
    assert bits(value) == bits(reference)


# --- leases ----------------------------------------------------------------------------------------------


def data(**changes: Any) -> SampledData:
    return SampledData(**{"sampler": "training", "size": 8, "unit": 1, "order": "seed 0", **changes})


def lease(epoch: int = 0, **changes: Any) -> LeaseQuery:
    return LeaseQuery(data=data(**changes), epoch=epoch)


def service_of(workers: int = 2, *, patient: bool) -> Room:
    return Room(Leasing(range(1, workers + 1), patient=patient), members=workers + 1)


def found(answer: LeaseAnswer) -> list[int] | None:
    lease = answer.lease
    return None if lease is None else [lease.epoch, lease.start, lease.stop]


def take(room: Room, rank: int, epoch: int = 0) -> list[int] | None:
    room.ask(rank, lease(epoch))
    assert room.answered[-1] == rank
    return found(room.answer(rank))


def used_up(room: Room, rank: int, epoch: int = 0) -> list[int]:
    """The positions that one worker takes until it is told that the epoch is over."""
    positions = []
    while (taken_now := take(room, rank, epoch)) is not None:
        positions += range(*taken_now[1:])
    return positions


def taken(room: Room, rank: int, count: int) -> list[int]:
    """The positions that one worker takes until it has taken so many."""
    positions: list[int] = []
    while len(positions) < count:
        taken_now = take(room, rank)
        assert taken_now is not None
        positions += range(*taken_now[1:])
    return positions


@pytest.mark.parametrize("patient", [False, True])
def test_the_leases_of_an_epoch_have_each_position_once(patient: bool) -> None:
    room = service_of(patient=patient)
    assert take(room, 2) == [0, 0, 1]
    positions = taken(room, 1, 7) if patient else used_up(room, 1)
    assert positions == [1, 2, 3, 4, 5, 6, 7]


def test_who_waits_is_answered_when_another_one_has_used_up_its_lease() -> None:
    room = service_of(patient=True)
    assert take(room, 2) == [0, 0, 1]
    taken(room, 1, 7)
    room.answered.clear()
    room.ask(1, lease())
    assert room.answered == []
    room.ask(2, lease())  # nothing is left, and nobody holds anything any more
    assert sorted(room.answered) == [1, 2]
    assert room.answer(1) == room.answer(2) == LeaseAnswer(lease=None)


@pytest.mark.parametrize(
    ("end", "rest"),
    [("lost", [0, 1, 2]), ("leave", [0, 1, 2]), ("give back", [0, 4, 5])],
)
def test_who_waits_gets_what_another_one_leaves_behind(end: str, rest: list[int]) -> None:
    room = service_of(patient=True)
    take(room, 2)
    assert take(room, 2) == [0, 1, 2]
    if end == "give back":
        assert take(room, 2) == [0, 2, 5]
    taken(room, 1, 3 if end == "give back" else 6)
    room.ask(1, lease())
    room.answered.clear()
    if end == "lost":
        room.lose(2)
    elif end == "leave":
        room.ask(2, LeaveQuery())
    else:
        room.ask(2, GiveBackQuery(data=data(), left=1))
    assert 1 in room.answered
    assert found(room.answer(1)) == rest


def test_a_worker_that_serves_by_now_gets_no_samples_and_others_get_those_that_it_held() -> None:
    leasing = Leasing([1, 2], patient=True)
    room = Room(leasing, members=3)
    take(room, 2)
    assert take(room, 2) == [0, 1, 2]
    assert leasing.retire(2) == []
    assert take(room, 2) is None
    room.ask(2, GiveBackQuery(data=data(), left=1))
    assert room.answer(2) == Answer()
    assert sorted(used_up(room, 1)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_worker_that_waits_for_a_lease_and_serves_by_now_waits_no_more() -> None:
    leasing = Leasing([1, 2], patient=True)
    room = Room(leasing, members=3)
    assert take(room, 2) == [0, 0, 1]
    taken(room, 1, 7)
    room.ask(1, lease())
    assert leasing.retire(1) == [(1, LeaseAnswer(lease=None))]
    assert used_up(room, 2) == []


def test_nobody_waits_for_a_lease_while_all_are_to_pause() -> None:
    leasing = Leasing([1, 2], patient=True)
    ask = leasing.handlers[LeaseQuery]
    ask(1, lease(size=1))
    assert ask(2, lease(size=1)) == []
    assert leasing.let_wait(may_wait=False) == [(2, LeaseAnswer(lease=None))]
    leasing.let_wait(may_wait=True)
    assert ask(2, lease(size=1)) == []


def test_a_server_that_leaves_has_no_leases() -> None:
    leasing = Leasing([1], patient=True)
    leasing.handlers[LeaseQuery](1, lease())
    assert leasing.gone(0, lost=False) == []


def test_a_worker_can_ask_which_leases_it_has() -> None:
    room = service_of(patient=False)
    assert take(room, 1) == [0, 0, 1]
    room.ask(1, HeldLeasesQuery(data=data()))
    assert room.answer(1) == HeldLeasesAnswer(leases=(Lease(0, 0, 1),))


def test_two_samplers_have_a_book_each() -> None:
    room = service_of(1, patient=False)
    assert used_up(room, 1) == list(range(8))
    room.ask(1, lease(sampler="another", size=2))
    assert found(room.answer(1)) == [0, 0, 1]


@pytest.mark.parametrize("change", [{"size": 9}, {"unit": 2}, {"order": "seed 1"}], ids=str)
def test_ranks_that_divide_other_data_are_refused_and_both_are_told(change: dict[str, Any]) -> None:
    room = service_of(patient=False)
    take(room, 1)
    with pytest.raises(ConfigurationError, match="give all ranks the same data set and seed") as caught:
        room.ask(2, lease(**change))
    for value in (8, *change.values()):
        assert str(value) in str(caught.value)


def test_a_book_can_be_read_and_written() -> None:
    room = service_of(patient=False)
    assert take(room, 1) == [0, 0, 1]
    room.ask(0, ReadLedgerQuery(data=data()))
    state = room.answer(0).state
    fresh = service_of(patient=False)
    fresh.ask(0, LoadLedgerQuery(data=data(), state=state))
    assert fresh.answer(0) == Answer()
    for rank in (2, 1, 1, 2):
        assert take(room, rank) == take(fresh, rank)


def test_a_book_stays_small_however_many_epochs_were_broken_off() -> None:
    room = service_of(1, patient=False)
    for epoch in range(1000):
        take(room, 1, epoch)
        room.ask(1, GiveBackQuery(data=data(), left=1))
    room.ask(1, ReadLedgerQuery(data=data()))


# --- notes -----------------------------------------------------------------------------------------------


def noted(notes: Notes, rank: int, epoch: int, **values: float) -> Mapping[str, Any]:
    weight = values.pop("weight", 1)
    ((_, answer),) = notes.ask(rank, NoteQuery(epoch=epoch, values=values, weight=weight))
    return answer.means


def test_notes_are_weighted_means_of_what_was_noted_for_an_epoch() -> None:
    notes = Notes()
    noted(notes, 1, 0, loss=1.0, weight=3)
    noted(notes, 2, 0, loss=2.0, accuracy=0.5, weight=1)
    assert noted(notes, 0, 0) == {"loss": 1.25, "accuracy": 0.5}


def test_a_note_of_a_worker_that_is_ahead_does_not_count_yet() -> None:
    notes = Notes()
    noted(notes, 1, 0, loss=1.0)
    noted(notes, 2, 0, loss=3.0)
    noted(notes, 1, 1, loss=100.0)
    assert noted(notes, 0, 0) == {"loss": 2.0}
    noted(notes, 2, 1, loss=200.0)
    assert noted(notes, 0, 1) == {"loss": 150.0}


def test_the_last_note_of_a_worker_that_has_stopped_counts() -> None:
    notes = Notes()
    noted(notes, 1, 0, loss=1.0)
    noted(notes, 2, 0, loss=3.0)
    for epoch in range(1, 4):
        noted(notes, 1, epoch, loss=float(epoch))
        assert noted(notes, 0, epoch) == {"loss": (epoch + 3.0) / 2}


def test_a_worker_that_has_died_counts_with_no_epoch_after_its_last() -> None:
    notes = Notes()
    noted(notes, 1, 0, loss=1.0)
    noted(notes, 2, 0, loss=3.0)
    notes.gone(2, lost=True)
    notes.gone(3, lost=True)  # it had noted nothing
    assert noted(notes, 0, 0) == {"loss": 2.0}
    heir = Notes()
    heir.load(notes.state())
    for one in (notes, heir):
        noted(one, 1, 1, loss=5.0)
        assert noted(one, 0, 1) == {"loss": 5.0}
        noted(one, 2, 1, loss=7.0)  # resumed, it is there again
        assert noted(one, 0, 1) == {"loss": 6.0}


def test_notes_that_nobody_asks_for_any_more_are_forgotten() -> None:
    notes = Notes()
    for epoch in range(100):
        noted(notes, 1, epoch, loss=1.0)
        noted(notes, 0, epoch)
    assert sum(map(len, notes._notes.values())) == 1
