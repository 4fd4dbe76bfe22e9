"""Reducers: all ways to add up the gradients of a group, their choice, and what is refused."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest

from nnlo_common import SGD, ConfigurationError, Downpour, Participant, PeerLostError
from nnlo_common.base._flat_vector import PRESENT, FlatVector, laid_out
from nnlo_common.cluster.transport import _shared_memory
from nnlo_common.cluster.transport._shared_memory import shared_memory
from nnlo_common.training import _all_reduce
from nnlo_common.training._all_reduce import (
    BFloat16Reducer,
    MPIReducer,
    SharedReducer,
    ThreadReducer,
    reducer_of,
)
from tests.helpers.group_cases import SIZES, close, merged, train_grouped
from tests.helpers.threads import on_ranks, ranks

LENGTHS = [1, 7, 11, 53]  # pieces have 7 numbers here


def vectors(rank):
    draw = np.random.default_rng(rank)
    return [draw.standard_normal(length).astype("f4") for length in LENGTHS]


def sums(size, make):
    """What each rank gets for all vectors, two of them under way at once."""

    def program(world):
        group = world.group(range(size), naps=False)
        reducer, own = make(group), vectors(world.rank)
        for start in range(0, len(own), 2):
            for one in own[start : start + 2]:
                reducer.start(one)
            reducer.finish()
        reducer.close()
        group.close()
        return own

    return on_ranks(size, program)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("make", [MPIReducer, SharedReducer, ThreadReducer])
def test_all_ranks_get_the_bits_of_one_sum(make, size, monkeypatch):
    monkeypatch.setattr(_all_reduce, "_PIECE", 7)
    for index, length in enumerate(LENGTHS):
        expected = np.zeros(length, "f4")
        for rank in range(size):
            expected += vectors(rank)[index]
        for found in sums(size, make):
            assert np.array_equal(found[index], expected)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("way", ["mpi", "shared"])
def test_a_group_is_one_rank_with_the_large_batch_by_each_way(way, servers):
    def program(world):
        return train_grouped("easgd", SIZES, world=world, servers=servers, group_size=3, all_reduce=way)

    found = on_ranks(servers + 3, program)
    *_, expected = on_ranks(
        servers + 1, lambda world: train_grouped("easgd", merged(SIZES, 3), world=world, servers=1)
    )
    for parameters, _, _ in found[servers:]:
        assert close(parameters, expected[0])
        assert np.array_equal(parameters, found[-1][0])


def test_memory_is_shared_and_leaves_nothing_behind(tmp_path):
    def program(world):
        memory = shared_memory(world.group(range(3), naps=False), 5, tmp_path)
        memory[world.rank][:] = world.rank + 1
        world.gather_text("")
        return [one.tolist() for one in memory]

    assert on_ranks(3, program) == [[[1.0] * 5, [2.0] * 5, [3.0] * 5]] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("misses", [0, 2])
def test_without_shared_memory_on_one_rank_all_take_mpi_and_say_why(misses, tmp_path, monkeypatch, caplog):
    real, calls = _shared_memory._mapped, []

    def mapped(path, count, *, create):
        calls.append(create)
        if create == (misses == 0) and len(calls) > misses:
            return None, "no room"
        return real(path, count, create=create)

    monkeypatch.setattr(_shared_memory, "_mapped", mapped)
    monkeypatch.setattr(_all_reduce, "shared_memory", partial(shared_memory, folder=tmp_path))

    def program(world):
        group = world.group(range(3), naps=False)
        reducer, vector = reducer_of("shared", group, one_host=False), np.ones(3, "f4")
        reducer.start(vector)
        reducer.finish()
        return reducer.name, vector.tolist()

    with caplog.at_level(logging.INFO):
        assert on_ranks(3, program) == [("mpi", [3.0] * 3)] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "of ranks [0, 1, 2] are added up by the MPI library, in pieces" in record.message
    assert record.message.endswith("cannot share memory with its group (no room)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("one_host", "name"), [(True, "shared"), (False, "mpi")])
def test_it_is_chosen_and_shown(one_host, name, caplog):
    def program(world):
        return reducer_of("auto", world.group(range(2), naps=False), one_host=one_host).name

    with caplog.at_level(logging.INFO):
        assert on_ranks(2, program) == [name] * 2
    (record,) = caplog.records
    assert f"(all_reduce={name!r})" in record.message


def test_a_thread_tells_what_it_has_met():
    def program(world):
        reducer = ThreadReducer(world.group(range(2), naps=False))
        try:
            if world.rank == 0:
                reducer.start(np.ones(3, "f4"))
                reducer.finish()
        finally:
            reducer.close()

    with ranks(2) as cluster, pytest.raises(PeerLostError, match="rank 1: ended while its group waited"):
        cluster.run(program)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": 0, "all_reduce": "share"}, r"all_reduce='share' is not known; use one of 'auto' \("),
        (
            {"servers": 0, "all_reduce": "thread"},
            "'thread'.* only with the wrappers of nnlo_torch; use",
        ),
        ({"all_reduce": "mpi"}, "there are no groups .* give group_size=, or servers=0"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_training(options, text):
    with pytest.raises(ConfigurationError, match=f"Participant: all_reduce=.*{text[-20:]}") as raised:
        Participant(Downpour(), [np.zeros(1, "f4")], optimizer=SGD(0.1), **options)
    assert raised.match(text)


def test_ranks_that_ask_for_different_ways_are_named():
    def program(world):
        return train_grouped(
            "downpour", [1], world=world, servers=0, all_reduce=("mpi", "shared")[world.rank]
        )

    with pytest.raises(ConfigurationError, match="all_reduce='mpi' on rank 0 but 'shared', on rank 1"):
        on_ranks(2, program)


# -- sums of numbers in 16 bits ---------------------------------------------------------------------------

STEPS, LENGTH = 40, 53


def rounded(y):
    """The nearest number with 8 bits of precision, by exact arithmetic."""
    mantissa, exponent = np.frexp(y.astype(np.float64))
    return np.ldexp(np.floor(np.abs(mantissa) * 256 + 0.5) * np.sign(mantissa) / 256, exponent)


def drawn(rank, step, length=LENGTH):
    scale = 10.0 ** np.random.default_rng(step).integers(-4, 3)
    return (scale * np.random.default_rng([rank, step]).standard_normal(length)).astype("f4")


def whole(rank, step):
    """Whole numbers, with which float32 makes no error of its own."""
    return np.random.default_rng([rank, step]).integers(-5000, 5000, LENGTH).astype("f4")


def in_16_bits(size, steps=STEPS, *, gradient=drawn, layout=None):
    """What each rank gets in each step, and its residual after all."""
    own_layout = FlatVector.of([np.zeros(LENGTH, "f4")]).layout if layout is None else layout

    def program(world):
        group = world.group(range(size), naps=False)
        reducer, found = BFloat16Reducer(group), []
        reducer.fit(own_layout)
        for step in range(steps):
            vector = gradient(world.rank, step)
            for start in (0, 20):  # in two parts
                reducer.start(vector[start : 20 if start == 0 else None], start)
            found.append(vector)
        return found, reducer.state()

    return on_ranks(size, program)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("piece", [7, 1 << 22])
def test_sums_in_16_bits_are_those_of_float64_with_residuals(size, piece, monkeypatch):
    monkeypatch.setattr(_all_reduce, "_LONG_PIECE", piece)
    residuals = np.zeros((size, LENGTH))
    results = in_16_bits(size, gradient=whole)
    for step in range(STEPS):
        sent = np.array([whole(rank, step).astype(np.float64) for rank in range(size)]) + residuals
        travelled = rounded(sent)
        residuals = sent - travelled
        total = travelled.sum(0)
        told = rounded(total)
        for rank, owned in enumerate(owners(size, piece)):
            residuals[rank][owned] += (total - told)[owned]
        for found, _ in results:
            assert np.array_equal(found[step], told)
    for (_, residual), expected in zip(results, residuals, strict=True):
        assert np.array_equal(residual, expected)


def owners(size, piece):
    """The places whose sums each rank makes."""
    found = [[] for _ in range(size)]
    for part in (range(20), range(20, LENGTH)):
        for start in range(0, len(part), piece):
            here = part[start : start + piece]
            width = -(-len(here) // size)
            for rank in range(size):
                found[rank] += list(here[rank * width : (rank + 1) * width])
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_16_bits_nothing_is_lost_but_the_last_residuals(size):
    results = in_16_bits(size)
    applied = np.sum([one.astype(np.float64) for one in results[0][0]], 0)
    sent = np.sum([drawn(rank, step).astype(np.float64) for rank in range(size) for step in range(STEPS)], 0)
    left = np.sum([residual.astype(np.float64) for _, residual in results], 0)
    largest = max(float(np.abs(drawn(rank, step)).max()) for rank in range(size) for step in range(STEPS))
    assert np.abs(applied + left - sent).max() < 1e-5 * largest
    assert np.abs(left).max() > 0


def test_in_16_bits_what_waits_for_an_array_without_a_gradient_is_kept():
    layout = laid_out([("a", (10,), "f4", 1), ("b", (20,), "f4", 2)], padded=True)
    marks = layout.marks()

    def gradient(rank, step):
        vector = np.zeros(layout.size, "f4")
        for index, one in enumerate(layout.segments):
            if (index, step) != (0, 2):
                vector[one.place] = np.random.default_rng([rank, step, index]).standard_normal(one.size)
                vector[marks[index]] = PRESENT
        return vector

    before, after = (in_16_bits(3, steps, gradient=gradient, layout=layout) for steps in (2, 3))
    for (_, residual), (found, later) in zip(before, after, strict=True):
        skipped = layout.segments[0].place
        assert residual[skipped].any()
        assert np.array_equal(later[skipped], residual[skipped])
        assert not found[2][skipped].any()


def test_a_step_that_is_not_finite_leaves_nothing_behind():
    def gradient(rank, step):
        vector = np.ones(LENGTH, "f4")
        if step == 1 and rank == 1:
            vector[[3, 30]] = np.inf, np.nan
        return vector

    for found, residual in in_16_bits(3, 3, gradient=gradient):
        assert np.isinf(found[1][3])
        assert np.isnan(found[1][30])
        assert np.isfinite(np.delete(found[1], [3, 30])).all()
        assert np.array_equal(found[2], np.full(LENGTH, 3, "f4"))
        assert np.isfinite(residual).all()


def test_marks_of_gradients_are_not_smeared():
    """A mark says that a parameter has a gradient; it is 0 where none has, whatever came before."""
    table = [("w", (19,), "float32", 0), ("b", (31,), "float32", 1)]
    layout = laid_out(table)
    marks = layout.unused_marks(slice(0, layout.size))

    def gradient(rank, step):
        vector = np.full(LENGTH, 1 / 3, "f4")
        vector = np.resize(vector, layout.size)
        vector[marks] = PRESENT * np.float32(1 / 3) if step == 0 else 0
        return vector

    for found, _ in in_16_bits(3, 3, gradient=gradient, layout=layout):
        assert (found[0][marks] > 0).all()
        assert not found[1][marks].any()
        assert not found[2][marks].any()
