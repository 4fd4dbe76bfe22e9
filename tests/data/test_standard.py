"""Mean and spread of features: those of NumPy, the same for any division, without what fills up rows."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import FileSource, Standard
from nnlo_common.data._preparation import Moments, Quantiles, as_lists, from_lists
from nnlo_common.data.formats._format import Ragged
from nnlo_common.data.formats._table import fill_padded


def scaled(array):
    return (array - array.mean(0)) / np.where(array.std(0) > 0, array.std(0), 1)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_division_has_the_moments_of_the_whole(data):
    size, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 3))
    array = np.random.default_rng(data.draw(st.integers(0, 99))).normal(3, 5, (size, columns))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    parts = [
        from_lists(as_lists([Moments.of(array[start:stop])] if start < stop else []))
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True)
    ]
    standard = Standard.measured(parts)
    np.testing.assert_allclose(standard.applied(array), scaled(array), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_division_has_the_quantiles_of_the_whole(data):
    """Exactly where a message has room for all numbers; else to a few parts in a thousand of all samples."""
    size, columns = data.draw(st.integers(1, 9000)), data.draw(st.integers(1, 2))
    array = np.random.default_rng(data.draw(st.integers(0, 99))).standard_cauchy((size, columns))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    parts = [
        from_lists(as_lists([Quantiles.of(array[start:stop])] if start < stop else []))
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True)
    ]
    whole = Quantiles.together([part[0] for part in parts if part])
    assert whole.count.tolist() == [size] * columns
    for share in (0.1, 0.16, 0.5, 0.84, 0.9):
        below = (array <= whole.at(share)).mean(0)
        np.testing.assert_allclose(below, share, atol=0.006 + 1 / size)
    if all(part[0].count[0] <= 257 for part in parts if part):
        np.testing.assert_allclose(whole.mean, np.median(array, axis=0), 1e-12)
    found = Standard.measured(parts).applied(array)
    scale = np.where(whole.spread > 0, whole.spread, 1)
    np.testing.assert_allclose(found, (array - whole.mean) / scale, 1e-4, 1e-4)


def test_a_middle_of_quantiles_does_not_move_with_a_far_number():
    array = np.random.default_rng(0).normal(7, 3, 2000)
    far = np.concatenate([array, [1e30, np.nan, np.inf]])
    near, moved = (Standard([Quantiles.of(one)]).applied(array) for one in (array, far))
    np.testing.assert_allclose(near, (array - 7) / 3, atol=0.2)
    np.testing.assert_allclose(near, moved, atol=0.01)


def test_quantiles_leave_out_what_fills_up_rows_and_columns_without_numbers_stay():
    rows, mask = np.array([[[1.0, np.nan], [0.0, 0.0]], [[3.0, np.nan], [5.0, np.nan]]]), [[1, 0], [1, 1]]
    found = Quantiles.of(rows, np.array(mask, bool))
    assert found.count.tolist() == [3, 0]
    assert found.mean.tolist() == [3, 0]
    assert found.spread.tolist()[1] == 0
    again = Quantiles.together([found, found])
    assert (again.count.tolist(), again.mean.tolist()) == ([6, 0], [3, 0])


def test_a_source_measures_quantiles(monkeypatch):
    monkeypatch.setattr("nnlo_common.data._file_source._MEASURED_BYTES", 64)  # a few rows at once
    columns = {"a": np.arange(101.0) ** 3, "flag": np.arange(101) > 3}
    with closing(FileSource(columns, features=["a", "flag"])) as source:
        (found, flags) = source.statistics(0, 101, by="quantiles")
    assert (found.mean.tolist(), flags) == ([50.0**3], None)


def test_columns_that_are_constant_stay_finite_and_numbers_that_are_not_do_not_count():
    array = np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0]])
    found = Standard([Moments.of(array)]).applied(array)
    np.testing.assert_array_equal(found, np.array([[-1, 0], [1, 0], [np.nan, 0]], "f4"))


@pytest.mark.parametrize("dtype", ["f8", "i8", "u4"])
@pytest.mark.parametrize("kind", [Moments, Quantiles])
def test_numbers_far_from_zero_keep_what_they_differ_by(dtype, kind):
    """Such as times in seconds since 1970, of which float32 knows every 128th only."""
    array = (1.7e9 + np.random.default_rng(0).normal(0, 50, 1000)).astype(dtype)
    standard = Standard([kind.of(array)])
    (measured,) = standard._inputs
    wanted = (array - measured.mean) / measured.spread
    np.testing.assert_allclose(standard.applied(array), wanted, rtol=1e-6, atol=1e-6)
    assert standard.applied(array).dtype == np.float32


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("rows", [(1000, 1000), (7, 1), (100_003, 3)])
def test_a_constant_column_that_is_no_binary_fraction_has_no_spread(dtype, rows):
    parts = [Moments.of(np.full((size, 2), 0.1, dtype)) for size in rows]
    standard = Standard.measured([[one] for one in parts])
    assert standard.state()[0]["spread"] == [0, 0]
    found = standard.applied(np.array([[0.1, 0.2]], dtype))
    np.testing.assert_allclose(found, [[0, 0.1]], atol=1e-7)


def test_what_earlier_sums_left_of_a_constant_columns_spread_is_none(tmp_path):
    path = tmp_path / "standard.json"
    path.write_text('{"features": [{"mean": [0.1, -0.1], "spread": [1.4e-17, 1.4e-17], "count": [9, 9]}]}')
    found = Standard.load(path).applied(np.array([[0.1, 0.2]]))
    np.testing.assert_allclose(found, [[0, 0.3]], atol=1e-7)


def test_a_source_measures_what_its_batches_have_and_labels_stay():
    columns = {"a": np.arange(8.0), "b": np.arange(8) ** 2, "y": np.arange(8)}
    options = {"features": ["a,b", "b"], "labels": "y"}
    with closing(FileSource(columns, **options)) as source:
        parts = [source.statistics(*part) for part in ((0, 5), (5, 8), (8, 8))]
        standard = Standard.measured(parts)
    with closing(FileSource(columns, **options, standardize=standard)) as source:
        (both, second), labels = source.take(0, 8)
    np.testing.assert_allclose(both, scaled(np.stack([columns["a"], columns["b"]], 1)), atol=1e-6)
    np.testing.assert_allclose(second, scaled(columns["b"]), atol=1e-6)
    assert labels.tolist() == list(range(8))


def test_it_comes_after_the_adaptor():
    columns = {"a": np.arange(8.0)}
    options = {"features": "a", "adapt_features": lambda a: {"x": a[:, None] * 10, "flag": a > 3}}
    with closing(FileSource(columns, **options)) as source:
        standard = Standard.measured([source.statistics(0, 8)])
    with closing(FileSource(columns, **options, standardize=standard)) as source:
        (found,) = source.take(0, 8)
    np.testing.assert_allclose(found["x"][:, 0], scaled(columns["a"]), atol=1e-6)
    assert found["flag"].tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("mask", [False, True])
def test_what_fills_up_rows_does_not_count_and_stays_zero(tmp_path, mask):
    ak, pq = pytest.importorskip("awkward"), pytest.importorskip("pyarrow.parquet")
    rows = [[1.0, 2.0, 9.0], [], [3.0], [4.0, 8.0]]
    table = ak.to_arrow_table(
        ak.zip({"p": rows, "q": [[2 * one for one in row] for row in rows]}, depth_limit=1)
    )
    pq.write_table(table, tmp_path / "a.parquet")
    options = {"features": "p,q", "pad": 2, "mask": mask}
    with closing(FileSource(tmp_path / "a.parquet", **options)) as source:
        standard = Standard.measured([source.statistics(0, 2), source.statistics(2, 4)])
    with closing(FileSource(tmp_path / "a.parquet", **options, standardize=standard)) as source:
        (found,) = source.take(0, 4)
    if mask:
        found, there = found
        assert there.tolist() == [[True, True], [False, False], [True, False], [True, True]]
    kept = np.array([1.0, 2.0, 3.0, 4.0, 8.0])
    wanted = np.zeros((4, 2))
    wanted[[0, 0, 2, 3, 3], [0, 1, 0, 0, 1]] = scaled(kept)
    np.testing.assert_allclose(found, np.stack([wanted] * 2, -1), atol=1e-6)


def test_it_is_kept_in_a_file(tmp_path):
    standard = Standard([Moments.of(np.array([[1.0, 2.0], [2.0, 7.0]])), None])
    (tmp_path / "standard.json").write_text(
        f'{{"features": {standard.state()}}}'.replace("'", '"').replace("None", "null")
    )
    again = Standard.load(tmp_path / "standard.json")
    x = np.array([[1.0, 3.0]])
    for found, wanted in zip(again.applied((x, x)), standard.applied((x, x)), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"features": 3}',
        '{"features": [3]}',
        '{"features": [{"mean": [1], "spread": [1, 2], "count": [1]}]}',
        '{"features": [{"mean": ["x"], "spread": [1], "count": [1]}]}',
        '{"features": [{"mean": [1e999], "spread": [1], "count": [1]}]}',
        '{"features": [{"mean": [], "spread": [], "count": []}]}',
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "standard.json").write_text(text)
    with pytest.raises(ConfigurationError, match="has no mean and spread of features"):
        FileSource({"a": np.arange(3)}, features="a", standardize=tmp_path / "standard.json")


def test_other_columns_than_those_of_the_training_are_refused():
    standard = Standard([Moments.of(np.ones((3, 2)))])
    with pytest.raises(ConfigurationError, match="taken of 2 columns, but the batch has 3"):
        standard.applied(np.ones((4, 3)))
    with pytest.raises(ConfigurationError, match="taken of 1 inputs, but the batch has 2"):
        standard.applied((np.ones((4, 2)), np.ones((4, 2))))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 99), max_size=6), max_size=6), st.integers(1, 5))
def test_rows_are_brought_to_one_length(rows, pad):
    wanted = np.array([(row + [0] * pad)[:pad] for row in rows]).reshape(len(rows), pad)
    content, counts = (
        np.array([one for row in rows for one in row], int),
        np.array([len(row) for row in rows], int),
    )
    out = np.empty((len(rows), pad), int)
    fill_padded(Ragged(content, counts), pad, out)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("counts", [[-1, 2], [5, 5], [1], [1, 1, 1]])
def test_counts_that_do_not_fit_are_refused(counts):
    with pytest.raises(ConfigurationError, match="do not fit 2 rows of 3 entries"):
        fill_padded(Ragged(np.arange(3), np.array(counts)), 4, np.empty((2, 4)))
