"""Batches of any source: each sample goes to one worker, in the same order on all ranks; reading ahead."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import Arrays, Batches, Blocks, Field, FileSource, Leases, Prefetch, portion
from tests.helpers.threads import no_new_threads

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=6)
MANY = settings(max_examples=150)
FEW = settings(max_examples=40)


def numbered(lengths):
    """Return samples equal to their numbers, in parts of these lengths."""
    return Arrays(np.arange(sum(lengths)), lengths=lengths)


def samples(batches, epoch=0):
    return [int(number) for (batch,) in batches.epoch(epoch) for number in batch]


# -- the order of blocks -----------------------------------------------------------------------------


def test_an_order_is_what_it_has_always_been():
    """A training that resumes under a newer NumPy must find the same samples."""
    blocks = Blocks([5, 0, 4], block=2, shuffle=True, seed=3)
    assert blocks.ranges(0, 0, 9) == [(7, 9), (4, 5), (2, 4), (5, 7), (0, 2)]
    batches = Batches(numbered([5, 4]), batch_size=4, shuffle=True, seed=3, block=2, window=1)
    assert samples(batches) == [8, 7, 4, 2, 0, 6, 5, 3, 1]


@MANY
@given(LENGTHS, st.integers(1, 9), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_has_each_sample_once_in_slices_of_one_part(lengths, block, seed, epoch):
    blocks = Blocks(lengths, block=block, shuffle=True, seed=seed)
    ranges = blocks.ranges(epoch, 0, sum(lengths))
    assert sorted(number for part in ranges for number in range(*part)) == list(range(sum(lengths)))
    ends = list(itertools.accumulate(lengths))
    for start, stop in ranges:
        assert 0 < stop - start <= block
        assert not any(start < end < stop for end in ends)
    assert ranges == Blocks(lengths, block=block, shuffle=True, seed=seed).ranges(epoch, 0, sum(lengths))


@MANY
@given(LENGTHS, st.integers(1, 9), st.booleans(), st.lists(st.integers(0, 180), max_size=4))
def test_the_parts_of_an_order_are_the_order(lengths, block, shuffle, cuts):
    """Positions [a, b) give the same samples, as a portion or as a lease."""
    size = sum(lengths)
    blocks = Blocks(lengths, block=block, shuffle=shuffle, seed=1)
    whole = [number for part in blocks.ranges(2, 0, size) for number in range(*part)]
    for start, stop in itertools.pairwise(sorted({0, size, *(cut % (size + 1) for cut in cuts)})):
        part = [number for one in blocks.ranges(2, start, stop) for number in range(*one)]
        assert part == whole[start:stop]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(Blocks([64], block=2, shuffle=True, seed=seed).ranges(epoch, 0, 64))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


@MANY
@given(st.integers(0, 100), st.integers(1, 9))
def test_portions_are_even_and_leave_nothing_out(size, workers):
    parts = [portion(size, worker, workers) for worker in range(workers)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(parts))
    assert max(b - a for a, b in parts) - min(b - a for a, b in parts) <= 1


def test_leases_are_ranges_of_the_same_positions():
    """Leases can be read as well as a fixed portion."""
    blocks, leases = Blocks([13, 8], block=3, shuffle=True), Leases(21, workers=[1, 2], unit=2, patient=False)
    read = []
    for rank in itertools.cycle([1, 2, 2]):
        lease = leases.ask(rank, 0)
        if lease is None:
            break
        read += [n for part in blocks.ranges(0, lease.start, lease.stop) for n in range(*part)]
    assert sorted(read) == list(range(21))


# -- batches -----------------------------------------------------------------------------------------


@FEW
@given(
    lengths=LENGTHS,
    workers=st.integers(1, 5),
    batch_size=st.integers(1, 12),
    block=st.none() | st.integers(1, 9),
    window=st.none() | st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_over_all_workers_each_sample_comes_once_in_each_epoch(
    lengths, workers, batch_size, block, window, shuffle, seed
):
    size = sum(lengths)
    for epoch in range(3):
        seen, sizes = [], []
        for worker in range(workers):
            part = portion(size, worker, workers)
            options = {"batch_size": batch_size, "block": block, "window": window, "part": part}
            batches = Batches(numbered(lengths), shuffle=shuffle, seed=seed, **options)
            own = [batch.tolist() for (batch,) in batches.epoch(epoch)]
            assert [len(one) for one in own] == [batches.size_of(index) for index in range(len(batches))]
            assert all(len(one) == batch_size for one in own[:-1])
            # Another rank that asks for the same gets the same, in whatever order it asks.
            other = Batches(numbered(lengths), shuffle=shuffle, seed=seed, **options)
            assert [other.get(epoch, index)[0].tolist() for index in reversed(range(len(own)))] == own[::-1]
            seen += [number for one in own for number in one]
            sizes.append(part[1] - part[0])
        assert sorted(seen) == list(range(size))
        if not shuffle:
            assert seen == list(range(size))


def test_what_lies_side_by_side_is_spread():
    """If data are sorted by class, each batch still has a share of every class."""
    labels = np.repeat(np.arange(10), 2000)
    batches = Batches(Arrays(labels, lengths=[2000] * 10), batch_size=100, shuffle=True)
    shares = np.array([np.bincount(batch, minlength=10) for (batch,) in batches.epoch(0)])
    assert shares.std(axis=0).max() < 4.5  # of a binomial distribution: 3.0
    assert (shares > 0).mean() > 0.98


def test_sizes_are_chosen_by_the_samples():
    class Large(Arrays):
        grain = 48

    small = Batches(numbered([1_000_000]), batch_size=100, shuffle=True)
    assert (small.block, small.window) == (15625, 10000)  # eight megabytes of numbers
    large = Large(np.zeros((1, 30_000), "f4"), lengths=[100_000])
    few = Batches(large, batch_size=100, shuffle=True)
    assert few.block == 48  # as long as a chunk
    assert few.window == 5
    assert few.window * 100 * 120_000 <= 2**26  # bytes


def test_what_was_read_of_another_part_is_forgotten():
    batches = Batches(numbered([20]), batch_size=4, window=2)
    batches.take_part((0, 10))
    assert batches.get(0, 0)[0].tolist() == [0, 1, 2, 3]
    batches.take_part((10, 20))
    assert batches.get(0, 0)[0].tolist() == [10, 11, 12, 13]
    assert samples(batches) == list(range(10, 20))


def test_a_batch_that_there_is_not_is_refused():
    batches = Batches(numbered([5]), batch_size=2)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"batch {index} of 3"):
            batches.get(0, index)


@pytest.mark.parametrize("option", ["batch_size", "block", "window"])
def test_sizes_that_cannot_be_are_refused(option):
    with pytest.raises(ConfigurationError, match=f"{option}=0: must be a whole number of at least 1"):
        Batches(numbered([5]), **{"batch_size": 2, option: 0})


def test_batches_may_go_into_another_process():
    batches = Batches(numbered([50]), batch_size=7, shuffle=True, window=2)
    first = batches.get(0, 0)[0].tolist()
    copy = pickle.loads(pickle.dumps(batches))
    assert copy.get(0, 0)[0].tolist() == first
    assert samples(copy) == samples(batches)


# -- reading ahead -----------------------------------------------------------------------------------


def test_the_next_is_read_while_this_one_is_used():
    """Uses events, not times: item 1 is read while item 0 is in use, or the test hangs."""
    begun, go_on = threading.Event(), threading.Event()
    readers = []

    def read(key):
        readers.append(threading.current_thread())
        if key == 1:
            begun.set()
            assert go_on.wait(20)
        return key * 10

    with no_new_threads():
        ahead = Prefetch(read)
        assert ahead.get(0, then=[1]) == 0
        assert begun.wait(20)  # 0 is here, and 1 is being read
        assert ahead.get(0, then=[1]) == 0
        go_on.set()
        assert ahead.get(1) == 10
        assert len(readers) == 2  # nothing was read twice
        assert readers[0] is threading.main_thread()
        assert readers[1] is not threading.main_thread()
        ahead.close()


def test_one_thread_reads_at_a_time_and_at_most_two_items_are_there():
    alive, most, reading, busy = set(), [], threading.Lock(), []

    class Item:
        def __init__(self, key):
            self.key = key
            alive.add(key)

        def __del__(self):
            alive.discard(self.key)

    def read(key):
        busy.append(reading.acquire(blocking=False))
        item = Item(key)
        most.append(len(alive))
        reading.release()
        return item

    ahead = Prefetch(read)
    for key in range(20):
        assert ahead.get(key, then=[key + 1]).key == key
    for key in (3, 2, 9):  # which nobody has read ahead
        assert ahead.get(key, then=[key + 1]).key == key
    ahead.close()
    assert all(busy)
    assert max(most) <= 2
    assert not alive


def until(true):
    for _ in range(20_000):
        if true():
            return
        time.sleep(1e-3)
    pytest.fail("it never came")


def test_as_many_are_read_ahead_as_last_for_the_time_asked_for():
    """A late answer of the disk is then no wait: the items that are here last until it comes."""
    now_s, read, late = [0.0], [], threading.Event()

    def reading(key):
        if key == 7:
            assert late.wait(20)
        read.append(key)
        return key

    def used(key, seconds):
        found = ahead.get(key, then=range(key + 1, 100))
        now_s[0] += seconds
        return found

    ahead = Prefetch(reading, ahead_s=2.0, most=5, clock=lambda: now_s[0])
    assert used(0, 0.9) == 0  # nobody knows yet how long an item lasts
    until(lambda: read == [0, 1])
    assert used(1, 0.5) == 1  # by the first one, three last for two seconds
    until(lambda: read == [0, 1, 2, 3, 4])
    assert used(2, 0.1) == 2  # now four
    until(lambda: read == [0, 1, 2, 3, 4, 5, 6])
    assert [used(key, 0.1) for key in range(3, 7)] == [
        3,
        4,
        5,
        6,
    ]  # all five were wanted; the seventh is late
    assert read == [0, 1, 2, 3, 4, 5, 6]
    late.set()
    assert used(7, 9.0) == 7
    until(lambda: read[-1] == 12)  # five more
    assert used(8, 9.0) == 8  # one is enough again
    assert [*ahead._reads._found] == [9]
    ahead.close()
    assert read == [*range(13)]


def test_where_no_thread_starts_the_next_call_reads(monkeypatch):
    ahead = Prefetch(lambda key: key)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            ahead.get(0, then=[1])
    assert [ahead.get(key, then=[key + 1]) for key in range(3)] == [0, 1, 2]
    ahead.close()


def test_what_nobody_wants_any_more_is_not_read():
    begun, go_on, read = threading.Event(), threading.Event(), []

    def reading(key):
        read.append(key)
        if key == 1:
            begun.set()
            assert go_on.wait(20)
        return key

    ahead = Prefetch(reading, ahead_s=9.0, most=3, clock=lambda: 0.0)
    ahead.get(0)
    ahead._lasts_s = 1.0
    ahead.get(0, then=[1, 2, 3])
    assert begun.wait(20)
    ahead.get(0, then=[1, 5])
    go_on.set()
    assert [ahead.get(1), ahead.get(5)] == [1, 5]
    assert read == [0, 1, 5]
    ahead.close()


def test_what_goes_wrong_in_the_thread_is_raised_where_the_item_is_asked_for():
    class DiskError(Exception):
        pass

    broken = {2}

    def read(key):
        if key in broken:
            raise DiskError(f"no {key}")
        return key

    with no_new_threads():
        ahead = Prefetch(read)
        assert ahead.get(1, then=[2]) == 1
        assert ahead.get(1) == 1  # which is as good as ever
        with pytest.raises(DiskError, match="no 2"):
            ahead.get(2, then=[3])
        broken.clear()
        assert ahead.get(2, then=[3]) == 2  # once more
        ahead.close()


def test_breaking_off_leaves_no_thread_behind():
    with no_new_threads():
        batches = Batches(numbered([1000]), batch_size=10, window=1)
        next(batches.epoch(0))
        batches.close()
        iterator = batches.epoch(1)
        next(iterator)
        del iterator
        batches.close()


def test_a_forked_process_reads_by_itself():
    """A copy has no reading thread, and must not wait for it."""
    go_on = threading.Event()

    def read(key):
        if key == 1 and os.getpid() == parent:
            go_on.wait(20)
        return key

    parent, ahead = os.getpid(), Prefetch(read)
    assert ahead.get(0, then=[1]) == 0
    child = os.fork()
    if child == 0:
        os._exit(0 if ahead.get(1, then=[2]) == 1 and ahead.get(2) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    assert ahead.get(1) == 1


class Noted(Arrays):
    """Reports the reads that have begun."""

    def __init__(self, size, window):
        super().__init__(np.arange(size))
        self.begun = {start: threading.Event() for start in range(0, size, window)}

    def read(self, start, stop, out):
        self.begun[start].set()
        super().read(start, stop, out)


def test_the_next_window_is_read_while_a_batch_is_computed():
    source = Noted(50, 10)
    for number, _ in enumerate(Batches(source, batch_size=10, window=1).epoch(0), 1):
        assert number == 5 or source.begun[10 * number].wait(30)


def test_a_field_knows_its_bytes():
    assert Field("x", (), np.dtype("f8")).row_bytes == 8


@pytest.mark.parametrize(("rows", "batch_size"), [(40_000, 20), (40_000, 7), (2_000, 400)])
@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_batch_that_is_kept_keeps_no_window(rows, batch_size, cache):
    """Of each window a batch is kept, as for a picture: with it stays a megabyte, or as much as it has."""
    columns = {"x": np.arange(rows)[:, None] + np.zeros((1, 100), "f4"), "n": np.arange(rows)}
    source = FileSource(columns, features="x", labels="n", cache=cache)
    batches = Batches(source, batch_size=batch_size, shuffle=True)
    kept, seen = [], []
    for number, (x, n) in enumerate(batches.epoch(0)):
        seen += n.tolist()
        if number % batches.window == 1:
            kept.append((x, n, n.copy()))
    assert kept
    assert sorted(seen) == [*range(rows)]
    for x, n, numbers in kept:
        held = sum(one.nbytes if one.base is None else one.base.nbytes for one in (x, n))
        assert held <= max(2**20, x.nbytes + n.nbytes)
        assert n.tolist() == x[:, 0].tolist() == numbers.tolist(), "nothing else fills what is kept"
    batches.close()
    source.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_small_batch_takes_few_calls(shuffle):
    """The time of small batches is that of Python: what can be done for a whole window is."""
    columns = {"x": np.zeros((2000, 3), "f4"), "y": np.zeros(2000)}
    source, calls = FileSource(columns, features="x", labels="y"), 0
    batches = Batches(source, batch_size=10, window=100, shuffle=shuffle)
    batches._read(batches._window(0, 0))

    def counted(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        batches._read(batches._window(0, 1))
    finally:
        sys.setprofile(before)
    assert calls / 100 < 8
