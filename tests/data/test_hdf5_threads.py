"""Chunks of gzip decoded by several threads have the bits that h5py reads, or are left to it."""

from __future__ import annotations

import os
import threading
import zlib
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import HDF5Source

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no readers of files")
from nnlo_common.data.formats import _hdf5  # noqa: E402


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Let three threads decode chunks of any size; return how many chunks they have decoded."""
    decoded = []
    decode = _hdf5._Chunks._decode

    def counted(self, row, *rest):
        found = decode(self, row, *rest)
        decoded.append((row, found, threading.current_thread().name))
        return found

    monkeypatch.setattr(_hdf5._Chunks, "_decode", counted)
    monkeypatch.setattr(_hdf5, "usable_threads", lambda: 3)
    monkeypatch.setattr(_hdf5, "_SMALLEST_CHUNK", 1)
    return decoded


def check(path, first, last):
    """Compare a slice with what h5py reads."""
    with h5py.File(path) as file:
        wanted = file["x"][first:last]
    with closing(HDF5Source(path, features="x", cache="none")) as source:
        out = [field.empty(last - first) for field in source.fields]
        source.read(first, last, out)
    assert out[0].dtype == wanted.dtype.newbyteorder("=")
    assert out[0].tobytes() == np.ascontiguousarray(wanted, out[0].dtype).tobytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout_has_the_bits_that_h5py_reads(tmp_path, data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    kind = data.draw(st.sampled_from(["f4", "<f8", ">f4", ">i8", "i2", "u1", "f2", "?", "u8"]))
    path = tmp_path / "a.h5"
    draw = np.random.default_rng(data.draw(st.integers(0, 9)))
    values = draw.integers(0, 2**8, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]
    if kind == "?":
        values = draw.integers(0, 2, shape).astype(bool)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            "x",
            tuple(shape),
            kind,
            chunks=chunks,
            maxshape=tuple(data.draw(st.sampled_from([None, size])) for size in shape),
            compression="gzip",
            compression_opts=data.draw(st.integers(0, 9)),
            shuffle=data.draw(st.booleans()),
            fletcher32=data.draw(st.sampled_from([False, False, True])),
            fillvalue=data.draw(st.sampled_from([None, 1])),
        )
        rows = data.draw(st.integers(0, shape[0]))  # the chunks after them may never be written
        if rows:
            dataset[:rows] = values[:rows]
    first = data.draw(st.integers(0, shape[0] - 1))
    check(path, first, data.draw(st.integers(first + 1, shape[0])))


def make(path, values, chunks, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=chunks, compression="gzip", **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_whole_chunks_are_decoded_by_threads_and_parts_by_the_library(tmp_path, threads, shuffle):
    values = np.random.default_rng(0).normal(size=(95, 7)).astype("f4")
    make(tmp_path / "a.h5", values, (10, 4), shuffle=shuffle)
    check(tmp_path / "a.h5", 5, 95)
    assert sorted(row for row, _, _ in threads) == [row for row in range(10, 95, 10) for _ in range(2)]
    assert all(found for _, found, _ in threads)
    assert {name.rpartition("_")[0] for *_, name in threads} == {"nnlo decodes"}


@pytest.mark.parametrize("mask", [0b00, 0b01, 0b10, 0b11])
def test_filters_that_a_chunk_was_written_without_are_left_out(tmp_path, threads, mask):
    values = np.arange(40, dtype="i4").reshape(4, 10)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (4, 10), "i4", chunks=(1, 10), compression="gzip", shuffle=True)
        for row in range(4):
            raw = values[row].tobytes()
            if not mask & 0b01:
                raw = values[row].view(np.uint8).reshape(10, 4).T.tobytes()
            dataset.id.write_direct_chunk((row, 0), raw if mask & 0b10 else zlib.compress(raw), mask)
    check(path, 0, 4)
    assert [found for _, found, _ in threads] == [True] * 4
    with closing(HDF5Source(path, features="x")) as source:
        np.testing.assert_array_equal(source.take(0, 4)[0], values)


def with_chunk(path, raw, width=8, mask=0):
    """Write a file of four chunks, the third of which has these bytes."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=np.zeros((4, width)), chunks=(1, width), compression="gzip")
        dataset.id.write_direct_chunk((2, 0), raw, mask)


@pytest.mark.parametrize("size", [2**18, 2**28], ids=["a little", "much, in more bytes than its shape has"])
def test_a_chunk_that_inflates_beyond_its_shape_is_refused_before_it_takes_memory(tmp_path, size):
    import tracemalloc

    with_chunk(tmp_path / "a.h5", zlib.compress(bytes(size)), width=2**13)
    tracemalloc.start()
    try:
        with (
            closing(HDF5Source(tmp_path / "a.h5", features="x", cache="none")) as source,
            pytest.raises(ConfigurationError, match="its chunk at row 2 has more than the 65536 bytes"),
        ):
            source.take(0, 4)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "raw",
    [b"no gzip", zlib.compress(bytes(64))[:-5]],
    ids=["no gzip", "cut off"],
)
def test_a_damaged_chunk_is_told_by_the_library(tmp_path, raw):
    with_chunk(tmp_path / "a.h5", raw)
    told = []
    for threads in (3, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_hdf5, "usable_threads", lambda threads=threads: threads)
            with closing(HDF5Source(tmp_path / "a.h5", features="x", cache="none")) as source:
                try:
                    told.append(source.take(0, 4)[0].tobytes())
                except ConfigurationError as error:
                    told.append(str(error))
    assert told[0] == told[1]


@pytest.mark.parametrize("mask", [0, 1])
def test_a_chunk_that_is_too_short_is_refused(tmp_path, mask, monkeypatch):
    # The library returns what was in memory before in place of the rest.
    monkeypatch.setattr(_hdf5, "usable_threads", lambda: 3)
    with_chunk(tmp_path / "a.h5", bytes(63) if mask else zlib.compress(bytes(63)), mask=mask)
    with (
        closing(HDF5Source(tmp_path / "a.h5", features="x", cache="none")) as source,
        pytest.raises(ConfigurationError, match="its chunk at row 2 has 63 of the 64 bytes of its shape"),
    ):
        source.take(0, 4)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_decodes_with_threads_of_its_own(tmp_path):
    values = np.arange(800.0).reshape(100, 8)
    make(tmp_path / "a.h5", values, (10, 8))
    with closing(HDF5Source(tmp_path / "a.h5", features="x", cache="none")) as source:
        source.take(0, 100)
        child = os.fork()
        if child == 0:
            same = np.array_equal(source.take(0, 100)[0], values)
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_single_thread_reads_by_the_library(tmp_path, threads, monkeypatch):
    monkeypatch.setattr(_hdf5, "usable_threads", lambda: 1)
    make(tmp_path / "a.h5", np.ones((40, 8)), (10, 8))
    check(tmp_path / "a.h5", 0, 40)
    assert not threads


def test_small_chunks_and_other_filters_are_left_to_the_library(tmp_path, threads, monkeypatch):
    make(tmp_path / "a.h5", np.ones((40, 8)), (10, 8), fletcher32=True)
    check(tmp_path / "a.h5", 0, 40)
    monkeypatch.undo()
    monkeypatch.setattr(_hdf5, "usable_threads", lambda: 3)
    make(tmp_path / "b.h5", np.ones((40, 8)), (10, 8))
    check(tmp_path / "b.h5", 0, 40)
    assert not threads
