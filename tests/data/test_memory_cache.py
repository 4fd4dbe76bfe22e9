"""The cache in memory gives what the files have, decoded once, in one copy that nothing outlives."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import Batches, FileSource
from nnlo_common.data import _memory_cache as caches
from nnlo_common.data._memory_cache import HostMemory

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")


def write(path, start, stop, **options):
    numbers = np.arange(start, stop)
    with h5py.File(path, "w") as file:
        chunks = {"chunks": (min(4, stop - start), 3), "compression": "gzip"} | options
        file.create_dataset("x", data=np.stack([numbers, numbers * 2, -numbers], 1).astype("f4"), **chunks)
        file["y"] = numbers
    return str(path)


@pytest.fixture
def files(tmp_path):
    return [
        write(tmp_path / "a.h5", 0, 10),
        write(tmp_path / "b.h5", 10, 11),
        write(tmp_path / "c.h5", 11, 30),
    ]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of one chunk, so that a file has several."""
    monkeypatch.setattr(caches, "_BLOCK_BYTES", 1)


@pytest.fixture
def decoded(monkeypatch):
    """The samples that are decoded, in order."""
    seen = []
    decode = FileSource._decode

    def noted(source, start, stop, out):
        seen.extend(range(start, stop))
        decode(source, start, stop, out)

    monkeypatch.setattr(FileSource, "_decode", noted)
    return seen


def numbers_of(source, epoch=0, **options):
    batches = Batches(source, **({"batch_size": 4, "shuffle": True, "window": 2, "block": 3} | options))
    found = []
    for x, y in batches.epoch(epoch):
        np.testing.assert_array_equal(x, np.stack([y, y * 2, -y], 1))
        found.append(y.tolist())
    batches.close()
    return found


def test_each_sample_is_decoded_once_and_each_epoch_is_what_it_is_without(files, small_blocks, decoded):
    with closing(FileSource(files, features="x", labels="y", cache="none")) as source:
        expected = [numbers_of(source, epoch) for epoch in range(3)]
    decoded.clear()
    with closing(FileSource(files, features="x", labels="y")) as source:  # they are compressed
        assert [numbers_of(source, epoch) for epoch in range(3)] == expected
        assert source.take(3, 5)[1].tolist() == [3, 4]
    assert sorted(decoded) == list(range(30))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_cached_selection_is_what_it_is_without(tmp_path, data):
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(sum))
    ends = np.cumsum([0, *lengths]).tolist()
    files = [write(tmp_path / f"{i}.h5", *ends[i : i + 2]) for i, length in enumerate(lengths) if length]
    samples = data.draw(st.none() | st.sets(st.integers(0, ends[-1] - 1), min_size=1).map(sorted))
    options = {"block": data.draw(st.integers(1, 9)), "window": data.draw(st.integers(1, 4))}
    options |= {"shuffle": data.draw(st.booleans()), "batch_size": data.draw(st.integers(1, 5))}
    found = []
    for cache in ("none", "memory"):
        with closing(FileSource(files, features="x", labels="y", samples=samples, cache=cache)) as source:
            found.append([numbers_of(source, epoch, **options) for epoch in range(2)])
    assert found[0] == found[1]
    assert sorted(chain.from_iterable(found[1][0])) == (samples or list(range(ends[-1])))


def test_what_is_stored_as_it_is_used_is_not_kept_unless_it_is_asked_for(tmp_path, decoded):
    path = write(tmp_path / "a.h5", 0, 8, compression=None)
    for cache, times in (("auto", 2), ("memory", 1), ("none", 2)):
        decoded.clear()
        with closing(FileSource(path, features="x", labels="y", cache=cache)) as source:
            numbers_of(source)
            numbers_of(source)
        assert len(decoded) == 8 * times


def test_sources_of_one_host_share_the_samples(files, decoded):
    options = {"features": "x", "labels": "y", "cache": "memory"}
    with closing(FileSource(files, **options)) as one, closing(FileSource(files, **options)) as other:
        numbers_of(one)
        decoded.clear()
        numbers_of(other)
        copy = pickle.loads(pickle.dumps(other))
        numbers_of(copy)
        assert not decoded
        copy.close()
        assert caches.cached_mb() == pytest.approx(2 * 30 * (12 + 8) / 1e6)
    with closing(FileSource(files, **options)) as later:  # nobody has kept them
        numbers_of(later)
        assert len(decoded) == 30
    assert caches.cached_mb() == 0


@pytest.mark.parametrize("change", ["time", "columns", "finite"])
def test_what_is_not_the_same_is_not_shared(files, decoded, change):
    options = {"features": "x", "labels": "y", "cache": "memory"}
    with closing(FileSource(files, **options)) as one:
        one.take(0, 30)
        decoded.clear()
        if change == "time":
            os.utime(files[1], (0, 0))
        options |= {"columns": {"labels": None}, "finite": {"check_finite": True}, "time": {}}[change]
        with closing(FileSource(files, **options)) as other:
            other.take(0, 30)
    assert len(decoded) == 30


def test_columns_in_memory_are_shared_by_copies_of_a_source_only(decoded):
    options = {"features": "x", "cache": "memory"}
    with (
        closing(FileSource({"x": np.zeros(4)}, **options)) as zeros,
        closing(FileSource({"x": np.ones(4)}, **options)) as ones,
    ):
        assert zeros.take(0, 4)[0].tolist() == [0] * 4
        assert ones.take(0, 4)[0].tolist() == [1] * 4
        decoded.clear()
        with closing(pickle.loads(pickle.dumps(ones))) as copy:
            assert copy.take(0, 4)[0].tolist() == [1] * 4
        assert not decoded


def test_a_remote_file_that_has_changed_is_not_shared():
    fsspec, pa = pytest.importorskip("fsspec"), pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    memory, sources = fsspec.filesystem("memory"), []
    for number in (1, 2):
        with memory.open("/changed/a.parquet", "wb") as file:
            pq.write_table(pa.table({"x": [number] * 4}), file)
        sources.append(FileSource("memory://changed/a.parquet", features="x", cache="memory"))
        assert sources[-1].take(0, 4)[0].tolist() == [number] * 4
    for source in sources:
        source.close()
    memory.rm("/changed", recursive=True)


@pytest.mark.parametrize("tag", ["ETag", "LastModified", "mtime"])
def test_a_remote_file_with_a_state_is_shared(decoded, monkeypatch, tag):
    fsspec, pa = pytest.importorskip("fsspec"), pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    memory = fsspec.filesystem("memory")
    told = type(memory).info
    monkeypatch.setattr(type(memory), "info", lambda *args, **more: told(*args, **more) | {tag: "a mark"})
    with memory.open("/same/a.parquet", "wb") as file:
        pq.write_table(pa.table({"x": range(4)}), file)
    options = {"features": "x", "cache": "memory"}
    with (
        closing(FileSource("memory://same/a.parquet", **options)) as one,
        closing(FileSource("memory://same/a.parquet", **options)) as other,
    ):
        one.take(0, 4)
        decoded.clear()
        assert other.take(0, 4)[0].tolist() == [0, 1, 2, 3]
        assert not decoded
    memory.rm("/same", recursive=True)


def test_a_folder_of_chunks_is_shared_until_one_of_them_changes(tmp_path, decoded):
    zarr = pytest.importorskip("zarr")
    array = zarr.open_array(tmp_path / "a.zarr", mode="w", shape=(4,), chunks=(2,), dtype="i8")
    array[:] = 1
    options = {"features": "array", "cache": "memory"}
    with closing(FileSource(str(tmp_path / "a.zarr"), **options)) as one:
        one.take(0, 4)
        decoded.clear()
        with closing(FileSource(str(tmp_path / "a.zarr"), **options)) as other:
            assert other.take(0, 4)[0].tolist() == [1] * 4
            assert not decoded
        array[2:] = 5
        with closing(FileSource(str(tmp_path / "a.zarr"), **options)) as later:
            assert later.take(0, 4)[0].tolist() == [1, 1, 5, 5]


@pytest.mark.parametrize("name", ["view", "view of a view", "outer", "raw", "group"])
def test_what_has_its_numbers_in_other_files_is_shared_until_these_change(
    tmp_path, decoded, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)  # where HDF5 looks for raw numbers
    source = write(tmp_path / "source.h5", 0, 4)
    (tmp_path / "numbers").write_bytes(bytes(32))

    def view(file, name, of, dataset):
        layout = h5py.VirtualLayout((4, 3), "f4")
        layout[:] = h5py.VirtualSource(of, dataset, (4, 3))
        file.create_virtual_dataset(name, layout)

    with h5py.File("views.h5", "w") as file:
        view(file, "view", "source.h5", "x")
    with h5py.File("a.h5", "w") as file:
        view(file, "view", "source.h5", "x")
        view(file, "view of a view", "views.h5", "view")
        file["outer"] = h5py.ExternalLink("source.h5", "/x")
        file.create_dataset("raw", (4,), "f8", external=[("numbers", 0, 32)])
        file["group/x"] = h5py.ExternalLink("views.h5", "/view")
    options = {"features": name, "cache": "memory"}
    with closing(FileSource("a.h5", **options)) as one:
        one.take(0, 4)
        decoded.clear()
        with closing(FileSource("a.h5", **options)) as same:
            same.take(0, 4)
        assert not decoded
        os.utime("numbers" if name == "raw" else source, (0, 0))
        with closing(FileSource("a.h5", **options)) as other:
            other.take(0, 4)
        assert len(decoded) == 4


def test_a_batch_is_not_the_memory_itself(files):
    with closing(FileSource(files, features="x", labels="y", cache="memory")) as source:
        for shuffle in (True, False):
            for x, _ in Batches(source, batch_size=5, shuffle=shuffle).epoch(0):
                x[:] = 7
        x, _ = source.take(0, 30)
        x[:] = 7
        numbers_of(source)


CHILD = """
import sys, time
from nnlo_common.data import FileSource
source = FileSource(sys.argv[1:], features="x", labels="y", cache="memory")
source.take(0, 30)
source._open.close()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_after_the_death_of_its_maker_others_have_it_and_after_theirs_nobody(files, decoded):
    child = subprocess.Popen([sys.executable, "-c", CHILD, *files], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        source = FileSource(files, features="x", labels="y", cache="memory")
        source.take(0, 30)
        assert not decoded
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert numbers_of(source) == numbers_of(source)
    assert not decoded
    source.close()
    with closing(FileSource(files, features="x", labels="y", cache="memory")) as later:
        later.take(0, 30)
    assert len(decoded) == 30


def test_a_block_whose_decoder_failed_is_decoded_again(files, small_blocks, monkeypatch):
    decode = FileSource._decode

    def failing(source, start, stop, out):
        decode(source, start, stop, out)
        raise OSError("planted")

    with closing(FileSource(files, features="x", labels="y", cache="memory")) as source:
        monkeypatch.setattr(FileSource, "_decode", failing)
        with pytest.raises(OSError, match="planted"):
            source.take(0, 3)
        monkeypatch.undo()
        numbers_of(source)


def test_where_memory_is_short_the_rest_is_decoded_each_time(files, small_blocks, decoded, monkeypatch):
    free = iter([10**9] * 2 + [0] * 1000)
    with closing(FileSource(files, features="x", labels="y", cache="memory")) as source:
        monkeypatch.setattr(caches, "free_memory", lambda: (next(free), 10**9))
        first = numbers_of(source)
        decoded.clear()
        assert numbers_of(source) == first
    assert 30 > len(set(decoded)) > 20


def test_where_a_process_has_no_room_for_it_all_is_decoded_each_time(files, decoded, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(caches.mmap, "mmap", refused)
    before = len([*Path("/proc/self/fd").iterdir()])
    with closing(FileSource(files, features="x", labels="y", cache="memory")) as source:
        first = numbers_of(source)
        decoded.clear()
        assert numbers_of(source) == first
        assert decoded
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_what_does_not_fit_is_refused_if_it_was_asked_for(files, monkeypatch):
    monkeypatch.setattr(caches, "free_memory", lambda: (100, 1000))
    with pytest.raises(ConfigurationError, match=r"cache=\"memory\" needs 0.0 GiB .* name fewer files"):
        FileSource(files, features="x", cache="memory")
    FileSource(files, features="x").close()
    with pytest.raises(ConfigurationError, match="cache='ram' is not possible; give one of 'auto', 'memory'"):
        FileSource(files, features="x", cache="ram")


def test_only_the_share_that_is_read_takes_memory(files, small_blocks):
    with closing(FileSource(files, features="x", labels="y", cache="memory")) as source:
        source.take(11, 15)
        assert caches.cached_mb() == pytest.approx(4 * 20 / 1e6)


def test_a_lock_is_held_by_one_at_a_time():
    one, other = HostMemory("test-locks", 100), HostMemory("test-locks", 100)
    assert one.shared == other.shared
    entered = threading.Event()

    def enter():
        with other.holding(3):
            entered.set()

    thread = threading.Thread(target=enter)
    with one.holding(3):
        thread.start()
        with one_more(other, 4):
            assert not entered.wait(0.05) or not one.shared
    thread.join()
    assert entered.is_set()
    one.close()
    other.close()


def one_more(memory, place):
    """Hold another lock of a memory, from another descriptor of it."""
    third = HostMemory("test-locks", 100)
    del memory
    return third.holding(place)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="it needs Linux")
def test_memory_of_another_size_or_that_can_be_shortened_is_not_taken():
    planted = os.memfd_create("test-planted-64")  # no seals
    os.ftruncate(planted, 64)
    memory = HostMemory("test-planted", 64)
    memory.memory[:1] = b"x"
    assert os.pread(planted, 1, 0) == b"\0"
    memory.close()
    os.close(planted)


def test_without_shared_memory_each_process_has_its_own(files, decoded, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with closing(FileSource(files, features="x", labels="y", cache="memory")) as source:
        assert numbers_of(source) == numbers_of(source)
    assert len(decoded) == 30


def _forked(source, queue):
    queue.put(source.take(0, 30)[1].sum())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_has_the_same_samples(files, method):
    with closing(FileSource(files, features="x", labels="y", cache="memory")) as source:
        source.take(0, 10)
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=_forked, args=[source, queue])
        process.start()
        assert queue.get() == sum(range(30))
        process.join()
        assert source.take(10, 30)[1].sum() == sum(range(10, 30))
