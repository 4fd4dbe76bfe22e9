"""Vocabularies: values of columns become indices, for any division and in every format that has them."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import Batches, FileBatches, FileSource, Standard, Vocabulary
from nnlo_common.data._preparation import NewValues
from tests.helpers.format_files import FORMATS, WITH_TEXTS, ZARR_TEXTS, make

TEXTS = ["mu", "e", "tau", "pi", "e", "mu", "e"]
NUMBERS = [13, -11, 15, 211, -11, 13, -11]


def indices(values, known):
    known = sorted(set(known))
    return [known.index(one) + 1 if one in known else 0 for one in values]


def measured(source, *pieces):
    return Vocabulary.measured([source.values(*piece) for piece in pieces or [(0, len(source))]])


def file_of(kind, path, texts, numbers):
    """Write a file with a column of texts, one of numbers, and one of floats."""
    columns = {"n": np.array(numbers, "i4"), "w": np.arange(len(texts)) / 2}
    return make(kind, path, {"kind": np.array(texts), **columns})


@pytest.mark.parametrize("kind", WITH_TEXTS)
def test_texts_in_files_become_indices(kind, tmp_path):
    for package in ("h5py", "pyarrow", "uproot"):
        pytest.importorskip(package, reason="the environment for MPICH has no readers of files")
    files = [
        file_of(kind, tmp_path / "a", TEXTS, NUMBERS),
        file_of(kind, tmp_path / "b", ["nu", "e"], [12, -11]),
    ]
    names = {"features": ["kind", "w"], "labels": "n"}
    with closing(FileSource(files[:1], **names, vocabulary=["kind", "n"])) as source:
        vocabulary = measured(source, (0, 3), (3, 7))
    assert vocabulary.values_of("kind") == [None, "e", "mu", "pi", "tau"]
    with closing(FileSource(files, **names, vocabulary=vocabulary)) as source:
        for start in range(9):
            (kinds, floats), labels = source.take(start, 9)
            assert kinds.tolist() == indices([*TEXTS, "nu", "e"][start:], TEXTS)
            assert labels.tolist() == indices([*NUMBERS, 12, -11][start:], NUMBERS)
        assert kinds.dtype == labels.dtype == np.int64
        assert floats.tolist() == [0.5]


@pytest.mark.parametrize("kind", FORMATS)
def test_whole_numbers_in_every_format_become_indices(kind, tmp_path):
    for package in ("h5py", "pyarrow", "uproot", "zarr"):
        pytest.importorskip(package, reason="the environment for MPICH has no readers of files")
    columns = {"n": np.array(NUMBERS, "i4"), "pair": np.array([NUMBERS, NUMBERS[::-1]], "i8").T}
    file = make(kind, tmp_path / "a", columns)
    options = {"features": ["n", "pair"], "cache": "memory"}
    with closing(FileSource(file, **options, vocabulary=["n", "pair"], samples=[0, 3, 4])) as source:
        vocabulary = measured(source)
    some = np.array([13, 211, -11])
    assert vocabulary.values_of("n") == [None, *sorted(some.tolist())]
    with closing(FileSource(file, **options, vocabulary=vocabulary)) as source:
        ((one, two),) = source.take(0, 7)
    assert one.tolist() == indices(NUMBERS, some)
    assert two[:, 1].tolist() == indices(NUMBERS[::-1], [13, 211, -11, -11, 211, 15])


@pytest.mark.filterwarnings(ZARR_TEXTS)
def test_texts_of_fixed_width_in_lists_and_of_pandas_become_indices(tmp_path):
    h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no readers of files")
    zarr, pa = pytest.importorskip("zarr"), pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/kind"] = np.array(TEXTS, "S4")
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("group/kind", shape=(7,), dtype=str)[:] = (
        np.array(TEXTS, object)
    )
    pq.write_table(pa.table({"group/kind": pa.array(TEXTS).dictionary_encode()}), tmp_path / "a.parquet")
    sources = [tmp_path / f"a.{end}" for end in ("h5", "zarr", "parquet")]
    sources += [{"group/kind": TEXTS}, {"group/kind": np.array(TEXTS, object)}]
    for given_ in sources:
        with closing(FileSource(given_, features="group/kind", vocabulary=["group/kind"])) as source:
            vocabulary = measured(source)
        with closing(FileSource(given_, features="group/kind", vocabulary=vocabulary)) as source:
            assert source.take(0, 7)[0].tolist() == indices(TEXTS, TEXTS)


@pytest.mark.parametrize("kind", ["parquet", "root"])
def test_rows_of_unequal_length_have_indices_and_zeros_after_them(tmp_path, kind):
    ak = pytest.importorskip("awkward", reason="the environment for MPICH has no readers of files")
    rows = [["e", "mu", "tau"], [], ["pi"], ["e", "e"]]
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"kind": rows}), tmp_path / "a.parquet", row_group_size=3)
    else:
        uproot = pytest.importorskip("uproot")
        with uproot.recreate(tmp_path / "a.root") as file:
            file.mkrntuple("events", {"kind": ak.Array(rows)})
    options = {"features": "kind", "pad": 2, "mask": True}
    with closing(FileSource(tmp_path / f"a.{kind}", **options, vocabulary=["kind"])) as source:
        assert source.values(0, 4) == {"kind": {"e": 3, "mu": 1, "pi": 1}}, "no filling, nothing cut off"
        vocabulary = measured(source, (0, 1), (2, 3))
    with closing(FileSource(tmp_path / f"a.{kind}", **options, vocabulary=vocabulary)) as source:
        arrays = [field.empty(4) for field in source.fields]
        source.read(0, 4, arrays)
        ((found, mask),) = source.assemble(arrays)
        assert source.unknown_in(arrays) == {"kind": [5, 0]}
    assert found.tolist() == [[1, 2], [0, 0], [3, 0], [1, 1]]
    assert mask.tolist() == [[True, True], [False, False], [True, False], [True, True]]


ODD_TEXTS = ["", "x" * 300, "\u00e9t\u00e9", "", "mu"]


@pytest.mark.parametrize("kind", ["TTree", "RNTuple"])
def test_odd_texts_in_root_files_are_read_as_they_are(kind, tmp_path):
    pytest.importorskip("uproot", reason="the environment for MPICH has no readers of files")
    file = make(kind, tmp_path / "a", {"kind": np.array(ODD_TEXTS)}, piece=2)
    with closing(FileSource(file, features="kind", vocabulary=["kind"])) as source:
        assert source.values(0, 5) == {"kind": Counter(ODD_TEXTS)}
        assert source.values(3, 5) == {"kind": {"": 1, "mu": 1}}
    with pytest.raises(ConfigurationError, match=r"a.root.*: kind has the type object \(texts\)"):
        FileSource(file, features="kind")


def test_texts_in_root_files_that_are_not_utf_8_are_refused(tmp_path):
    uproot = pytest.importorskip("uproot", reason="the environment for MPICH has no readers of files")
    import awkward as ak

    letters = ak.with_parameter(np.frombuffer(b"mu\xff", np.uint8), "__array__", "char")
    texts = ak.with_parameter(ak.unflatten(letters, [2, 1]), "__array__", "string")
    with uproot.recreate(tmp_path / "a.root") as file:
        file.mktree("events", {"kind": "string"}).extend({"kind": texts})
    with (
        closing(FileSource(tmp_path / "a.root", features="kind", vocabulary=["kind"])) as source,
        pytest.raises(ConfigurationError, match=r"of kind cannot be read: a text is not UTF-8"),
    ):
        source.values(0, 2)


VALUES = st.one_of(
    st.lists(st.text("ab\u00e9\U0001f600", max_size=3), min_size=1, max_size=30),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
    st.lists(st.integers(-3, 3), min_size=1, max_size=30),
)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.data())
def test_any_division_has_the_vocabulary_of_the_whole(values, data):
    size = len(values)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    pieces = list(zip([0, *cuts], [*cuts, size], strict=True))
    with closing(FileSource({"v": values}, features="v", vocabulary=["v"])) as source:
        ranks = [Vocabulary.part(source, [piece], ["v"]) for piece in pieces]
        found = Vocabulary.of_parts(json.loads(json.dumps(ranks)), ["v"])
        whole = Vocabulary.of_parts([Vocabulary.part(source, pieces, ["v"])], ["v"])
    assert json.dumps(found.kept()) == json.dumps(whole.kept())
    assert found.kept()["columns"]["v"]["counts"] == [Counter(values)[one] for one in sorted(set(values))]
    with closing(FileSource({"v": values}, features="v", vocabulary=found)) as source:
        assert source.take(0, size)[0].tolist() == indices(values, values)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_numbers_of_any_type_are_found_exactly(data):
    """Also such that floats, to which NumPy would bring both, cannot tell apart."""
    kind = np.dtype(data.draw(st.sampled_from(["i1", "u1", "i2", "u4", "i8", "u8"])))
    limits = np.iinfo(kind)
    near = st.sampled_from([limits.max, limits.max - 1, limits.min, 0])
    values = data.draw(st.lists(near | st.integers(limits.min, limits.max), min_size=1, max_size=20))
    known = data.draw(st.lists(near | st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=20))
    vocabulary = Vocabulary({"v": dict.fromkeys(known, 1)})
    assert vocabulary.indices("v", np.array(values, kind)).tolist() == indices(values, known)


def test_values_that_only_other_samples_have_become_0_and_are_counted():
    columns = {"v": ["a", "b", "c", "b", "d"], "n": [1, 2, 3, 2, 4]}
    names = {"features": ["v", "n"]}
    with closing(FileSource(columns, **names, vocabulary=["v", "n"], samples=[0, 1, 3])) as source:
        vocabulary = measured(source)
    with closing(FileSource(columns, **names, vocabulary=vocabulary)) as source:
        assert source.values(0, 5) == {"v": {"a": 1, "b": 2, None: 2}, "n": {1: 1, 2: 2, None: 2}}
        arrays = [field.empty(5) for field in source.fields]
        source.read(0, 5, arrays)
        ((v, n),) = source.assemble(arrays)
        assert source.unknown_in(arrays) == {"v": [5, 2], "n": [5, 2]}
    assert v.tolist() == n.tolist() == [1, 2, 0, 2, 0]


def test_a_cut_counts_only_what_it_leaves():
    columns = {"v": list("abcd"), "x": np.arange(4.0)}
    options = {"features": "v", "select": "x > 1", "vocabulary": ["v"]}
    with closing(FileSource(columns, **options)) as source:
        assert source.values(0, 2) == {"v": {"c": 1, "d": 1}}


def test_epochs_and_copies_of_batches_have_the_same_indices():
    columns = {"v": TEXTS * 3, "y": np.arange(21)}
    with closing(FileSource(columns, features="v", labels="y", vocabulary=["v"])) as source:
        vocabulary = measured(source)
    options = {"features": "v", "labels": "y", "vocabulary": vocabulary, "batch_size": 4, "seed": 3}
    batches = FileBatches(columns, "Batches", trained_on=True, **options)
    for again in (batches, pickle.loads(pickle.dumps(batches))):
        for v, y in Batches.epoch(again, 1):
            assert v.tolist() == np.array(indices(TEXTS, TEXTS) * 3)[y].tolist()
        again.close()


def test_indices_are_not_standardised_and_numbers_beside_them_are():
    columns = {"v": TEXTS, "n": NUMBERS, "x": np.arange(7.0)}
    options = {"features": ["v", "x", "n"], "vocabulary": Vocabulary({"v": {"e": 1}, "n": {13: 1}})}
    for adapt, wrap in ((None, list), (lambda made: {"v": made[0], "x": made[1], "n": made[2]}, dict.values)):
        with closing(FileSource(columns, **options, adapt_features=adapt)) as source:
            standard = Standard.measured([source.statistics(0, 7)])
        with closing(FileSource(columns, **options, adapt_features=adapt, standardize=standard)) as source:
            v, x, n = wrap(source.take(0, 7)[0])
        assert v.tolist() == indices(TEXTS, ["e"])
        assert n.tolist() == indices(NUMBERS, [13])
        np.testing.assert_allclose(x, (np.arange(7) - 3) / 2, atol=1e-6)


def test_it_is_kept_in_a_file(tmp_path):
    vocabulary = Vocabulary.measured([{"v": {"b": 2, "a": 1}, "n": {-3: 1}}])
    path = tmp_path / Vocabulary.file
    path.write_text(json.dumps(vocabulary.kept()))
    with closing(FileSource({"v": ["a", "c", "b"]}, features="v", vocabulary=path)) as source:
        assert source.take(0, 3)[0].tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"columns": 3}',
        '{"columns": {"v": 3}}',
        '{"columns": {"v": {"values": ["a"]}}}',
        '{"columns": {"v": {"values": ["a"], "counts": [1, 2]}}}',
        '{"columns": {"v": {"values": ["a", 1], "counts": [1, 2]}}}',
        '{"columns": {"v": {"values": [true], "counts": [1]}}}',
        '{"columns": {"v": {"values": [1.5], "counts": [1]}}}',
        '{"columns": {"v": {"values": [], "counts": []}}}',
        '{"columns": {"v": {"values": ["a", "a"], "counts": [1, 2]}}}',
        '{"columns": {"v": {"values": [["a"]], "counts": [1]}}}',
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "vocabulary.json").write_text(text)
    with pytest.raises(ConfigurationError, match="has no values of columns"):
        FileSource({"v": ["a"]}, features="v", vocabulary=tmp_path / "vocabulary.json")


COLUMNS = {"v": TEXTS, "n": NUMBERS, "x": np.arange(7.0), "many": np.arange(7)}
REFUSED = {
    "a column of floats": (["x"], {}, "x has the type float64, but vocabulary= .* is for texts and whole"),
    "a column that is not there": (["w"], {}, r"'w', no column of features= or labels=; these have 'n', 'x'"),
    "a column of one input with others": (["n"], {"features": "n,x"}, "n becomes indices .* beside x"),
    "too many values": (["many:3"], {}, "'many' .* more than 3 different values, such as 0; .* many:N"),
    "no limit": (["many:0"], {}, "limit from 1 to 1000000"),
    "no name": ([""], {}, "a list of columns"),
    "a number": ([3], {}, "a list of columns"),
    "texts without a vocabulary": (
        [],
        {"features": "v"},
        r"v has the type object \(texts\).* vocabulary= .--vocabulary.",
    ),
    "texts as weights": (["v"], {"features": "v", "labels": "n", "weights": "v"}, "cannot be trained on"),
}


@pytest.mark.parametrize(("asked", "options", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_category_is_refused(asked, options, told):
    with (
        pytest.raises(ConfigurationError, match=told),
        closing(
            FileSource(COLUMNS, vocabulary=asked, **({"features": ["n", "x", "many"]} | options))
        ) as source,
    ):
        measured(source)


def test_too_many_values_of_all_parts_together_are_refused():
    options = {"features": "many", "vocabulary": ["many:4"]}
    with closing(FileSource(COLUMNS, **options)) as source:
        parts = [Vocabulary.part(source, [piece], ["many:4"]) for piece in ((0, 4), (4, 7))]
        with pytest.raises(ConfigurationError, match="more than 4 different values"):
            Vocabulary.of_parts(parts, ["many:4"])
        with pytest.raises(ConfigurationError, match="more than 4 different values"):
            Vocabulary.part(source, [(0, 4), (4, 7)], ["many:4"])
        with pytest.raises(ConfigurationError, match="more than 6 different values"):
            Vocabulary.measured([source.values(0, 4), source.values(4, 7)], most=6)


def test_texts_that_are_too_long_and_values_that_are_missing_are_refused():
    for values, told in ((["a" * 1001], "a text of 1001 characters"), (np.array([None], object), "None")):
        with (
            closing(FileSource({"v": values}, features="v", vocabulary=["v"])) as source,
            pytest.raises(ConfigurationError, match=told),
        ):
            source.values(0, 1)


@pytest.mark.parametrize("known", ["a", 1])
def test_a_column_of_another_kind_than_in_the_training_is_refused(known):
    values = ["a"] if known == 1 else [1]
    vocabulary = Vocabulary({"v": {known: 1}})
    with (
        closing(FileSource({"v": values}, features="v", vocabulary=vocabulary)) as source,
        pytest.raises(ConfigurationError, match="read the same column as there"),
    ):
        source.take(0, 1)


def test_columns_to_measure_make_no_batches_yet():
    with (
        closing(FileSource(COLUMNS, features="v", vocabulary=["v"])) as source,
        pytest.raises(ConfigurationError, match=r"names columns to measure; give Vocabulary\.measured"),
    ):
        source.take(0, 1)


def test_samples_without_any_value_make_no_vocabulary():
    with pytest.raises(ConfigurationError, match=r"'v' .* has no values"):
        Vocabulary.measured([{"v": {}}])
    with pytest.raises(ConfigurationError, match=r"'v' .* has both texts and numbers"):
        Vocabulary.measured([{"v": {"a": 1}}, {"v": {1: 1}}])
    with pytest.raises(ConfigurationError, match="no samples"):
        Vocabulary.measured([])


def test_memory_of_values_between_those_that_count_is_bounded(monkeypatch):
    """Of a part of the samples, as of a fold, others are read with them: they are forgotten in each piece."""
    monkeypatch.setattr("nnlo_common.data._file_source._MEASURED_BYTES", 160)
    most = []
    begin = NewValues.begin

    def watched(self):
        if hasattr(self, "_known"):
            most.append(len(self._known["v"]))
        begin(self)

    monkeypatch.setattr(NewValues, "begin", watched)
    values = np.arange(1000)
    values[::10] = 0
    options = {"features": "v", "samples": np.arange(0, 1000, 10), "vocabulary": ["v:2"]}
    with closing(FileSource({"v": values}, **options)) as source:
        assert source.values(0, 100) == {"v": {0: 100}}
    assert max(most) <= 200
