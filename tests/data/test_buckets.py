"""Batches of rows of like length: every sample once, for any ranks and leases, with little filling."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data import Batches, FileBatches, FileSource, portion

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
    from nnlo_common.data import Lease

    batches = batches_of(path, assignment="dynamic")
    window = batches.window_size
    whole = [batch[1].tolist() for batch in batches.epoch(3)]
    leased = []
    for start in range(0, SAMPLES, 10):
        stop = min(start + 10, SAMPLES)
        leased += [one[1].tolist() for one in batches.leased(Lease(3, start, stop), None)]
    batches.close()
    assert leased == whole
    assert window >= 10


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
