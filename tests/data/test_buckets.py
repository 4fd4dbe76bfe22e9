"""Batches of rows of like length: every sample once, for any ranks and leases, with little filling."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import Batches, FileBatches, FileSource, Lease, portion
from nnlo_common.data._selection import evenly

pa = pytest.importorskip("pyarrow", reason="the environment for MPICH has no pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SAMPLES, PAD = 211, 12


@pytest.fixture
def path(tmp_path):
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 15, SAMPLES)
    rows = [(100 * number + np.arange(length)).astype("f4") for number, length in enumerate(lengths)]
    pq.write_table(
        pa.table({"hits": rows, "n": np.arange(SAMPLES)}), tmp_path / "a.parquet", row_group_size=50
    )
    return str(tmp_path / "a.parquet")


def batches_of(path, **options):
    reading = {
        "features": "hits",
        "labels": "n",
        "pad": PAD,
        "mask": True,
        "cache": options.pop("cache", "none"),
    }
    return FileBatches(
        path, "Batches", trained_on=True, batch_size=10, block=7, window=6, bucket=True, **reading, **options
    )


def check(batch):
    """Each row has its own numbers, and the longest has no filling."""
    (hits, mask), numbers = batch
    lengths = mask.sum(1)
    assert hits.shape == mask.shape
    assert hits.shape[1] == max(1, lengths.max())
    for row, length, number in zip(hits, lengths, numbers, strict=True):
        np.testing.assert_array_equal(row[:length], 100 * number + np.arange(length))
        assert not row[length:].any()
    return numbers.tolist(), int(hits.size), int(lengths.sum())


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_sample_comes_once_with_little_filling(path, workers, shuffle, cache):
    for epoch in range(2):
        seen, held, filled = [], 0, 0
        for worker in range(workers):
            batches = batches_of(path, shuffle=shuffle, cache=cache)
            batches.take_share(worker, workers)
            for index, batch in enumerate(batches.epoch(epoch)):
                numbers, size, entries = check(batch)
                assert len(numbers) == batches.size_of(index) or batches.size_of(index) == 0
                seen += numbers if batches.size_of(index) else []
                held, filled = held + size, filled + size - entries
            batches.close()
        assert sorted(seen) == list(range(SAMPLES))
        assert filled / held < 0.22  # one length for all has a share of 0.44


def test_the_order_of_batches_is_random_and_that_of_an_epoch_its_own(path):
    batches = batches_of(path)
    orders = [[batch[1].tolist() for batch in batches.epoch(epoch)] for epoch in (0, 0, 1)]
    longest = [batch[0][0].shape[1] for batch in batches.epoch(0)]
    batches.close()
    assert orders[0] == orders[1] != orders[2]
    assert longest[:6] != sorted(longest[:6])


def test_leases_are_parts_of_the_same_batches(path):
    batches = batches_of(path, assignment="dynamic")
    window = batches.window_size
    whole = [batch[1].tolist() for batch in batches.epoch(3)]
    leased = []
    for start in range(0, SAMPLES, 10):
        stop = min(start + 10, SAMPLES)
        leased += [one[1].tolist() for one in batches.leased(Lease(3, start, stop))]
    batches.close()
    assert leased == whole
    assert window >= 10


MANY = 53
LENGTHS = [number * 7 % 5 for number in range(MANY)]
CLASSES = np.repeat(range(5), [23, 13, 11, 5, 1])
OPTIONS = {
    "kind": st.sampled_from(["bucket", "balance"]),
    "batch_size": st.integers(1, 9),
    "window": st.integers(1, 4),
    "block": st.integers(1, 9),
    "shuffle": st.booleans(),
}


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Makes batches of samples with numbers, and says how often each comes in an epoch."""
    path = tmp_path_factory.mktemp("numbered") / "a.parquet"
    numbers = np.arange(MANY)
    columns = {"n": numbers, "w": numbers / 2, "class": CLASSES}
    columns["rows"] = [[float(number)] * length for number, length in zip(numbers, LENGTHS, strict=True)]
    pq.write_table(pa.table(columns), path, row_group_size=17)

    def made(kind, assignment, **options):
        special = {"features": "n", "balance": "class"}
        if kind == "bucket":
            special = {"features": "rows", "pad": 5, "mask": True, "bucket": True}
        options |= {"labels": "n", "weights": "w", "cache": "none", "assignment": assignment}
        return FileBatches(path, "Batches", trained_on=True, **options, **special)

    balanced = np.concatenate([*evenly(CLASSES, "balance='class'")]).tolist()
    return made, {"bucket": Counter(range(MANY)), "balance": Counter(balanced)}


def numbers_of(kind, batch):
    """The samples of a batch, whose rows and weights are theirs."""
    features, numbers, weights = batch
    np.testing.assert_array_equal(weights, numbers / 2)
    if kind == "bucket":
        rows, mask = features
        np.testing.assert_array_equal(mask.sum(1), [LENGTHS[number] for number in numbers])
        np.testing.assert_array_equal(rows, mask * numbers[:, None])
        assert rows.shape[1] == max(1, mask.sum(1).max())
    return numbers.tolist()


@settings(max_examples=40)
@given(group_size=st.integers(1, 3), cut=st.sets(st.integers(0, 60)), epoch=st.integers(0, 2), **OPTIONS)
def test_leases_of_groups_that_resume_anywhere_are_an_epoch(
    numbered, group_size, cut, epoch, kind, **options
):
    """A lease ends where a window does, or where the training was broken off; another process resumes."""
    made, expected = numbered
    seen, shapes, repeated = Counter(), set(), Counter()
    for member in range(group_size):
        batches = made(kind, "dynamic", **options)
        batches.take_member(member, group_size)
        window, size, start, sizes = batches.window_size, batches.batch_size, 0, []
        while start < batches.leasable:
            end = min(start - start % window + window, batches.leasable)
            stop = min([end, *(one * size for one in cut if start < one * size < end)])
            for batch in batches.leased(Lease(epoch, start, stop)):
                seen.update(numbers_of(kind, batch))
                sizes.append(len(batch[1]))
            if stop < end:
                batches.close()
                batches = made(kind, "dynamic", **options)
                batches.take_member(member, group_size)
            start = stop
        if batches.left_over:
            batch, weight = batches.rest(epoch)
            (seen if weight else repeated).update(numbers_of(kind, batch))
        batches.close()
        shapes.add(tuple(sizes))
    assert seen == expected[kind]
    assert len(shapes) == 1, "the ranks of a group have unlike batches"
    assert repeated.total() == -seen.total() % group_size


@settings(max_examples=20)
@given(
    groups=st.integers(1, 3),
    group_size=st.integers(1, 3),
    at=st.integers(0, 30),
    epoch=st.integers(0, 2),
    **OPTIONS,
)
def test_shares_of_groups_that_resume_anywhere_are_an_epoch(
    numbered, groups, group_size, at, epoch, kind, **options
):
    made, expected = numbered
    seen, lengths = Counter(), {}
    for worker in range(groups * group_size):
        whole, before, after = (made(kind, "static", **options) for _ in range(3))
        for batches in (whole, before, after):
            batches.take_share(worker, groups * group_size, group_size)
        count, found = len(whole), []
        for index in range(count):
            batch = (before if index < at else after).get(epoch, index)
            found.append(numbers_of(kind, batch))
            if whole.size_of(index):
                assert len(found[-1]) == whole.size_of(index)
                seen.update(found[-1])
        assert found == [numbers_of(kind, batch) for batch in whole.epoch(epoch)]
        lengths.setdefault(worker % groups, set()).add(count)
        for batches in (whole, before, after):
            batches.close()
    assert seen == expected[kind]
    assert all(len(counts) == 1 for counts in lengths.values())


def test_a_state_of_other_batches_is_refused(path):
    bucketed = batches_of(path)
    plain = FileBatches(path, "Batches", trained_on=True, batch_size=10, features="hits", pad=PAD)
    with pytest.raises(ConfigurationError, match="the saved state is for"):
        bucketed.check(plain.position())
    bucketed.close()
    plain.close()


def test_rows_of_one_length_are_refused(path):
    with pytest.raises(ConfigurationError, match="bucket=True is for rows of unequal length"):
        FileBatches(path, "Batches", trained_on=True, features="n", bucket=True)


def test_a_source_that_stays_whole(path):
    """Without bucket each batch has the stated length."""
    source = FileSource(path, features="hits", pad=PAD, cache="none")
    for (hits,) in Batches(source, batch_size=10, part=portion(SAMPLES, 0, 1)).epoch(0):
        assert hits.shape[1] == PAD
    source.close()
