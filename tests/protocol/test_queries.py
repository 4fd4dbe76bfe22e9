"""The query service: queries on the wire, its counters, and leases of data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError, Frame, ProtocolError
from nnlo_common.protocol import (
    QUERY_NUMBERS,
    Action,
    Answer,
    Averages,
    Copies,
    EpochMeans,
    Kind,
    Lost,
    Means,
    Message,
    Notes,
    Query,
    QueryClient,
    QueryService,
    Received,
    Release,
    Send,
    Wait,
    decode,
    encode,
)
from nnlo_common.protocol._queries import packed, unpacked
from nnlo_common.training._lease_service import Leasing

F4 = np.float32
exactly = settings(deadline=None, derandomize=True, max_examples=60)


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
    frame = len('{"ask":""}')
    content = {"ask": "x" * (most - frame)}
    found, numbers = unpacked(packed(content, np.arange(3, dtype=F4), room))
    assert (found, numbers.tolist()) == (content, [0, 1, 2])
    with pytest.raises(ConfigurationError, match=f"{most + 1} bytes do not fit .*fewer or shorter names"):
        packed({"ask": "x" * (most - frame + 1)}, None, room)


def test_a_question_that_is_too_large_names_what_was_asked() -> None:
    queries = QueryClient(1, queries=0, shard=1)
    values = {f"the accuracy of class {number}": 0.5 for number in range(1000)}
    with pytest.raises(ConfigurationError, match=r"'mean': .* bytes do not fit into one question of 16384"):
        next(queries.ask({"ask": "mean", "values": values, "weight": 1}))


# --- a query service and its clients ------------------------------------------------------------------------


class Echo:
    """A counter that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.left: list[tuple[int, bool]] = []
        self.ready: list[int] = []

    def ask(self, question: Query) -> list[Answer]:
        self.asked.append(question.rank)
        return [Answer(rank, {"for": rank}) for rank in self.ready]

    def gone(self, rank: int, *, lost: bool) -> list[Answer]:
        self.left.append((rank, lost))
        return []


class Room:
    """A query service on rank 0, a client on every other rank; messages are carried as a transport does."""

    def __init__(self, counters: Mapping[str, Any], members: int = 4, numbers: int = 0) -> None:
        self.numbers = numbers
        self.queries = QueryService(0, 2, range(members), counters)
        self.clerks = {rank: QueryClient(rank, 0, 2, numbers) for rank in range(1, members)}
        self.open: dict[int, Any] = {}
        self.answered: list[int] = []

    def carry(self, message: Message) -> Received:
        frame = Frame(QUERY_NUMBERS + self.numbers)
        if message.vector is not None:
            frame.vector[: message.vector.size] = message.vector
        return Received(decode(frame, encode(message, frame)), frame)

    def ask(self, rank: int, content: Mapping[str, Any], numbers: Any = None) -> None:
        if rank == 0:
            self.perform(self.queries.ask_here(content, numbers))
            return
        activity = self.clerks[rank].ask(content, numbers)
        send, wait = next(activity), next(activity)
        assert isinstance(send, Send)
        assert isinstance(wait, Wait)
        self.open[rank] = activity
        self.perform(self.queries.handle(self.carry(send.message)))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.frame is not None  # the question's own carries the answer
                (release,) = self.clerks[action.rank].receive(self.carry(action.message))
                assert isinstance(release, Release)
                assert list(self.open.pop(action.rank)) == []  # the activity is over
                self.answered.append(action.rank)

    def lose(self, rank: int) -> list[Action]:
        self.open.pop(rank, None)
        actions = self.queries.handle(Lost(rank))
        self.perform(actions)
        return actions

    def answer(self, rank: int) -> Mapping[str, Any]:
        if rank == 0:
            assert self.queries.own is not None
            return self.queries.own.content
        answer = self.clerks[rank].answer
        assert answer is not None
        return answer[0]


def test_a_question_is_answered_when_its_counter_knows() -> None:
    echo = Echo()
    room = Room({"echo": echo})
    for rank in (3, 0, 1):
        room.ask(rank, {"ask": "echo"})
        assert room.queries.own is None
        assert room.answered == []
    echo.ready = [0, 3, 2, 1]
    room.ask(2, {"ask": "echo"})
    assert room.answered == [3, 2, 1]
    assert [room.answer(rank) for rank in range(4)] == [{"for": rank} for rank in range(4)]
    assert echo.asked == [3, 0, 1, 2]


def test_an_answer_may_hold_more_numbers_than_its_question() -> None:
    room = Room({"average": Averages(np.arange(5, dtype=F4))}, numbers=5)
    room.ask(1, {"ask": "average", "weight": 0, "views": 0})
    assert room.clerks[1].answer[1].tolist() == [0, 1, 2, 3, 4]


def test_an_answer_is_a_copy_of_its_message() -> None:
    queries = QueryClient(1, queries=0, shard=2, numbers=2)
    activity = queries.ask({"ask": "average"})
    sent = next(activity)
    frame = Frame(QUERY_NUMBERS + 2)
    vector = packed({}, np.ones(2, F4), frame.vector)
    queries.receive(Received(Message(Kind.ANSWER, 0, sent.message.sequence, shard=2, vector=vector), frame))
    frame.vector[:] = 7
    assert queries.answer[1].tolist() == [1, 1]


@pytest.mark.parametrize("end", ["leave", "goodbye", "lost"])
def test_whoever_goes_is_told_to_every_counter_once(end: str) -> None:
    first, second = Echo(), Echo()
    room = Room({"first": first, "second": second})
    if end == "lost":
        room.lose(2)
    else:
        room.ask(2, {"ask": end})
        assert room.answer(2) == {}
    assert first.left == second.left == [(2, end == "lost")]
    room.lose(2)  # it may die all the same
    assert room.queries.gone(2) == []
    assert first.left == [(2, end == "lost")]
    assert room.queries.present == {0, 1, 3}


def test_who_has_left_may_still_ask_but_not_after_its_goodbye() -> None:
    room = Room({"average": Averages(np.zeros(0, F4))})
    room.ask(1, {"ask": "leave"})
    room.ask(1, {"ask": "average", "weight": 0, "views": 0})
    assert room.answer(1) == {}
    room.ask(1, {"ask": "goodbye"})
    assert room.queries.present == {0, 2, 3}
    with pytest.raises(ProtocolError, match="expected a query of a member"):
        room.ask(1, {"ask": "average", "weight": 0, "views": 0})


def test_the_frame_of_one_who_died_waiting_is_given_back() -> None:
    room = Room({"echo": Echo()})
    room.ask(1, {"ask": "echo"})
    (release,) = room.lose(1)
    assert isinstance(release, Release)
    assert release.rank == 1


QUESTION = Message(Kind.ASK, 1, 1, shard=2, vector=packed({"ask": "echo"}, None, np.zeros(QUERY_NUMBERS, F4)))


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
def test_a_desk_refuses_what_is_no_question_of_a_member(wrong: Message) -> None:
    echo = Echo()
    queries = QueryService(0, 2, range(4), {"echo": echo})
    with pytest.raises(ProtocolError, match="the query service on rank 0 got"):
        queries.handle(Received(wrong, Frame(QUERY_NUMBERS)))
    assert echo.asked == []


@pytest.mark.parametrize(
    "changes", [{"kind": Kind.CENTER}, {"sequence": 0}, {"sequence": 2}, {"vector": None}], ids=str
)
def test_a_clerk_refuses_what_is_no_answer_to_its_question(changes: dict[str, Any]) -> None:
    queries = QueryClient(1, queries=0, shard=2)
    next(queries.ask({"ask": "echo"}))
    vector = packed({}, None, np.zeros(QUERY_NUMBERS, F4))
    answer = Message(Kind.ANSWER, 0, 1, shard=2, vector=vector)._replace(**changes)
    with pytest.raises(ProtocolError, match="as the answer to its query 1"):
        queries.receive(Received(answer, Frame(QUERY_NUMBERS)))
    assert queries.answer is None


# --- means -----------------------------------------------------------------------------------------------


def part(values: Mapping[str, float], weight: float = 1) -> dict[str, Any]:
    return {"ask": "mean", "values": dict(values), "weight": weight}


def means_of(parts: Mapping[int, dict[str, Any]], order: Any = None) -> list[Answer]:
    """What all are told in the end; nobody is told anything before."""
    means, answers = Means(parts), []
    for rank in parts if order is None else order:
        assert answers == []
        answers = means.ask(Query(rank, parts[rank]))
    return answers


def test_a_mean_waits_for_all_and_answers_in_the_order_of_the_ranks() -> None:
    parts = {0: part({"loss": 1.0}), 1: part({"loss": 2.0}), 2: part({"loss": 6.0})}
    for order in itertools.permutations(parts):
        answers = means_of(parts, order)
        assert [answer.rank for answer in answers] == [0, 1, 2]
        assert all(answer.content == {"means": {"loss": 3.0}, "weight": 3} for answer in answers)


@exactly
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 1000)), min_size=1, max_size=6), st.randoms())
def test_a_mean_is_weighted_and_does_not_depend_on_the_order_of_arrival(
    given_parts: list[tuple[float, int]], draw: Any
) -> None:
    parts = {rank: part({"x": value}, weight) for rank, (value, weight) in enumerate(given_parts)}
    order = draw.sample(sorted(parts), len(parts))
    (first, *_), (again, *_) = means_of(parts), means_of(parts, order)
    total = sum(weight for _, weight in given_parts)
    assert first.content["weight"] == again.content["weight"] == total
    if not total:
        assert math.isnan(first.content["means"]["x"])
        return
    assert first.content["means"] == again.content["means"]
    exact = math.fsum(value * weight for value, weight in given_parts) / total
    assert first.content["means"]["x"] == pytest.approx(exact, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_without_samples_need_not_know_the_names(silent: int) -> None:
    parts = {rank: part({"b": 4.0, "a": float(rank)}, 2) for rank in range(3) if rank != silent}
    answers = means_of({**parts, silent: part({}, 0)})
    assert [answer.rank for answer in answers] == [0, 1, 2]
    measured = [rank for rank in range(3) if rank != silent]
    assert answers[0].content == {"means": {"a": sum(measured) / 2, "b": 4.0}, "weight": 4}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_rank_without_samples_measured_does_not_count(value: float) -> None:
    """A mean of no samples is often NaN."""
    answers = means_of({0: part({"loss": value}, 0), 1: part({"loss": 0.5}, 10)})
    assert answers[1].content == {"means": {"loss": 0.5}, "weight": 10}


def test_where_nobody_has_samples_a_mean_is_nan() -> None:
    (answer, _) = means_of({0: part({"loss": 1.0}, 0), 1: part({}, 0)})
    assert math.isnan(answer.content["means"]["loss"])
    assert means_of({0: part({}, 0)})[0].content == {"means": {}, "weight": 0}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_loss_shows_in_the_mean(value: float) -> None:
    (answer, _) = means_of({0: part({"loss": value}), 1: part({"loss": 0.5})})
    assert not math.isfinite(answer.content["means"]["loss"])


def test_different_names_are_refused_and_both_are_told() -> None:
    means = Means([0, 1])
    means.ask(Query(0, part({"loss": 1.0})))
    with pytest.raises(
        ConfigurationError, match=r"rank 1 asked .*\['acc'\], but rank 0 for those of \['loss"
    ):
        means.ask(Query(1, part({"acc": 1.0})))


def test_one_mean_does_not_leak_into_the_next() -> None:
    means = Means([0, 1])
    for turn in range(3):
        means.ask(Query(1, part({f"turn {turn}": 1.0})))
        (answer, _) = means.ask(Query(0, part({f"turn {turn}": 3.0})))
        assert answer.content["means"] == {f"turn {turn}": 2.0}


@pytest.mark.parametrize("lost", [False, True])
def test_nobody_waits_for_whoever_has_gone(lost: bool) -> None:
    means = Means([0, 1, 2])
    means.ask(Query(0, part({"loss": 1.0})))
    means.ask(Query(1, part({"loss": 3.0})))
    first, second = means.gone(2, lost=lost)
    assert [first.rank, second.rank] == [0, 1]
    assert first.content["means"] == {"loss": 2.0}
    assert means.gone(1, lost=lost) == []  # nobody waits
    (alone,) = means.ask(Query(0, part({"loss": 5.0})))
    assert alone.content["means"] == {"loss": 5.0}


def test_what_the_dead_have_brought_does_not_count() -> None:
    room = Room({"mean": Means(range(4))})
    for rank, loss in ((1, 100.0), (2, 3.0), (3, 5.0)):
        room.ask(rank, part({"loss": loss}))
    room.lose(1)
    assert room.answered == []
    room.ask(0, part({}, 0))
    assert room.answered == [2, 3]
    assert room.answer(0) == room.answer(3) == {"means": {"loss": 4.0}, "weight": 2}


@pytest.mark.parametrize("end", ["leave", "goodbye"])
def test_a_mean_is_given_out_when_the_last_one_missing_goes(end: str) -> None:
    room = Room({"mean": Means(range(4))})
    for rank in (0, 1, 2):
        room.ask(rank, part({"loss": float(rank)}))
    room.ask(3, {"ask": end})
    assert room.answered == [3, 1, 2]
    assert room.answer(0)["means"] == {"loss": 1.0}


# --- means of epochs -------------------------------------------------------------------------------------


def of_epoch(epoch: int, loss: float | None = None, weight: float = 1) -> dict[str, Any]:
    return {"epoch": epoch, "values": {} if loss is None else {"loss": loss}, "weight": weight}


def told(answers: list[Answer]) -> dict[int, float | None]:
    """Who is told what the mean loss is."""
    return {answer.rank: answer.content["means"].get("loss") for answer in answers}


def test_workers_wait_for_each_other_but_not_for_a_server() -> None:
    means = EpochMeans([1, 2])
    assert means.ask(Query(1, of_epoch(0, 1.0, weight=1))) == []
    assert told(means.ask(Query(2, of_epoch(0, 5.0, weight=3)))) == {1: 4.0, 2: 4.0}
    assert means.ask(Query(1, of_epoch(1, 2.0))) == []
    assert told(means.ask(Query(0, of_epoch(0)))) == {0: 4.0}  # a server that has validated for long
    assert means.ask(Query(0, of_epoch(1))) == []
    assert told(means.ask(Query(2, of_epoch(1, 4.0)))) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_who_says_that_no_more_will_come_is_not_waited_for() -> None:
    means = EpochMeans([1, 2])
    means.ask(Query(1, of_epoch(0, 1.0)))
    assert told(means.ask(Query(2, {"epoch": -1}))) == {2: None, 1: 1.0}
    assert told(means.ask(Query(1, of_epoch(1, 2.0)))) == {1: 2.0}
    assert told(means.ask(Query(0, of_epoch(1)))) == {0: 2.0}


def test_of_those_who_are_gone_only_the_dead_do_not_count() -> None:
    for lost in (False, True):
        means = EpochMeans([1, 2, 3])
        means.ask(Query(1, of_epoch(0, 1.0)))
        means.ask(Query(2, of_epoch(0, 3.0)))
        assert means.gone(2, lost=lost) == []
        answers = told(means.ask(Query(3, of_epoch(0, 5.0))))
        assert answers == ({1: 3.0, 3: 3.0} if lost else {1: 3.0, 2: 3.0, 3: 3.0})


# --- copies ----------------------------------------------------------------------------------------------


def test_all_get_what_the_source_brings_once_all_have_asked() -> None:
    copies = Copies([0, 1, 2], source=0)
    for turn in range(2):
        assert copies.ask(Query(1, {"values": {"turn": "mine"}}, np.zeros(2, F4))) == []
        assert copies.ask(Query(0, {"values": {"turn": turn}}, np.full(2, turn, F4))) == []
        answers = copies.ask(Query(2, {"values": {}}))
        assert [answer.rank for answer in answers] == [0, 1, 2]
        for answer in answers:
            assert answer.content == {"values": {"turn": turn}}
            assert answer.numbers is not None
            assert answer.numbers.tolist() == [turn, turn]


@pytest.mark.parametrize("lost", [False, True])
def test_copies_are_given_out_when_the_last_one_missing_goes(lost: bool) -> None:
    copies = Copies([0, 1, 2], source=0)
    copies.ask(Query(0, {"values": {}}))
    copies.ask(Query(2, {"values": {}}))
    assert [answer.rank for answer in copies.gone(1, lost=lost)] == [0, 2]


# --- averages --------------------------------------------------------------------------------------------

VECTORS = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=5)


def brought(averages: Averages, rank: int, numbers: Any, weight: float = 1, views: int = 0) -> np.ndarray:
    content = {"ask": "average", "weight": weight, "views": views}
    (answer,) = averages.ask(Query(rank, content, np.array(numbers, F4)))
    assert (answer.rank, answer.content) == (rank, {})
    return answer.numbers.copy()


def average_for(averages: Averages, rank: int, views: int = 0) -> list[float]:
    (answer,) = averages.ask(Query(rank, {"weight": 0, "views": views}))
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
    averages.ask(Query(1, {"weight": 1, "views": 0}, mine))
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


def lease(do: str = "take", **changes: Any) -> dict[str, Any]:
    facts = {"sampler": "training", "size": 8, "unit": 1, "order": "seed 0"}
    return {"ask": "lease", "do": do, **facts, **({"epoch": 0} if do == "take" else {}), **changes}


def desk_of(workers: int = 2, *, patient: bool) -> Room:
    return Room({"lease": Leasing(range(1, workers + 1), patient=patient)}, members=workers + 1)


def take(room: Room, rank: int, epoch: int = 0) -> list[int] | None:
    room.ask(rank, lease(epoch=epoch))
    assert room.answered[-1] == rank
    return room.answer(rank)["lease"]


def used_up(room: Room, rank: int, epoch: int = 0) -> list[int]:
    """The positions that one worker takes until it is told that the epoch is over."""
    positions = []
    while (found := take(room, rank, epoch)) is not None:
        positions += range(found[1], found[2])
    return positions


def taken(room: Room, rank: int, count: int) -> list[int]:
    """The positions that one worker takes until it has taken so many."""
    positions: list[int] = []
    while len(positions) < count:
        found = take(room, rank)
        assert found is not None
        positions += range(found[1], found[2])
    return positions


@pytest.mark.parametrize("patient", [False, True])
def test_the_leases_of_an_epoch_have_each_position_once(patient: bool) -> None:
    room = desk_of(patient=patient)
    assert take(room, 2) == [0, 0, 1]
    positions = taken(room, 1, 7) if patient else used_up(room, 1)
    assert positions == [1, 2, 3, 4, 5, 6, 7]


def test_who_waits_is_answered_when_another_one_has_used_up_its_lease() -> None:
    room = desk_of(patient=True)
    assert take(room, 2) == [0, 0, 1]
    taken(room, 1, 7)
    room.answered.clear()
    room.ask(1, lease())
    assert room.answered == []
    room.ask(2, lease())  # nothing is left, and nobody holds anything any more
    assert sorted(room.answered) == [1, 2]
    assert room.answer(1) == room.answer(2) == {"lease": None}


@pytest.mark.parametrize(
    ("end", "rest"),
    [("lost", [0, 1, 2]), ("leave", [0, 1, 2]), ("give back", [0, 4, 5])],
)
def test_who_waits_gets_what_another_one_leaves_behind(end: str, rest: list[int]) -> None:
    room = desk_of(patient=True)
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
        room.ask(2, {"ask": "leave"})
    else:
        room.ask(2, lease("give back", left=1))
    assert 1 in room.answered
    assert room.answer(1) == {"lease": rest}


def test_nobody_waits_for_a_lease_while_all_are_to_pause() -> None:
    leasing = Leasing([1, 2], patient=True)
    leasing.ask(Query(1, lease(size=1)))
    assert leasing.ask(Query(2, lease(size=1))) == []
    (answer,) = leasing.let_wait(may_wait=False)
    assert (answer.rank, answer.content) == (2, {"lease": None})
    leasing.let_wait(may_wait=True)
    assert leasing.ask(Query(2, lease(size=1))) == []


def test_a_server_that_leaves_has_no_leases() -> None:
    leasing = Leasing([1], patient=True)
    leasing.ask(Query(1, lease()))
    assert leasing.gone(0, lost=False) == []


def test_two_samplers_have_a_book_each() -> None:
    room = desk_of(1, patient=False)
    assert used_up(room, 1) == list(range(8))
    room.ask(1, lease(sampler="another", size=2))
    assert room.answer(1) == {"lease": [0, 0, 1]}


@pytest.mark.parametrize("change", [{"size": 9}, {"unit": 2}, {"order": "seed 1"}], ids=str)
def test_ranks_that_divide_other_data_are_refused_and_both_are_told(change: dict[str, Any]) -> None:
    room = desk_of(patient=False)
    take(room, 1)
    with pytest.raises(ConfigurationError, match="give all ranks the same data set and seed") as caught:
        room.ask(2, lease(**change))
    for value in (8, *change.values()):
        assert str(value) in str(caught.value)


def test_a_book_can_be_read_and_written() -> None:
    room = desk_of(patient=False)
    assert take(room, 1) == [0, 0, 1]
    room.ask(0, lease("read"))
    state = room.answer(0)["state"]
    fresh = desk_of(patient=False)
    fresh.ask(0, lease("write", state=state))
    assert fresh.answer(0) == {}
    for rank in (2, 1, 1, 2):
        assert take(room, rank) == take(fresh, rank)


def test_a_book_stays_small_however_many_epochs_were_broken_off() -> None:
    room = desk_of(1, patient=False)
    for epoch in range(1000):
        take(room, 1, epoch)
        room.ask(1, lease("give back", left=1))
    room.ask(1, lease("read"))


# --- notes -----------------------------------------------------------------------------------------------


def noted(notes: Notes, rank: int, epoch: int, **values: float) -> Mapping[str, Any]:
    weight = values.pop("weight", 1)
    content = {"ask": "note", "epoch": epoch, "values": values, "weight": weight}
    (answer,) = notes.ask(Query(rank, content))
    return answer.content["means"]


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


def test_notes_that_nobody_asks_for_any_more_are_forgotten() -> None:
    notes = Notes()
    for epoch in range(100):
        noted(notes, 1, epoch, loss=1.0)
        noted(notes, 0, epoch)
    assert sum(map(len, notes._notes.values())) == 1
