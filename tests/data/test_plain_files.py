"""Rows without chunks and filters are copied once or twice, have the same bits, and fail by name."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import Batches, FileSource, HDF5Source, Lease, Vocabulary, _passing_failures
from nnlo_common.data.formats import _hdf5, _table

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no readers of files")

# -- HDF5: read by the system where the rows lie in one stretch of the file -----------------------------


@pytest.fixture
def stretches(monkeypatch):
    """Return the slices that the system reads."""
    found = []
    read = _hdf5._PlainRows.read

    def watched(self, first, last, out):
        found.append((first, last))
        read(self, first, last, out)

    monkeypatch.setattr(_hdf5._PlainRows, "read", watched)
    return found


def compare(path, first, last, name="x"):
    """Compare a slice with what h5py reads."""
    with h5py.File(path) as file:
        wanted = file[name][first:last]
    with closing(HDF5Source(path, features=name, cache="none")) as source:
        (found,) = source.take(first, last)
    assert found.dtype == wanted.dtype.newbyteorder("=")
    assert found.tobytes() == np.ascontiguousarray(wanted, found.dtype).tobytes()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_stretch_has_the_bits_that_h5py_reads(tmp_path, stretches, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    kind = data.draw(st.sampled_from(["f4", "<f8", ">f4", ">i8", "i2", "u1", "f2", "?", "u8"]))
    draw = np.random.default_rng(data.draw(st.integers(0, 9)))
    values = draw.integers(0, 2**8, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]
    if kind == "?":
        values = draw.integers(0, 2, shape).astype(bool)
    path, block = tmp_path / "a.h5", data.draw(st.sampled_from([0, 512, 4096]))
    written = data.draw(st.booleans())
    with h5py.File(
        path, "w", userblock_size=block, libver=data.draw(st.sampled_from(["earliest", "latest"]))
    ) as f:
        f["before"] = np.zeros(data.draw(st.integers(1, 99)), "u1")
        dataset = f.create_dataset("x", shape, kind, fillvalue=data.draw(st.sampled_from([None, 1])))
        if written:
            dataset[...] = values
    first = data.draw(st.integers(0, shape[0] - 1))
    stretches.clear()
    compare(path, first, data.draw(st.integers(first + 1, shape[0])))
    assert bool(stretches) == (written and kind not in (">f4", ">i8", "?"))


def test_rows_elsewhere_are_left_to_the_library(tmp_path, stretches, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the place of other files
    values = np.arange(12.0).reshape(6, 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("outside", (6, 2), "f8", external=[("raw", 16, values.nbytes)])[...] = values
        layout = h5py.VirtualLayout((6, 2), "f8")
        layout[...] = h5py.VirtualSource("b.h5", "x", (6, 2))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("chunked", data=values, chunks=(4, 1))
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space, kind = h5py.h5s.create_simple((6, 2)), h5py.h5t.py_create(values.dtype)
        h5py.h5d.create(file.id, b"compact", kind, space, properties).write(
            h5py.h5s.ALL, h5py.h5s.ALL, values
        )
        file["x"] = h5py.ExternalLink("b.h5", "x")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = values
    for name in ("outside", "virtual", "chunked", "compact"):
        compare(tmp_path / "a.h5", 1, 5, name)
        assert not stretches
    compare(tmp_path / "a.h5", 1, 5, "x")
    assert stretches == [(1, 5)]


def test_columns_of_an_input_are_read_beside_each_other(tmp_path, stretches):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"], file["b"] = np.arange(5.0, dtype="f4"), np.arange(5)
    with closing(HDF5Source(tmp_path / "a.h5", features="a,b")) as source:
        assert source.take(1, 4)[0].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert stretches == [(1, 4)] * 2


def test_what_this_process_writes_is_read_by_the_library(tmp_path, stretches):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(5)
        file.flush()
        file["x"][2] = 9  # may still be in the library's memory
        with closing(HDF5Source(tmp_path / "a.h5", features="x")) as source:
            assert source.take(0, 5)[0].tolist() == [0, 1, 9, 3, 4]
    assert not stretches


@pytest.fixture
def rows(tmp_path):
    """Return a file and its rows."""
    values = np.random.default_rng(0).normal(size=(50, 3)).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values
    return tmp_path / "a.h5", values


def test_the_system_may_read_less_at_once(rows, monkeypatch):
    path, values = rows
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:7]], at))
    with closing(HDF5Source(path, features="x")) as source:
        np.testing.assert_array_equal(source.take(3, 40)[0], values[3:40])


def test_a_file_cut_off_since_it_was_opened_is_named(rows):
    path, values = rows
    with closing(HDF5Source(path, features="x")) as source:
        source.take(0, 1)
        os.truncate(path, path.stat().st_size - 4)
        np.testing.assert_array_equal(source.take(0, 49)[0], values[:49])
        with pytest.raises(
            ConfigurationError, match=r"a\.h5: samples 40 to 49 of /x .*the file ends at byte"
        ):
            source.take(40, 50)


def test_a_file_system_that_fails_for_a_while_is_asked_again(rows, monkeypatch):
    path, values = rows
    failures, read, waits = [OSError(errno.EIO, "Input/output error")], os.preadv, []

    def fails(*asked):
        if failures:
            raise failures.pop()
        return read(*asked)

    monkeypatch.setattr(os, "preadv", fails)
    monkeypatch.setattr(_passing_failures.time, "sleep", waits.append)
    with (
        closing(HDF5Source(path, features="x")) as source,
        pytest.warns(RuntimeWarning, match="trying again"),
    ):
        np.testing.assert_array_equal(source.take(0, 50)[0], values)
    assert waits == [1.0]


# -- arrays in memory, or mapped into it: a batch is taken straight from them ---------------------------

ROWS = 500
X, Y = np.random.default_rng(1).normal(size=(ROWS, 5)).astype("f4"), np.arange(ROWS) % 3


def saved(folder, name):
    """Write the samples in a way, and return the files and the names of their columns."""
    fields = np.zeros(ROWS, [("x", "f4", 5), ("y", "i8")])
    fields["x"], fields["y"] = X, Y
    texts = np.array(["a", "b", "c"])[Y]
    files, features = str(folder / f"{name}.npz"), "x"
    match name:
        case "stored":  # no member begins where numbers can be taken from
            np.savez(files, x=X, y=Y)
        case "npy":
            files, features = str(folder / "a.npy"), "array"
            np.save(files, X)
        case "deflated":
            np.savez_compressed(files, x=X, y=Y)
        case "columns":
            return {"x": X, "y": Y}, "x"
        case "lists":
            return {"x": X.tolist(), "y": Y.tolist()}, "x"
        case "several":
            for part in range(2):
                some = slice(part * 300, part * 300 + 300)
                np.savez(folder / f"{part}.npz", x=X[some], y=Y[some])
            return [str(folder / "0.npz"), str(folder / "1.npz")], "x"
        case "fortran":
            np.savez(files, x=np.asfortranarray(X), y=Y)
        case "swapped":
            np.savez(files, x=X.astype(">f4"), y=Y)
        case "structured":
            files = str(folder / "a.npy")
            np.save(files, fields)
        case "beside":
            np.savez(files, a=X[:, 0], b=X[:, 1], y=Y)
            features = "a,b"
        case "texts":
            np.savez(files, x=texts, y=Y)
    return files, features


STRAIGHT = ["npy", "deflated", "columns", "lists"]
READ = ["stored", "several", "fortran", "swapped", "structured", "beside", "texts"]


@pytest.fixture
def reads(monkeypatch):
    """Return the names of the columns that are read."""
    found = []
    read = _table._TableFile.read

    def watched(self, name, first, last, out):
        found.append(name)
        read(self, name, first, last, out)

    monkeypatch.setattr(_table._TableFile, "read", watched)
    return found


def epochs(files, features, reads, **options):
    """Return the batches of two epochs, and of a part of a window; and the columns that were read."""
    shuffle, labels = options.pop("shuffle"), None if features == "array" else "y"
    with closing(FileSource(files, features=features, labels=labels, cache="none", **options)) as source:
        reads.clear()  # what is read to choose samples
        batches = Batches(source, batch_size=7, shuffle=shuffle, block=11, window=5)
        found = [batch for epoch in range(2) for batch in batches.epoch(epoch)]
        found += batches.leased(Lease(0, 42, 70))
        batches.close()
    return found, set(reads)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"select": "y > 0"}, {"balance": "y"}], ids=["all", "selected", "balanced"]
)
@pytest.mark.parametrize("name", STRAIGHT + READ)
def test_batches_are_the_same_straight_and_read(tmp_path, reads, name, options, shuffle):
    files, features = saved(tmp_path, name)
    options = {**options, "shuffle": shuffle}
    if name == "npy":  # a single column
        options = {key: value for key, value in options.items() if key == "shuffle"}
    if name == "texts":
        options["vocabulary"] = Vocabulary({"x": dict.fromkeys("abc", 1)})
    wanted, read = epochs(files, features, reads, check_finite=True, **options)
    assert {*features.split(",")} <= read, "numbers that are checked are read"
    found, read = epochs(files, features, reads, **options)
    assert bool(read) == (name in READ)
    assert len(found) == len(wanted) > 90
    for array, other in zip(chain(*found), chain(*wanted), strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)


def test_a_batch_may_be_written_to_and_its_file_stays(tmp_path):
    files, features = saved(tmp_path, "npy")
    for _ in range(2):
        with closing(FileSource(files, features=features)) as source:
            batches = Batches(source, batch_size=7, shuffle=True)
            for batch in batches.epoch(0):
                batch[0][...] += 1
            batches.close()
    np.testing.assert_array_equal(np.load(files), X)


def test_no_window_is_copied_of_a_mapped_file(tmp_path):
    files, features = saved(tmp_path, "npy")
    with closing(FileSource(files, features=features)) as source:
        batches = Batches(source, batch_size=7, shuffle=True)
        list(batches.epoch(0))
        assert not any(spare._arrays for spare in batches._buffers)


@pytest.mark.parametrize("at", ["before a window is read", "before its batches are mixed"])
def test_a_mapped_file_that_is_cut_off_is_named(tmp_path, at):
    """To touch what is missing would end the process."""
    files, features = saved(tmp_path, "npy")
    with closing(FileSource(files, features=features)) as source:
        batches = Batches(source, batch_size=7, shuffle=True)
        source.resident([(0, 7)])
        if at != "before a window is read":
            batches.get(0, 0)
            batches._used._at_once, batches._used._made = 1, []
        os.truncate(files, 1000)
        with pytest.raises(
            ConfigurationError, match=r"was truncated while it was read.*make it again"
        ) as caught:
            list(batches.epoch(0))
        assert files in str(caught.value)


def test_a_mapped_file_that_is_deleted_is_read_to_the_end(tmp_path):
    files, features = saved(tmp_path, "npy")
    with closing(FileSource(files, features=features)) as source:
        batches = Batches(source, batch_size=7, shuffle=True)
        batches.get(0, 0)
        Path(files).unlink()
        found = np.concatenate([features for (features,) in batches.epoch(0)])
    np.testing.assert_array_equal(np.sort(found.ravel()), np.sort(X.ravel()))


def test_small_batches_are_mixed_when_they_are_asked_for(tmp_path):
    """A processor then has them in its cache; what a function is to change is made by the reading thread."""
    calls = []

    def adapted(x):
        calls.append(len(x))
        return x

    files, features = saved(tmp_path, "npy")
    for options in ({}, {"adapt_features": adapted}):
        with closing(FileSource(files, features=features, **options)) as source:
            calls.clear()
            batches = Batches(source, batch_size=7, shuffle=True, window=3)
            first = batches.get(0, 0)[0].copy()
            assert sum(calls) >= (21 if options else 0)  # of this window, and perhaps of the next
            window = batches._used
            assert isinstance(window, list) == bool(options)
            np.testing.assert_array_equal(window[0][0], first)
            assert len(window) == 3
            with pytest.raises(IndexError):
                window[3]
            batches.close()


def test_a_damaged_array_is_named_as_by_reading(tmp_path):
    files, features = saved(tmp_path, "deflated")
    with closing(FileSource(files, features=features)) as source:
        content = bytearray(Path(files).read_bytes())
        content[400:600] = bytes(200)
        Path(files).write_bytes(content)
        batches = Batches(source, batch_size=7, shuffle=True)
        with pytest.raises(ConfigurationError, match=r"deflated\.npz: samples .* of x cannot be read"):
            list(batches.epoch(0))
