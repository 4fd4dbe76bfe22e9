"""Statistics that layers move by each batch, combined over workers as if one had seen all batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common.protocol import Averages, Moves, Moving
from nnlo_common.protocol._query_messages import AverageQuery

F4 = np.float32
LAYERS = [Moving(slice(0, 2), slice(2, 4)), Moving(slice(5, 6), slice(6, 7))]
PLAIN = 4  # lies between the layers, and nobody moves it
SIZE = 7
START = np.array([0, 0, 1, 1, 3, 0, 1], F4)
TRUE = np.array([2, -1, 0.5, 3, 3, 10, 0.01], F4)
NONE = np.nan  # the decay of a mean over all batches

exactly = settings(max_examples=60)


class Worker:
    """What a rank does between the query service and its model; its batches have the same statistics."""

    def __init__(self, averages: Averages, rank: int, decay: float | list[float] = 0.99) -> None:
        self.averages, self.rank = averages, rank
        self.decay = np.broadcast_to(np.array(decay, np.float64), len(LAYERS))
        self.vector, self.total, self.since = START.copy(), np.zeros(2), np.zeros(2)
        self.views = 0
        self._ask(self._numbers(), weight=0, start=True)

    def train(self, batches: int, true: np.ndarray = TRUE) -> Worker:
        for _ in range(batches):
            self.total, self.since = self.total + 1, self.since + 1
            for layer, decay, total in zip(LAYERS, self.decay, self.total, strict=True):
                kept = F4(1 - 1 / total if np.isnan(decay) else decay)
                for place in (layer.mean, layer.variance):
                    self.vector[place] = kept * self.vector[place] + (1 - kept) * true[place]
        return self

    def bring(self, epoch: int = 0, weight: float = 1) -> np.ndarray:
        found = self._ask(self._numbers(), weight=weight, epoch=epoch)
        self.since = np.zeros(2)
        return found

    def take(self) -> np.ndarray:
        numbers = self._ask(None, weight=0, takes=True)
        self.vector, self.total = numbers[:SIZE].copy(), counts(numbers)
        return self.vector

    def _numbers(self) -> np.ndarray:
        return np.concatenate([self.vector, Moves(self.since, self.decay, self.total).wired()])

    def _ask(self, numbers: np.ndarray | None, **facts: Any) -> np.ndarray:
        if numbers is not None:
            facts["numbers"] = numbers
        ((_, answer),) = self.averages.ask(self.rank, AverageQuery(views=self.views, **facts))
        return answer.numbers


def counts(numbers: np.ndarray) -> np.ndarray:
    return numbers[SIZE:].copy().view(np.float64)


def team(size: int, decay: float | list[float] = 0.99) -> tuple[Averages, list[Worker]]:
    averages = Averages(START, LAYERS)
    return averages, [Worker(averages, rank, decay) for rank in range(1, size + 1)]


def seen(averages: Averages, views: int = 0) -> np.ndarray:
    ((_, answer),) = averages.ask(0, AverageQuery(views=views))
    return answer.numbers.copy()


def plain(batches: int, decay: float | list[float] = 0.99) -> Worker:
    return Worker(Averages(START, LAYERS), 0, decay).train(batches)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("decay", [0.99, 0.9, 0.0, NONE, [0.9, NONE]], ids=str)
@pytest.mark.parametrize("shares", [[7], [4, 3], [50, 49], [3, 2, 2], [1, 0, 5]], ids=str)
def test_workers_with_equal_batches_are_where_one_would_be_that_has_seen_all(
    shares: list[int], decay: Any
) -> None:
    averages, workers = team(len(shares), decay)
    for epoch in range(4):
        for worker, share in zip(workers, shares, strict=True):
            if share:
                worker.train(share).bring(epoch, weight=share)
        want = plain(sum(shares) * (epoch + 1), decay)
        found = seen(averages)
        np.testing.assert_allclose(found[:SIZE], want.vector, rtol=1e-5, atol=1e-5)
        assert counts(found).tolist() == want.total.tolist()
        for worker in workers:
            worker.take()


@exactly
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.99, 0.5, NONE]))
def test_one_worker_has_what_it_has_brought_bit_for_bit(seed: int, decay: float) -> None:
    averages, (worker,) = team(1, decay)
    draw = np.random.default_rng(seed)
    for epoch in range(3):
        for _ in range(draw.integers(1, 5)):
            worker.train(1, np.abs(draw.standard_normal(SIZE)).astype(F4))
        worker.bring(epoch)
        assert bits(seen(averages)[:SIZE]) == bits(worker.vector)
        before = worker.vector.copy()
        assert bits(worker.take()) == bits(before)


@pytest.mark.parametrize("shares", [[5, 5], [4, 3, 3], [7, 1, 2]], ids=str)
def test_a_mean_over_all_batches_is_exact_whatever_they_are(shares: list[int]) -> None:
    draw = np.random.default_rng(4)
    averages, workers = team(len(shares), NONE)
    everything = []
    for epoch in range(3):
        for worker, share in zip(workers, shares, strict=True):
            batches = draw.standard_normal((share, SIZE)).astype(F4) ** 2
            everything += list(batches)
            for one in batches:
                worker.train(1, one)
            worker.bring(epoch)
        found, mean = seen(averages), np.mean(everything, axis=0)
        for place in (place for layer in LAYERS for place in (layer.mean, layer.variance)):
            np.testing.assert_allclose(found[place], mean[place], rtol=2e-6)
        assert counts(found).tolist() == [len(everything)] * 2
        for worker in workers:
            worker.take()


@exactly
@given(st.permutations(range(4)), st.sampled_from([0.99, 0.7, NONE]))
def test_a_round_does_not_depend_on_the_order_of_arrival(order: list[int], decay: float) -> None:
    def outcome(order: list[int]) -> bytes:
        draw = np.random.default_rng(1)
        averages, workers = team(4, decay)
        for epoch in range(3):
            for worker, share in zip(workers, [3, 1, 7, 2], strict=True):
                worker.train(share, draw.standard_normal(SIZE).astype(F4) ** 2)
            for place in order:
                workers[place].bring(epoch, weight=place + 1)
            for worker in workers:
                worker.take()
        return bits(seen(averages))

    assert outcome(order) == outcome([0, 1, 2, 3])


def test_a_worker_that_had_nothing_in_one_epoch_counts_in_its_own_round_in_the_next() -> None:
    def outcome(order: list[int]) -> bytes:
        averages, workers = team(2, 0.9)
        workers[0].train(3, TRUE + 1).bring(0)
        for worker in workers:
            worker.take()
            worker.train(2, TRUE * worker.rank)
        for place in order:
            workers[place].bring(1)
        return bits(seen(averages))

    assert outcome([0, 1]) == outcome([1, 0])


def test_a_worker_that_is_ahead_and_one_that_asks_often_make_all_their_updates() -> None:
    averages, (ahead, behind) = team(2, 0.9)
    for epoch in range(3):
        for _ in range(2):  # in the midst of an epoch it looks at the centre, and goes on from its own
            ahead.train(2).bring(epoch)
        ahead.take()
    behind.train(5).bring(0)
    found, want = seen(averages), plain(17, 0.9)
    np.testing.assert_allclose(found[:SIZE], want.vector, rtol=1e-5)
    assert counts(found).tolist() == [17, 17]


def test_what_is_brought_after_a_view_does_not_count_for_those_who_have_not_had_it() -> None:
    averages, (first, second) = team(2)
    first.train(3).bring(0)
    second.train(3).bring(0)
    before = seen(averages)
    first.views = 1
    first.train(5).bring(1)
    assert bits(seen(averages)) == bits(before)
    assert bits(seen(averages, views=1)) != bits(before)
    assert bits(second.take()) == bits(before[:SIZE])
    second.views = 1
    second.train(5).bring(1)
    np.testing.assert_allclose(seen(averages, views=1)[:SIZE], plain(16).vector, rtol=1e-5)
    assert bits(seen(averages)) == bits(before)


def test_updates_that_a_dead_worker_has_made_stay_made() -> None:
    averages, (first, second) = team(2)
    first.train(3).bring(0)
    assert averages.gone(1, lost=True) == []
    second.train(3).bring(0)
    second.take()
    second.train(4).bring(1)
    np.testing.assert_allclose(seen(averages)[:SIZE], plain(10).vector, rtol=1e-5)


def test_a_layer_that_is_not_moved_stays_what_it_was_bit_for_bit() -> None:
    averages, (first, second) = team(2, [0.9, 0.9])
    for worker in (first, second):
        worker.train(3)
        worker.vector[LAYERS[1].mean], worker.vector[LAYERS[1].variance] = START[5:6], START[6:7]
        worker.since[1] = worker.total[1] = 0
        worker.bring(0)
    assert bits(seen(averages)[5:7]) == bits(START[5:7])
    assert counts(seen(averages)).tolist() == [6, 0]


def test_a_decay_of_one_moves_nothing_and_divides_by_nothing() -> None:
    averages, (first, second) = team(2, 1.0)
    for worker in (first, second):
        worker.train(3).bring(0)
    assert bits(seen(averages)[:SIZE]) == bits(START)


def test_a_worker_that_began_elsewhere_says_what_is_new() -> None:
    averages = Averages(START, LAYERS)
    averages_of_others = Averages(START, LAYERS)
    usual, other = Worker(averages, 1, 0.9), Worker(averages_of_others, 2, 0.9)
    other.train(30, TRUE * 4)  # it was loaded on this rank only
    other.averages, other.since = averages, np.zeros(2)
    other._ask(other._numbers(), weight=0, start=True)
    usual.train(3).bring(0)
    other.train(3).bring(0)
    np.testing.assert_allclose(seen(averages)[:SIZE], plain(6, 0.9).vector, rtol=1e-5)


def _too_few(worker: Worker) -> None:
    worker.since = worker.since / 8  # the layer was called more often than was counted


def _not_known(worker: Worker) -> None:
    worker.since = np.array([NONE, NONE])


def _reset(worker: Worker) -> None:
    worker.since = np.array([-3.0, -3.0])


def _not_counted(worker: Worker) -> None:
    worker.since = np.zeros(2)


@pytest.mark.parametrize("spoil", [_too_few, _not_known, _reset, _not_counted])
def test_where_updates_are_not_known_the_statistics_are_the_mean_of_what_was_brought(spoil: Any) -> None:
    averages, workers = team(2, 0.8)
    little = np.array([2, 1, 0.001, 0.002, 3, 5, 0.003], F4)
    for worker in workers:
        worker.train(8 * worker.rank, little)
        spoil(worker)
        worker.bring(0, weight=worker.rank)
    want = (workers[0].vector.astype(float) + 2 * workers[1].vector) / 3
    np.testing.assert_allclose(seen(averages)[:SIZE], want, rtol=1e-6)


@exactly
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 100, width=32)), min_size=1, max_size=6),
    st.sampled_from([0.999, 0.9, 0.5, 0.0, NONE]),
)
def test_variances_are_never_negative_and_always_numbers(pieces: list[Any], decay: float) -> None:
    _, workers = team(3, decay)
    for epoch, (batches, value) in enumerate(pieces):
        for worker in workers:
            worker.train(batches * worker.rank, np.full(SIZE, value, F4)).bring(epoch)
        for worker in workers:
            found = worker.take()
            assert np.isfinite(found).all()
            assert min(found[[2, 3, 6]]) >= 0


def test_numbers_that_have_diverged_do_not_warn() -> None:
    averages, (first, second) = team(2)
    first.train(3, np.full(SIZE, np.inf, F4)).bring(0)
    second.train(3, np.full(SIZE, np.nan, F4)).bring(0)
    assert not np.isfinite(seen(averages)[:4]).any()


@pytest.mark.parametrize("decay", [0.99, NONE])
def test_state_is_exact_wherever_it_is_taken(decay: float) -> None:
    def outcome(stop: int | None) -> tuple[bytes, ...]:
        draw, where = np.random.default_rng(1), itertools.count()
        averages, workers = team(3, decay)
        found = []

        def reload() -> None:
            nonlocal averages
            if next(where) == stop:
                again = Averages(np.zeros(SIZE, F4), LAYERS)
                again.load(averages.state())
                averages = again
                for worker in workers:
                    worker.averages = averages

        for epoch in range(2):
            for worker in workers:
                worker.train(epoch + worker.rank, draw.standard_normal(SIZE).astype(F4) ** 2)
                reload()
                worker.bring(epoch, weight=2)
                reload()
            for worker in workers:
                worker.take()
                reload()
            found.append(bits(seen(averages)))
        return tuple(found)

    want = outcome(None)
    assert all(outcome(stop) == want for stop in range(18))


def test_with_other_workers_the_averages_are_left_and_nothing_of_the_former_ones() -> None:
    averages, workers = team(3)
    for worker in workers:
        worker.vector[PLAIN] = worker.rank
        worker.train(3).bring(0)
    again = Averages(np.zeros(SIZE, F4), LAYERS)
    again.load(averages.state(), others=True)
    assert bits(seen(again)) == bits(seen(averages))
    newcomer = Worker(again, 1)
    newcomer.take()
    newcomer.vector[PLAIN] = 9
    newcomer.train(2).bring(1)
    assert seen(again)[PLAIN] == 9
    np.testing.assert_allclose(
        seen(again)[[0, 1, 2, 3, 5, 6]], plain(11).vector[[0, 1, 2, 3, 5, 6]], rtol=1e-5
    )


def test_what_all_get_instead_is_that_bit_for_bit_and_is_gone_on_from() -> None:
    averages, (worker, _) = team(2)
    worker.train(3).bring(0)
    numbers = np.concatenate([TRUE, Moves(np.zeros(2), np.ones(2), np.array([5.0, 6.0])).wired()])
    averages.ask(0, AverageQuery(weight=1, views=0, instead=True, numbers=numbers))
    assert bits(worker.take()) == bits(TRUE)
    assert worker.total.tolist() == [5, 6]
    worker.train(9).bring(1)
    np.testing.assert_allclose(seen(averages)[:SIZE], TRUE, rtol=1e-6)
