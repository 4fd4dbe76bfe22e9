"""Samples of rare classes come more often: exactly evenly, for any format, ranks, leases and cuts."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import FileBatches, FileSource, Lease, Vocabulary
from nnlo_common.data._selection import evenly, value_of_each
from tests.helpers.format_files import WITH_TEXTS, make


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80))
def test_all_classes_come_as_often_and_the_samples_of_each_nearly(values):
    values = np.array(values)
    passes = list(evenly(values, "balance='y'"))
    assert all((np.diff(one) > 0).all() for one in passes)
    assert passes[0].tolist() == list(range(len(values)))
    times = Counter(np.concatenate(passes).tolist())
    largest = max(Counter(values.tolist()).values())
    for one in set(values.tolist()):
        own = [times[number] for number in np.flatnonzero(values == one).tolist()]
        assert sum(own) == largest
        assert max(own) - min(own) <= 1


def test_those_that_come_once_more_are_spread_over_the_class():
    values = np.array([0] * 15 + [1] * 10)
    _, again = evenly(values, "balance='y'")
    assert np.diff(again).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (np.arange(2000), r"2000 different values, such as 0: these are no classes"),
        (np.array([0.5, 1.5, 0.5]), r"2 different values, such as 0.5: these are no classes"),
        (np.array([0.0, np.nan]), r"2 different values, such as nan: these are no classes"),
        (np.array([*map(str, range(2000))], object), r"2000 different values, such as '0': these are no"),
        (
            np.array(["mu"] * 10_001 + ["tau"], object),
            r"1 sample of 10002 with the value 'tau' would come 10001 times",
        ),
        (
            np.array([0] * 10_001 + [3]),
            r"1 sample of 10002 with the value 3 would come 10001 times",
        ),
    ],
)
def test_no_classes_are_refused(values, found):
    with pytest.raises(ConfigurationError, match="balance='y'.*" + found):
        list(evenly(values, "balance='y'"))


SIZES = (40, 3, 57)


@pytest.fixture
def files(tmp_path):
    draw = np.random.default_rng(1)
    at = 0
    for index, size in enumerate(SIZES):
        with h5py.File(tmp_path / f"{index}.h5", "w") as file:
            label = (draw.random(size) < 0.2).astype("i4")
            file["x"] = np.arange(at, at + size, dtype="f4")[:, None]
            file["y"], file["hot"] = label, np.eye(2, dtype="f4")[label]
            file["wide"] = np.ones((size, 3))
        at += size
    return str(tmp_path / "*.h5")


def labels_of(files):
    return value_of_each(FileSource(files, features="y", cache="none"), "y")


def opened(files, **options):
    options = {"balance": "y", "cache": "none", **options}
    return FileBatches(
        files,
        "Batches",
        trained_on=True,
        batch_size=7,
        block=5,
        window=3,
        features="x",
        labels="y",
        **options,
    )


def expected(files):
    return Counter(np.concatenate(list(evenly(labels_of(files), "y"))).tolist())


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("balance", ["y", "hot"])
def test_an_epoch_has_each_class_as_often_over_all_shares(files, workers, cache, balance):
    labels = labels_of(files)
    for epoch in range(2):
        seen = Counter[int]()
        for worker in range(workers):
            batches = opened(files, balance=balance, cache=cache)
            batches.take_share(worker, workers)
            for x, y in batches.epoch(epoch):
                numbers = x[:, 0].astype(int)
                np.testing.assert_array_equal(y, labels[numbers])
                seen.update(numbers.tolist())
            batches.close()
        assert seen == expected(files)


def test_an_epoch_has_each_class_as_often_over_all_leases(files):
    batches = opened(files, assignment="dynamic")
    seen, start = Counter[int](), 0
    while start < batches.size:
        size = min(batches.window_size, batches.size - start)
        for x, _ in batches.leased(Lease(0, start, start + size)):
            seen.update(x[:, 0].astype(int).tolist())
        start += size
    assert seen == expected(files)
    batches.close()


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize("kind", WITH_TEXTS)
def test_texts_are_classes_in_every_format(kind, cache, tmp_path):
    for package in ("pyarrow", "uproot", "zarr"):
        pytest.importorskip(package, reason="the environment for MPICH has no readers of files")
    texts = np.array(["mu", "e", "mu", "tau", "mu", "mu", "e"])
    files = [
        make(kind, tmp_path / name, {"x": np.arange(len(some)) + start, "kind": some})
        for name, start, some in (("a", 0, texts[:3]), ("b", 3, texts[3:]))
    ]
    options = {"balance": "kind", "cache": cache}
    with closing(FileSource(files, features="x", **options)) as source:
        (x,) = source.take(0, len(source))
    expected = np.concatenate(list(evenly(np.array([1, 0, 1, 2, 1, 1, 0]), "balance='kind'")))
    assert x.tolist() == expected.tolist()
    indices = Vocabulary({"kind": dict.fromkeys(texts.tolist(), 1)})
    with closing(FileSource(files, features="x", labels="kind", vocabulary=indices, **options)) as source:
        _, y = source.take(0, len(source))
    assert np.bincount(y).tolist() == [0, 4, 4, 4]


def test_texts_that_are_no_classes_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["pairs"] = np.arange(3), np.array([[b"a", b"b"]] * 3)
        file["odd"] = np.array([b"a", b"\xff", b"a"])
    for name, found in {"pairs": r"balance='pairs' has rows of shape \[2\]", "odd": "/odd cannot be"}.items():
        with pytest.raises(ConfigurationError, match=found):
            FileSource(tmp_path / "a.h5", features="x", balance=name)
    columns = {"x": [1.0, 2.0], "kind": np.array([b"a", b"\xff"])}
    with pytest.raises(ConfigurationError, match="balance='kind': 'utf-8' codec"):
        FileSource(columns, features="x", balance="kind")
    for values in (["a", None], ["a", 1]):
        with pytest.raises(ConfigurationError, match=r"balance='kind'.* is no text"):
            FileSource({"x": [1.0, 2.0], "kind": np.array(values, object)}, features="x", balance="kind")


def test_the_same_sample_is_not_twice_in_a_batch_read_in_order(files):
    batches = opened(files, shuffle=False)
    repeated = [x for x, _ in batches.epoch(0) if len(np.unique(x)) < len(x)]
    assert len(repeated) <= 4  # only where one pass ends and the next begins
    batches.close()


def test_cuts_and_numbers_of_samples_come_first(files):
    source = FileSource(
        files, features="x", labels="y", select="y < 5", samples=range(10, 60), balance="y", cache="none"
    )
    x, y = source.take(0, len(source))
    numbers = x[:, 0].astype(int)
    assert set(numbers.tolist()) == set(range(10, 60))
    assert np.bincount(y).tolist() == [max(np.bincount(labels_of(files)[10:60]))] * 2
    source.close()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("wide", r"balance='wide' has rows of shape \[3\], which are not one-hot"),
        ("z", "has no dataset 'z'|no 'z'"),
    ],
)
def test_a_column_that_is_no_class_is_refused(files, name, found):
    with pytest.raises(ConfigurationError, match=found):
        opened(files, balance=name)
