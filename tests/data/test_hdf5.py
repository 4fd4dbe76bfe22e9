"""Lists of HDF5 files: samples are read exactly, and unreadable files are named before the training."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import gc
import multiprocessing
import os
import pickle
import re
import socket
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError, MissingExtraError
from nnlo_common.data import Batches, HDF5Source, list_files, portion
from nnlo_common.data.formats import _hdf5
from nnlo_common.data.formats._format import _KEPT
from nnlo_common.training.report._usage import Usage

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")


def write(path, **contents):
    """Write a file with these datasets; a dictionary makes a group, a function writes its own content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        fill(file, contents)
    return path


def fill(group, contents):
    for name, content in contents.items():
        if isinstance(content, dict):
            fill(group.create_group(name), content)
        elif callable(content):
            content(group, name)
        else:
            group[name] = content


def rows(start, stop, width=2):
    """Return samples that begin with their number."""
    return np.stack([np.arange(start, stop, dtype="f4")] * width, axis=1)


@pytest.fixture
def three(tmp_path):
    """Write three files of 4, 0 and 5 samples."""
    for name, start, stop in [("a", 0, 4), ("b", 4, 4), ("c", 4, 9)]:
        write(tmp_path / f"{name}.h5", x=rows(start, stop), y=np.arange(start, stop))
    return tmp_path


# -- what is read ------------------------------------------------------------------------------------


def test_files_of_unequal_length_are_read_as_one(three):
    source = HDF5Source(three / "*.h5", features="x", labels="y")
    assert (len(source), source.lengths) == (9, [4, 0, 5])
    for start in range(9):
        for stop in range(start + 1, 10):
            x, y = source.take(start, stop)
            np.testing.assert_array_equal(x, rows(start, stop))
            np.testing.assert_array_equal(y, np.arange(start, stop))
    source.close()


def test_without_labels_there_are_features_only(three):
    (x,) = HDF5Source(three / "c.h5", features="x").take(0, 2)
    np.testing.assert_array_equal(x, rows(4, 6))


def test_a_group_means_its_datasets_by_the_alphabet(tmp_path):
    group = {"b": np.arange(3), "a": np.ones((3, 2)), "C": np.zeros((3, 1, 2), "u1")}
    path = write(tmp_path / "a.h5", inputs=group, deep={"outputs": {"only": np.arange(3)}})
    source = HDF5Source(path, features="inputs", labels="deep/outputs")
    assert [field.name for field in source.fields[:3]] == ["/inputs/C", "/inputs/a", "/inputs/b"]
    inputs, outputs = source.take(1, 3)
    assert [one.shape for one in inputs] == [(2, 1, 2), (2, 2), (2,)]
    assert isinstance(outputs, tuple)  # also where the group has one only
    np.testing.assert_array_equal(outputs[0], [1, 2])


def test_weights_are_the_third_of_a_batch(tmp_path):
    path = write(tmp_path / "a.h5", x=rows(0, 3), y=np.arange(3), w=np.array([1, 0, 2], "f4"))
    x, y, w = HDF5Source(path, features="x", labels="y", weights="w").take(1, 3)
    assert (x[:, 0].tolist(), y.tolist(), w.tolist()) == ([1, 2], [1, 2], [0, 2])


def test_several_names_come_in_their_order(tmp_path):
    path = write(tmp_path / "a.h5", x=np.arange(3), group={"z": np.arange(3) * 2, "y": np.arange(3) * 3})
    ((x, y, z),) = HDF5Source(path, features=["x", "group"]).take(2, 3)
    assert [int(one[0]) for one in (x, y, z)] == [2, 6, 4]
    ((only,),) = HDF5Source(path, features=["x"]).take(2, 3)
    assert only == 2


@pytest.mark.parametrize("dtype", ["u1", "i8", "f2", "f4", "f8", "?", ">f4", ">i2"])
@pytest.mark.parametrize("layout", [{}, {"chunks": (3, 2)}, {"compression": "gzip"}, {"fillvalue": 1}])
def test_numbers_are_what_they_are_in_the_file(tmp_path, dtype, layout):
    values = np.arange(20).reshape(10, 2).astype(dtype)
    path = write(tmp_path / "a.h5", x=lambda group, name: group.create_dataset(name, data=values, **layout))
    (x,) = HDF5Source(path, features="x").take(1, 8)
    np.testing.assert_array_equal(x, values[1:8])
    assert x.dtype == np.dtype(dtype).newbyteorder("=")  # frameworks take no other


def test_adaptors_make_of_a_batch_what_the_model_is_given(three):
    source = HDF5Source(
        three / "*.h5",
        features="x",
        labels="y",
        adapt_features=lambda x: {"first": x[:, :1], "rest": [x[:, 1:], x]},
        adapt_labels=lambda y: y.astype("f4") / 10,
    )
    for x, y in Batches(source, batch_size=4).epoch(0):
        assert set(x) == {"first", "rest"}
        np.testing.assert_array_equal(x["first"][:, 0] / 10, y)


@pytest.mark.parametrize(
    ("adaptor", "found"),
    [
        (lambda x: x[:-1], "0 rows"),
        (lambda x: (x, x[:0]), "0 rows and 1 rows"),
        (lambda x: None, "no array"),
        (lambda x: 1.0, "no array"),
        (lambda x: [], "nothing"),
    ],
)
def test_an_adaptor_that_does_not_keep_the_samples_is_refused(three, adaptor, found):
    with pytest.raises(ConfigurationError, match=f"adapt_labels got 1 sample and returned {found};"):
        HDF5Source(three / "*.h5", features="x", labels="y", adapt_labels=adaptor)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(sum),
    workers=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    block=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_over_all_workers_each_sample_comes_once(
    tmp_path_factory, lengths, workers, batch_size, block, shuffle
):
    folder, start = tmp_path_factory.mktemp("files"), 0
    for index, length in enumerate(lengths):
        write(folder / f"{index}.h5", x=rows(start, start + length), y=np.arange(start, start + length))
        start += length
    for epoch in range(2):
        seen = []
        for worker in range(workers):
            source = HDF5Source(folder / "*.h5", features="x", labels="y")
            options = {"batch_size": batch_size, "block": block, "shuffle": shuffle}
            for x, y in Batches(source, part=portion(start, worker, workers), **options).epoch(epoch):
                np.testing.assert_array_equal(x[:, 0], y)
                seen += y.tolist()
            source.close()
        assert sorted(seen) == list(range(start))


def test_only_slices_are_read(three, monkeypatch):
    """HDF5 reads single samples in random order a hundred times slower."""
    slices = []
    read = _hdf5._PlainRows.read

    def watched(self, first, last, out):
        slices.append((first, last))
        read(self, first, last, out)

    monkeypatch.setattr(_hdf5._PlainRows, "read", watched)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *_: pytest.fail("no slice"))
    source = HDF5Source(three / "*.h5", features="x")
    batches = Batches(source, batch_size=3, block=3, window=3, shuffle=True)
    assert sorted(x[0] for (batch,) in batches.epoch(0) for x in batch) == list(range(9))
    assert sorted(slices) == [(0, 4), (0, 5)]  # once each, as they lie


# -- which files -------------------------------------------------------------------------------------


def test_files_are_sorted_however_they_are_given(three, monkeypatch):
    want = tuple(str(three / f"{name}.h5") for name in "abc")
    monkeypatch.chdir(three)
    listed = three / "all.txt"
    listed.write_text(f"# three\n\nc.h5\n  {three}/b.h5  # in the middle\n../{three.name}/a.h5\n")
    (three / "windows.txt").write_bytes(b"\xef\xbb\xbfa.h5\r\nb.h5\r\n\r\nc.h5\r\n")  # with a byte order mark
    (three / "some.lst").write_text("[ac].h5\n")
    for files in (
        "*.h5",
        three / "*.h5",
        str(three / "**" / "[a-c].h5"),
        list(want[::-1]),
        {*want},
        iter(map(os.path.basename, want)),
        ["c.h5", "[ab].h5"],
        listed,
        "all.txt",
        ["some.lst", "b.h5"],
        "windows.txt",
    ):
        assert list_files(files) == want


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 4), "compression": "gzip"}], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ["x", "/g/x", "g"])
def test_links_may_lead_to_datasets_of_other_names(tmp_path, name, options):
    values = np.arange(24.0).reshape(6, 4)
    with h5py.File(tmp_path / "there.h5", "w") as file:
        file.create_dataset("deep/y", data=values, **options)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("there.h5", "/deep/y")
        file["g/x"] = h5py.SoftLink("/x")
    with closing(HDF5Source(tmp_path / "a.h5", features=name)) as source:
        (features,) = source.take(1, 5)
        np.testing.assert_array_equal(features[0] if name == "g" else features, values[1:5])


def test_a_name_with_a_bracket_in_it_is_a_name(tmp_path):
    path = write(tmp_path / "run[1].h5", x=rows(0, 2))
    assert list_files(path) == (str(path),)


def test_a_file_that_is_somewhere_else_is_left_as_it_is():
    assert list_files("root://host//a/../b.h5") == ("root://host//a/../b.h5",)
    assert list_files("s3://data/a.txt?version=2") == ("s3://data/a.txt?version=2",)


# -- processes ---------------------------------------------------------------------------------------


def taken(source, queue):
    queue.put(source.take(3, 6)[1].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_process_opens_the_files_by_itself(three, method):
    source = HDF5Source(three / "*.h5", features="x", labels="y")
    source.take(0, 9)  # they are open here
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=taken, args=[source, queue])
    process.start()
    assert queue.get(timeout=60) == [3, 4, 5]
    process.join(60)
    assert process.exitcode == 0
    assert source.take(8, 9)[1] == 8


def test_what_is_open_does_not_travel(three):
    source = HDF5Source(three / "*.h5", features="x", labels="y")
    source.take(0, 9)
    copy = pickle.loads(pickle.dumps(source))
    source.close()
    assert copy.take(8, 9)[1] == 8


def test_few_files_are_open_at_a_time(tmp_path):
    for index in range(3 * _KEPT):
        write(tmp_path / f"{index:02}.h5", x=rows(index, index + 1))
    source = HDF5Source(tmp_path / "*.h5", features="x")
    folder = Path("/proc/self/fd")
    for _ in range(2):
        assert [int(source.take(n, n + 1)[0][0, 0]) for n in range(3 * _KEPT)] == list(range(3 * _KEPT))
        targets = [os.path.realpath(path) for path in folder.iterdir()]
        assert sum(target.startswith(str(tmp_path)) for target in targets) == _KEPT
    source.close()


def test_threads_do_not_close_each_others_files(tmp_path):
    count = 2 * _KEPT
    for index in range(count):
        write(tmp_path / f"{index:02}.h5", x=rows(index, index + 1))
    source, found = HDF5Source(tmp_path / "*.h5", features="x"), []

    def work(seed):
        for number in np.random.default_rng(seed).permutation(count).tolist():
            found.append(int(source.take(number, number + 1)[0][0, 0]) == number)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 4 * count


# -- what cannot be read -----------------------------------------------------------------------------

X, Y = rows(0, 6), np.arange(6)


def good(folder, name="a.h5", **contents):
    return write(folder / name, **({"x": X, "y": Y} | contents))


def cut(folder):
    path = good(folder, x=np.ones((6, 500)))
    os.truncate(path, path.stat().st_size // 2)
    return path


def other(folder, **contents):
    """Write a good file, and one that differs."""
    good(folder)
    write(folder / "b.h5", **contents)
    return folder / "*.h5"


def text(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content) if isinstance(content, str) else path.write_bytes(content)
    return path


def linked(target):
    def make(group, name):
        group[name] = target

    return make


def typed(dtype, **options):
    return lambda group, name: group.create_dataset(name, (6,), dtype, **options)


def virtual(group, name):
    layout = h5py.VirtualLayout((6, 2), "f4")
    layout[:] = h5py.VirtualSource("gone.h5", "x", (6, 2))
    group.create_virtual_dataset(name, layout)


def link_file(folder, target, name="a.h5"):
    (folder / name).symlink_to(target)
    return folder / name


def shortened(size, folder):
    os.truncate(good(folder), size)
    return folder / "a.h5"


def flipped(place, folder):
    content = bytearray(good(folder).read_bytes())
    content[place] ^= 0xFF
    return text(folder / "a.h5", bytes(content))


def socket_file(folder):
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as one:  # a long path is none for a socket
        one.bind("a.h5")
    return folder / "a.h5"


def circle(group, name):
    inside = group.create_group(name)
    inside["again"] = inside


def exotic(group, name):
    """Write a dataset compressed with a filter that does not exist."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((6, 2))
    properties.set_filter(32765, h5py.h5z.FLAG_OPTIONAL, ())
    space = h5py.h5s.create_simple((6, 2))
    h5py.h5d.create(group.id, name.encode(), h5py.h5t.IEEE_F32LE, space, properties)


def forbidden(folder):
    good(folder).chmod(0)
    return folder / "a.h5"


def pipe(folder):
    os.mkfifo(folder / "a.h5")
    return folder / "a.h5"


def hidden(folder):
    good(folder / "inner")
    (folder / "inner").chmod(0)
    return folder / "inner" / "a.h5"


XY = {"features": "x", "labels": "y"}
#: What is given: how it is made, the options if others than x and y, the file that is to be named, and words
#: that say what is wrong and what to do.
HOSTILE = {
    "truncated": (cut, XY, "a.h5", "is truncated.*again"),
    "only its head": (
        lambda f: (good(f), os.truncate(f / "a.h5", 60))[0],
        XY,
        "a.h5",
        "truncated|cannot be opened.*h5ls",
    ),
    "empty": (lambda f: text(f / "a.h5", ""), XY, "a.h5", "is empty .*make it again"),
    "text": (
        lambda f: text(f / "a.h5", "1 2 3\n"),
        XY,
        "a.h5",
        r"is not an HDF5 file.*b'1 2 3\\n'.*convert it",
    ),
    "zeros": (lambda f: text(f / "a.h5", bytes(4096)), XY, "a.h5", "is not an HDF5 file"),
    "a pickle": (lambda f: text(f / "a.h5", pickle.dumps([1])), XY, "a.h5", "is not an HDF5 file"),
    "a zip file": (lambda f: text(f / "a.h5", b"PK\3\4" + bytes(99)), XY, "a.h5", "is not an HDF5 file"),
    "missing": (lambda f: f / "a.h5", XY, "a.h5", "does not exist.*correct the path"),
    "in a missing folder": (lambda f: f / "no" / "a.h5", XY, "no/a.h5", "does not exist.*correct the path"),
    "missing among others": (lambda f: [good(f), f / "b.h5"], XY, "b.h5", "does not exist"),
    "a folder": (lambda f: f, XY, "", r"is a folder; name its files, e\.g\. '.*\*\.h5'"),
    "a pipe": (pipe, XY, "a.h5", "is not an ordinary file"),
    "a dangling link": (
        lambda f: link_file(f, "gone.h5"),
        XY,
        "a.h5",
        r"is a link to gone\.h5.*correct the link",
    ),
    "a circle of links": (
        lambda f: link_file(f, "a.h5"),
        XY,
        "a.h5",
        r"is a link to a\.h5.*correct the link",
    ),
    "no permission": (forbidden, XY, "a.h5", "no permission.*chmod"),
    "no permission for its folder": (hidden, XY, "inner/a.h5", "you may not enter.*chmod"),
    "on another machine": (
        lambda f: "root://far/a.h5",
        XY,
        "root://far/a.h5",
        "not on this machine.*stage_to",
    ),
    "a pattern of nothing": (lambda f: f / "*.h5", XY, "*.h5", "matches nothing.*correct the pattern"),
    "no files": (lambda f: [], XY, "", r"files=\[\] names no file; give"),
    "a number": (lambda f: [3], XY, "", "files has 3 in it, which is not a path"),
    "an empty path": (lambda f: [good(f), ""], XY, "", "files has '' in it, which is not a path"),
    "twice": (lambda f: [good(f), f / "*.h5"], XY, "a.h5", "is listed twice.*once"),
    "twice by ..": (lambda f: [good(f), f / "no" / ".." / "a.h5"], XY, "a.h5", "is listed twice"),
    "a missing list": (lambda f: f / "a.txt", XY, "a.txt", "list file .* cannot be read"),
    "an empty list": (lambda f: text(f / "a.txt", ""), XY, "a.txt", "names no file; write a path"),
    "a list of comments": (lambda f: text(f / "a.txt", "# a.h5\n\n \n"), XY, "a.txt", "names no file"),
    "a list that is a folder": (
        lambda f: ((f / "a.lst").mkdir(), f / "a.lst")[1],
        XY,
        "a.lst",
        "cannot be read",
    ),
    "a list that is data": (lambda f: good(f, "a.list"), XY, "a.list", r"is not text.*end in \.h5"),
    "a list with a missing file": (lambda f: text(f / "a.txt", "#\nb.h5\n"), XY, "b.h5", "does not exist"),
    "a list that leaves its folder": (
        lambda f: text(f / "lists" / "a.txt", "../b.h5\n"),
        XY,
        "b.h5",
        "does not exist",
    ),
    "a list with a bad pattern": (
        lambda f: text(f / "a.txt", "#\n\nb*.h5 # all\n"),
        XY,
        "a.txt",
        r"line 3: 'b\*\.h5 # all' matches nothing",
    ),
    "a list with a file twice": (
        lambda f: (good(f), text(f / "a.txt", "a.h5\n./a.h5"))[1],
        XY,
        "a.h5",
        "twice",
    ),
    "no such name": (
        good,
        {"features": "z"},
        "a.h5",
        r"has no 'z'; it has 'x', 'y'.*Name its datasets by features= .*\(--features-name",
    ),
    "no name at all": (good, {}, "a.h5", "features=None: give the name .* has 'x', 'y'"),
    "nearly the name": (
        lambda f: good(f, images=X),
        {"features": "image"},
        "a.h5",
        "Did you mean 'images'?",
    ),
    "no such label": (good, {"features": "x", "labels": "Y"}, "a.h5", "has no 'Y'"),
    "no such name in a group": (
        lambda f: good(f, g={"a": X}),
        {"features": "g/b"},
        "a.h5",
        "has no 'g/b'; it has 'g', 'x', 'y'",
    ),
    "a name below a dataset": (good, {"features": "x/b"}, "a.h5", "has no 'x/b'"),
    "nothing inside": (lambda f: write(f / "a.h5"), XY, "a.h5", "has no 'x'; it has no datasets"),
    "hundreds of names": (
        lambda f: write(f / "a.h5", **{f"name{i}": 1 for i in range(300)}),
        XY,
        "a.h5",
        "and 292 more",
    ),
    "a dangling soft link": (
        lambda f: good(f, x=linked(h5py.SoftLink("/gone"))),
        XY,
        "a.h5",
        "has 'x' as a link to '/gone'.*correct the link",
    ),
    "a dangling outer link": (
        lambda f: good(f, x=linked(h5py.ExternalLink("gone.h5", "/x"))),
        XY,
        "a.h5",
        r"link to '/x' in the file 'gone\.h5', which cannot be opened",
    ),
    "views of a missing file": (lambda f: good(f, x=virtual), XY, "a.h5", r"its data in 'gone\.h5'.*zeros"),
    "raw data elsewhere": (
        lambda f: good(f, y=typed("f4", external=[("gone.raw", 0, 24)])),
        XY,
        "a.h5",
        "its data in 'gone.raw'",
    ),
    "an empty group": (lambda f: good(f, x={}), XY, "a.h5", "the group 'x' is empty; name one of"),
    "a group in a group": (lambda f: good(f, x={"b": {"c": X}}), XY, "a.h5", "'b' is a group;"),
    "a dangling link in a group": (
        lambda f: good(f, x={"b": linked(h5py.SoftLink("/gone"))}),
        XY,
        "a.h5",
        "'b' is a broken link;",
    ),
    "the whole file": (good, {"features": "/"}, "", "features='/': give the name of a dataset"),
    "no name": (good, {"features": []}, "", r"features=\[\]: give the name"),
    "a number as a name": (good, {"features": "x", "labels": [0]}, "", r"labels=\[0\]: give the name"),
    "a named type": (lambda f: good(f, x=linked(np.dtype("f4"))), XY, "a.h5", "'x' is a named type"),
    "one number": (lambda f: good(f, y=3.0), XY, "a.h5", "/y is one number, but needs a row for each sample"),
    "no data": (lambda f: good(f, y=linked(h5py.Empty("f4"))), XY, "a.h5", "/y has no data"),
    "samples of nothing": (lambda f: good(f, x=np.ones((6, 0, 2))), XY, "a.h5", r"of shape \(0, 2\)"),
    "unequal lengths": (
        lambda f: good(f, y=Y[:5]),
        XY,
        "a.h5",
        "unequal lengths: /x has 6, /y has 5; each needs a row",
    ),
    "unequal lengths in a group": (lambda f: good(f, x={"a": X, "b": Y[:2]}), XY, "a.h5", "/x/b has 2"),
    "no samples": (lambda f: good(f, x=X[:0], y=Y[:0]), XY, "a.h5", "no samples in x, y; give files"),
    "no samples in any": (
        lambda f: other(f / "z", x=X, y=Y) and (good(f, x=X[:0], y=Y[:0]), good(f, "b.h5", x=X[:0], y=Y[:0])),
        XY,
        "a.h5",
        "and all other 1 files have no samples",
    ),
    "texts": (lambda f: good(f, y=["a"] * 6), XY, "a.h5", "/y has the type object .texts.*float32"),
    "short texts": (lambda f: good(f, y=np.array([b"a"] * 6)), XY, "a.h5", "the type object .texts"),
    "ragged rows": (lambda f: good(f, y=typed(h5py.vlen_dtype("f4"))), XY, "a.h5", "rows of unequal length"),
    "references": (lambda f: good(f, y=typed(h5py.ref_dtype)), XY, "a.h5", "references"),
    "enumerations": (
        lambda f: good(f, y=typed(h5py.enum_dtype({"a": 0, "b": 1}))),
        XY,
        "a.h5",
        "enumerations",
    ),
    "records": (lambda f: good(f, y=np.zeros(6, "f4,i4")), XY, "a.h5", "has the type .*'f0'"),
    "complex numbers": (lambda f: good(f, y=Y * 1j), XY, "a.h5", "has the type complex128"),
    "long doubles": (lambda f: good(f, y=Y.astype(np.longdouble)), XY, "a.h5", "has the type float128"),
    "another shape": (
        lambda f: other(f, x=rows(0, 6, 3), y=Y),
        XY,
        "b.h5",
        r"samples of \(3,\) float32, but /x in .*a\.h5 has \(2,\) float32; make all files alike",
    ),
    "another rank": (lambda f: other(f, x=X, y=X), XY, "b.h5", r"/y has samples of \(2,\)"),
    "another type": (lambda f: other(f, x=X.astype("f8"), y=Y), XY, "b.h5", "float64, but /x in"),
    "another name": (lambda f: other(f, X=X, y=Y), XY, "b.h5", "has no 'x'; it has 'X', 'y'"),
    "another group": (
        lambda f: (good(f, x={"a": X}), write(f / "b.h5", x={"a": X, "b": X}, y=Y))[0].parent / "*.h5",
        XY,
        "b.h5",
        r"has \['/x/a', '/x/b', '/y'\]|/x/b has samples of",
    ),
    "a group and a dataset": (lambda f: other(f, x={"x": X}, y=Y), XY, "b.h5", "/x/x has samples"),
    "another length of labels": (lambda f: other(f, x=X, y=Y[:1]), XY, "b.h5", "/x has 6, /y has 1"),
    "an empty file among others": (
        lambda f: (good(f), text(f / "b.h5", ""))[0].parent / "*.h5",
        XY,
        "b.h5",
        "is empty",
    ),
    **{
        f"cut to {size} bytes": (functools.partial(shortened, size), XY, "a.h5", "again|convert|h5ls")
        for size in (1, 7, 8, 9, 47, 95, 96, 200, 511, 800, 1024, 1500, 2000, 2143)
    },
    # What they are is a matter of HDF5's format: of the superblock, the root group, its tree and its heap.
    **{
        f"byte {place} is wrong": (functools.partial(flipped, place), XY, "a.h5", "again|convert|h5ls")
        for place in (0, 4, 8, 9, 13, 14, 16, 24, 40, 64, 96, 112, 120, 128, 136, 140, 142, 168, 172)
    },
    "twice by a link": (
        lambda f: (good(f), link_file(f, "a.h5", "b.h5"))[0].parent / "*.h5",
        XY,
        "b.h5",
        r"and .*a\.h5 are one file, by a link.*name one",
    ),
    "twice by a hard link": (
        lambda f: (good(f), (f / "b.h5").hardlink_to(f / "a.h5"))[0].parent / "*.h5",
        XY,
        "b.h5",
        "are one file",
    ),
    "a circle of folders": (
        lambda f: (good(f), link_file(f, ".", "again"))[0].parent / "**" / "*.h5",
        XY,
        "a.h5",
        "are one file",
    ),
    "a circle of two links": (
        lambda f: (link_file(f, "b.h5", "a.h5"), link_file(f, "a.h5", "b.h5"))[0],
        XY,
        "a.h5",
        "is a link to .*correct the link",
    ),
    "a device": (lambda f: Path("/dev/zero"), XY, "", "/dev/zero is not an ordinary file"),
    "a socket": (socket_file, XY, "a.h5", "is not an ordinary file"),
    "a folder that a pattern finds": (
        lambda f: ((f / "a.h5").mkdir(), f / "*.h5")[1],
        XY,
        "a.h5",
        "is a folder",
    ),
    "a pipe that a pattern finds": (
        lambda f: (good(f, "b.h5"), pipe(f), f / "*.h5")[2],
        XY,
        "a.h5",
        "not an ordinary",
    ),
    "a path below a file": (lambda f: good(f) / "b.h5", XY, "a.h5/b.h5", "does not exist"),
    "the folder of nobody": (
        lambda f: "~nobody-at-all/a.h5",
        XY,
        "",
        "no such home folder.*write the whole path",
    ),
    "a variable in a path": (lambda f: f / "$DATA" / "a.h5", XY, "$DATA/a.h5", "does not exist"),
    "a path with a zero": (lambda f: f"{f}/a\0.h5", XY, "", "is not a path: .*zero bytes"),
    "a path without end": (lambda f: "a" * 5000, XY, "", "is not a path: it has 5000 characters"),
    "a name without end": (lambda f: f / ("a" * 300), XY, "", "does not exist"),
    "no list at all": (lambda f: None, XY, "", "files has None in it, which is not a path"),
    "one number for all": (lambda f: 3, XY, "", "files has 3 in it, which is not a path"),
    "bytes for a path": (lambda f: b"a.h5", XY, "", "files has b'a.h5' in it, which is not a path"),
    "a list of lists": (lambda f: [[good(f)]], XY, "a.h5", "in it, which is not a path"),
    "a list that is a pipe": (
        lambda f: (os.mkfifo(f / "a.txt"), f / "a.txt")[1],
        XY,
        "a.txt",
        r"cannot be read \(it is a pipe, not a regular file\)",
    ),
    "a list that is a device": (
        lambda f: link_file(f, "/dev/zero", "a.txt"),
        XY,
        "a.txt",
        r"cannot be read \(it is a device, not a regular file\)",
    ),
    "a list that is a dangling link": (
        lambda f: link_file(f, "b.txt", "a.txt"),
        XY,
        "a.txt",
        "cannot be read",
    ),
    "a list of nobody": (lambda f: "~nobody-at-all/a.txt", XY, "", "cannot be found"),
    "a list with a zero": (lambda f: text(f / "a.txt", "b\0.h5"), XY, "a.txt", "line 1: .* is not a path"),
    "a list in UTF-16": (
        lambda f: text(f / "a.txt", "b.h5\n".encode("utf-16")),
        XY,
        "a.txt",
        "UTF-8 text file",
    ),
    "a list in Latin-1": (
        lambda f: text(f / "a.txt", "bä.h5\n".encode("latin-1")),
        XY,
        "a.txt",
        "UTF-8 text file",
    ),
    "a list that is one line": (
        lambda f: text(f / "a.txt", "x" * 9999),
        XY,
        "a.txt",
        "line 1: .* is not a path",
    ),
    "a list of a list": (
        lambda f: (text(f / "b.txt", "c.h5"), text(f / "a.txt", "b.txt"))[1],
        XY,
        "b.txt",
        r"is not an HDF5 file.*b'c\.h5'",
    ),
    "a list of itself": (lambda f: text(f / "a.txt", "a.txt"), XY, "a.txt", "is not an HDF5 file"),
    "a list of a folder": (lambda f: ((f / "b").mkdir(), text(f / "a.txt", "b"))[1], XY, "b", "is a folder"),
    "a list with commas": (lambda f: (good(f), text(f / "a.txt", "a.h5, b.h5"))[1], XY, "", "does not exist"),
    "a list with quotes": (
        lambda f: (good(f), text(f / "a.txt", "'a.h5'"))[1],
        XY,
        "'a.h5'",
        "does not exist",
    ),
    "a list of the root": (lambda f: text(f / "a.txt", "/"), XY, "", "/ is a folder"),
    "a list far outside": (
        lambda f: text(f / "a.txt", "../" * 40 + "etc/hostname"),
        XY,
        "",
        "/etc/hostname (is not an HDF5 file|is empty|does not exist)",
    ),
    "a name with a zero": (good, {"features": "x\0"}, "", "give the name of a dataset"),
    "a name in bytes": (good, {"features": b"x"}, "", "features=b'x': give the name"),
    "no features": (good, {"features": None}, "", "features=None: give the name"),
    "features by number": (good, {"features": 0}, "", "features=0: give the name"),
    "a name with ..": (lambda f: good(f, g={"a": X}), {"features": "g/../x"}, "a.h5", "has no 'g/../x'"),
    "names of which one is missing": (good, {"features": ["x", "z"]}, "a.h5", "has no 'z'"),
    "weights without labels": (good, {"features": "x", "weights": "y"}, "", "pass labels="),
    "missing weights": (good, {**XY, "weights": "w"}, "a.h5", "has no 'w'"),
    "weights of another length": (
        lambda f: good(f, w=np.ones(3)),
        {**XY, "weights": "w"},
        "a.h5",
        "unequal lengths: .*/w has 3",
    ),
    "weights that are texts": (
        lambda f: good(f, w=["a"] * 6),
        {**XY, "weights": "w"},
        "a.h5",
        "the type object",
    ),
    "a circle of soft links": (
        lambda f: good(f, x=linked(h5py.SoftLink("/z")), z=linked(h5py.SoftLink("/x"))),
        XY,
        "a.h5",
        "has 'x' as a link to '/z'",
    ),
    "a link to itself": (lambda f: good(f, x=linked(h5py.SoftLink("/x"))), XY, "a.h5", "as a link to '/x'"),
    "a group in itself": (lambda f: good(f, x=circle), XY, "a.h5", "'again' is a group;"),
    "an outer link to itself": (
        lambda f: good(f, x=linked(h5py.ExternalLink("a.h5", "/x"))),
        XY,
        "a.h5",
        "as a link to '/x' in the file 'a.h5'",
    ),
    "an outer link out of the folder": (
        lambda f: good(f, x=linked(h5py.ExternalLink("../../../etc/hostname", "/x"))),
        XY,
        "a.h5",
        "as a link to '/x' in the file '../../../etc/hostname'",
    ),
    "an outer link to a pipe": (
        lambda f: (os.mkfifo(f / "pipe"), good(f, x=linked(h5py.ExternalLink("pipe", "/x"))))[1],
        XY,
        "a.h5",
        "'x' is a link into 'pipe', which is not an ordinary file",
    ),
    "an outer link to a pipe in a group": (
        lambda f: (os.mkfifo(f / "pipe"), good(f, x={"a": linked(h5py.ExternalLink("pipe", "/x"))}))[1],
        XY,
        "a.h5",
        "'a' is a link into 'pipe'",
    ),
    "an outer link below a group": (
        lambda f: (os.mkfifo(f / "pipe"), good(f, g={"a": linked(h5py.ExternalLink("pipe", "/"))}))[1],
        {"features": "g/a/x"},
        "a.h5",
        "is a link into 'pipe'",
    ),
    "an outer link to a text": (
        lambda f: (text(f / "b", "1"), good(f, x=linked(h5py.ExternalLink("b", "/x"))))[1],
        XY,
        "a.h5",
        "in the file 'b', which cannot be opened",
    ),
    "an outer link to nothing in a file": (
        lambda f: (good(f / "z"), good(f, x=linked(h5py.ExternalLink("z/a.h5", "/no"))))[1],
        XY,
        "a.h5",
        "as a link to '/no' in the file 'z/a.h5'",
    ),
    "views of a pipe": (
        lambda f: (os.mkfifo(f / "gone.h5"), good(f, x=virtual))[1],
        XY,
        "a.h5",
        r"its data in 'gone\.h5', which is not an ordinary file",
    ),
    "views of a text": (
        lambda f: (text(f / "gone.h5", "1"), good(f, x=virtual))[1],
        XY,
        "gone.h5",
        "is not an HDF5 file",
    ),
    "views of nothing in a file": (
        lambda f: (write(f / "gone.h5", z=X), good(f, x=virtual))[1],
        XY,
        "a.h5",
        r"its data in 'x' of 'gone\.h5', which does not exist; HDF5 would read zeros",
    ),
    "raw data from a device": (
        lambda f: good(f, y=typed("f4", external=[("/dev/zero", 0, 24)])),
        XY,
        "a.h5",
        "its data in '/dev/zero', which is not an ordinary file",
    ),
    "a compression that is not here": (lambda f: good(f, x=exotic), XY, "a.h5", "filter 32765.*hdf5plugin"),
    "texts of fixed length": (lambda f: good(f, y=typed("S8")), XY, "a.h5", "the type object .texts"),
    "regions": (lambda f: good(f, y=typed(h5py.regionref_dtype)), XY, "a.h5", "references"),
    "opaque bytes": (lambda f: good(f, y=typed("V4")), XY, "a.h5", "has the type"),
    "rows within a type": (lambda f: good(f, y=typed(np.dtype(("f4", (3,))))), XY, "a.h5", "has the type"),
    "complex halves": (lambda f: good(f, y=Y.astype("c8")), XY, "a.h5", "complex64"),
    "a type in a group": (lambda f: good(f, x={"a": linked(np.dtype("f4"))}), XY, "a.h5", "'a' is"),
    "a text in a group": (
        lambda f: good(f, x={"a": X, "b": ["t"] * 6}),
        XY,
        "a.h5",
        "/x/b has the type object",
    ),
    "one number in a group": (lambda f: good(f, x={"a": X, "b": 1.0}), XY, "a.h5", "/x/b is one number"),
    "another kind of labels": (lambda f: other(f, x=X, y=Y.astype("f4")), XY, "b.h5", "float32, but /y in"),
    "another sign of labels": (lambda f: other(f, x=X, y=Y.astype("u8")), XY, "b.h5", "uint64, but /y in"),
    "one more dimension": (lambda f: other(f, x=X[..., None], y=Y), XY, "b.h5", r"of \(2, 1\) float32, but"),
    "one dimension less": (lambda f: other(f, x=X[:, 0], y=Y), XY, "b.h5", r"of \(\) float32, but"),
    "one file fewer inputs": (
        lambda f: (good(f, x={"a": X, "b": X}), write(f / "b.h5", x={"a": X}, y=Y))[0].parent / "*.h5",
        XY,
        "b.h5",
        "make all files alike",
    ),
    "a truncated one among others": (
        lambda f: (good(f, "b.h5"), cut(f), f / "*.h5")[2],
        XY,
        "a.h5",
        "truncated",
    ),
    "a text among others": (
        lambda f: (good(f, "b.h5"), text(f / "a.h5", "x"), f / "*.h5")[2],
        XY,
        "a.h5",
        "not an HDF5",
    ),
    "an adaptor that is none": (good, {**XY, "adapt_features": 3}, "", "adapt_features=3 is not a function"),
    "an adaptor that raises": (
        good,
        {**XY, "adapt_labels": lambda y: y["a"]},
        "",
        r"adapt_labels failed on 1 sample, int64\[1\], with IndexError: .*test it with",
    ),
    "an adaptor for fewer columns": (
        good,
        {**XY, "adapt_features": lambda x: x[:, 7]},
        "",
        r"adapt_features failed on 1 sample, float32\[1, 2\], with IndexError: .*out of bounds",
    ),
    "a command without a folder": (
        good,
        {**XY, "copy_command": ["cp", "{src}", "{dst}"]},
        "",
        "was given without stage_to=; pass a local folder",
    ),
}


@pytest.fixture
def unprivileged():
    """Become an unprivileged user, because root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize("case", HOSTILE)
def test_what_cannot_be_read_is_named_with_its_cure(case, tmp_path, request):
    make, options, named, problem = HOSTILE[case]
    files = make(tmp_path)
    if case.startswith("no permission"):
        for folder in (tmp_path, *list(tmp_path.parents)[:2]):
            folder.chmod(0o755)
        request.getfixturevalue("unprivileged")
    with pytest.raises(ConfigurationError) as caught:
        HDF5Source(files, **options)
    told = str(caught.value)
    assert re.search(problem, told), told
    assert (named if "://" in named else str(tmp_path / named) if named else "") in told
    assert len(told) < 900  # of a screen
    assert told.count("\n") < 8


def test_there_are_many_ways_to_be_wrong():
    assert len(HOSTILE) >= 150


@pytest.mark.extended
@pytest.mark.parametrize("content", ["no{}.h5\n", "a.h5\n"])
def test_a_list_of_a_million_lines_is_refused_in_few_words(tmp_path, content):
    path = text(tmp_path / "a.txt", "".join(content.format(index) for index in range(1_000_000)))
    with pytest.raises(ConfigurationError, match=r"does not exist|is listed twice") as caught:
        HDF5Source(path, features="x")
    assert len(str(caught.value)) < 900


def test_any_damage_is_a_damage_that_is_named(tmp_path):
    """With any wrong byte, the file is read, or refused by name, and no other error is raised."""
    content, told = good(tmp_path).read_bytes(), []
    for place in range(0, len(content), 13):
        path = flipped(place, tmp_path)
        try:
            HDF5Source(path, **XY).take(0, 6)
        except ConfigurationError as error:
            told.append(str(error))
    assert len(told) > 20
    assert all(text.startswith(str(path)) for text in told)


def test_of_many_bad_files_a_few_are_named(tmp_path):
    for index in range(100):
        text(tmp_path / f"{index:03}.h5", "nothing")
    with pytest.raises(ConfigurationError) as caught:
        HDF5Source(tmp_path / "*.h5", features="x")
    assert re.findall(r"(\d+)\.h5 is not an HDF5", str(caught.value)) == ["000", "001", "002"]
    assert str(caught.value).endswith("and 97 more of 100 files")


def test_a_file_that_is_written_to_may_be_read_by_those_who_insist(tmp_path):
    path = good(tmp_path)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match=r"a\.h5 is locked: .*wait .*pass locking=False"):
            HDF5Source(path, features="x")
        assert len(HDF5Source(path, features="x", locking=False)) == 6


def test_where_there_are_no_locks_files_are_opened_without(tmp_path, monkeypatch, caplog):
    path, opened = good(tmp_path), h5py.File

    def lockless(path, mode, *, locking):
        if locking is None:
            raise OSError("Unable to open file (unable to lock file, errno = 38, error message = '...')")
        return opened(path, mode, locking=locking)

    monkeypatch.setattr(h5py, "File", lockless)
    assert len(HDF5Source(path, features="x")) == 6
    assert "the file system has no locks; the file is opened with locking=False" in caplog.text


def test_a_missing_h5py_is_named(tmp_path, monkeypatch):
    path, wanted = good(tmp_path), builtins.__import__

    def without(name, *args, **kwargs):
        if name == "h5py":
            raise ImportError(name)
        return wanted(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "h5py")
    with pytest.raises(MissingExtraError, match=r"pip install 'nnlo\[hdf5\]'"):
        HDF5Source(path, features="x")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_if_asked_for(tmp_path, value):
    bad = X.copy()
    bad[4, 1] = value
    good(tmp_path)
    path = good(tmp_path, "b.h5", x=bad)
    source = HDF5Source(tmp_path / "*.h5", features="x", labels="y", check_finite=True)
    source.take(0, 10)
    with pytest.raises(ConfigurationError, match=r"b\.h5: sample 4 of /x is not finite.*remove it from"):
        source.take(5, 12)
    assert not np.isfinite(HDF5Source(path, features="x").take(0, 6)[0]).all()


def test_a_file_that_is_damaged_later_is_named_by_whoever_waits_for_it(tmp_path):
    good(tmp_path)
    path = good(
        tmp_path, "b.h5", x=lambda g, n: g.create_dataset(n, data=X, compression="gzip", chunks=(6, 2))
    )
    source = HDF5Source(tmp_path / "*.h5", features="x")
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(0)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    read = Batches(source, batch_size=2, window=3).epoch(0)
    assert [len(next(read)[0]) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(ConfigurationError, match=r"b\.h5: samples 0 to 5 of /x cannot be read .*damaged"):
        next(read)


@given(st.sets(st.integers(0, 8), min_size=1), st.integers(1, 4), st.booleans())
@settings(suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture])
def test_some_of_the_samples_are_read_as_if_they_were_all(three, chosen, batch_size, shuffle):
    wanted = sorted(chosen)
    source = HDF5Source(three / "*.h5", features="x", labels="y", samples=wanted)
    assert len(source) == len(wanted)
    read = [y for _, y in Batches(source, batch_size=batch_size, shuffle=shuffle, block=2).epoch(0)]
    assert sorted(np.concatenate(read).tolist()) == wanted
    start, stop = len(wanted) // 3, len(wanted)
    x, y = source.take(start, stop)
    assert (x[:, 0] == y).all()
    assert y.tolist() == wanted[start:]
    source.close()


def test_samples_that_take_too_much_memory_are_refused_by_file_and_column(tmp_path):
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:  # hardly any of it is stored
        file.create_dataset("x", (10**7, 50_000_000), "f4", chunks=(1, 1000))[0, :1000] = 1
    with (
        closing(HDF5Source(path, features="x", cache="none")) as source,
        pytest.raises(ConfigurationError, match=r"large\.h5': 10000000 samples of /x need .* GiB of memory"),
    ):
        source.take(0, 10**7)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [2, 1],
        [1, 1],
        [-1, 2],
        [8, 9],
        [0.5],
        ["a"],
        np.array([0, 4, 2], "u4"),  # its differences wrap around
        np.array([0, 2**64 - 1, 3], "u8"),
        np.array([2**63, 2**63 + 1], "u8"),
        np.array([1, 2**63, 3], "u8"),
    ],
)
def test_samples_that_are_not_there_are_refused(samples, three):
    with pytest.raises(ConfigurationError, match="give rising whole numbers from 0 to 8"):
        HDF5Source(three / "*.h5", features="x", samples=samples)


@pytest.mark.parametrize(
    ("there", "found"), [("b", "b"), ("w", "w"), ("a", "a"), ("bw", "w"), ("ab", "a"), ("abw", "a")]
)
@pytest.mark.parametrize("name", ["view", "blocks", "outer"])
def test_sources_are_looked_for_where_hdf5_finds_them(tmp_path, monkeypatch, name, there, found):
    """In a: beside the link that is read; then in w: where the program runs; then in b: beside its target."""
    for folder in "abw":
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "w")
    with h5py.File(tmp_path / "b" / "of.h5", "w") as file:
        layout = h5py.VirtualLayout((3,), "f4")
        layout[:] = h5py.VirtualSource("s0.h5", "x", (3,))
        file.create_virtual_dataset("view", layout)
        space, make = h5py.h5s.create_simple((3,), (h5py.h5s.UNLIMITED,)), h5py.h5p.create
        space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (3,), (3,))
        blocks = make(h5py.h5p.DATASET_CREATE)
        blocks.set_virtual(space, b"s%b.h5", b"x", h5py.h5s.create_simple((3,)))
        h5py.h5d.create(file.id, b"blocks", h5py.h5t.IEEE_F32LE, space, blocks)
        file["outer"] = h5py.ExternalLink("s0.h5", "/x")
    for folder in there:
        write(tmp_path / folder / "s0.h5", x=np.full(3, ord(folder), "f4"))
    link = link_file(tmp_path / "a", "../b/of.h5")
    with h5py.File(link) as file:
        assert file[name][:].tolist() == [ord(found)] * 3
    with closing(HDF5Source(link, features=name)) as source:
        assert source.take(0, 3)[0].tolist() == [ord(found)] * 3


def test_sources_of_views_behind_a_link_are_beside_the_file_that_has_the_views(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "gone.h5", x=X)
    write(tmp_path / "b" / "views.h5", x=virtual)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("b/views.h5", "/x")
    with closing(HDF5Source(tmp_path / "a.h5", features="x")) as source:
        np.testing.assert_array_equal(source.take(0, 6)[0], X)


def test_a_file_that_has_vanished_is_named(tmp_path):
    path = good(tmp_path)
    source = HDF5Source(path, features="x")
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"a\.h5 does not exist"):
        source.take(0, 1)


def test_of_copies_the_originals_are_named(tmp_path):
    path = cut(tmp_path)
    with pytest.raises(ConfigurationError, match="is truncated") as caught:
        HDF5Source(path, **XY, stage_to=tmp_path / "local")
    assert str(caught.value).startswith(f"{path} is truncated")
    bad = X.copy()
    bad[2] = np.nan
    path = good(tmp_path, "b.h5", x=bad)
    source = HDF5Source(path, **XY, stage_to=tmp_path / "local", check_finite=True)
    with pytest.raises(ConfigurationError, match="sample 2 of /x is not finite") as caught:
        source.take(0, 6)
    assert str(caught.value).startswith(f"{path}: ")
    source.close()
    assert list((tmp_path / "local").iterdir()) == []


# -- large data --------------------------------------------------------------------------------------


@pytest.mark.extended
def test_of_a_thousand_files_each_is_opened_once_to_look_at_it(tmp_path, monkeypatch):
    for index in range(1000):
        write(tmp_path / f"{index:04}.h5", x=rows(0, 3), y=np.arange(3))
    opened = []

    class Counted(h5py.File):
        def __init__(self, name, *args, **options):
            opened.append(Path(name).name)
            super().__init__(name, *args, **options)

    monkeypatch.setattr(h5py, "File", Counted)
    assert len(HDF5Source(tmp_path / "*.h5", features="x", labels="y")) == 3000
    assert sorted(opened) == [f"{index:04}.h5" for index in range(1000)]


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_two_gigabytes_are_streamed_in_little_memory(tmp_path):
    """The files are sparse: unwritten parts take memory when they are read, but no room on the disk."""
    for index in range(8):
        with h5py.File(tmp_path / f"{index}.h5", "w") as file:
            file.create_dataset("x", (64_000, 1000), "f4")
    source = HDF5Source(tmp_path / "*.h5", features="x")
    assert len(source) * source.fields[0].row_bytes > 2e9
    gc.collect()
    before, most, seen = Usage.now().memory_mb, 0.0, 0
    for (x,) in Batches(source, batch_size=200, shuffle=True).epoch(0):
        seen += len(x)
        most = max(most, Usage.now().memory_mb)
    assert seen == len(source)
    assert most - before < 300
