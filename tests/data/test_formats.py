"""Every format gives the same samples, epochs, shares and leases, and says what is wrong with a file."""

from __future__ import annotations

import pickle
import re
import sys
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError, MissingExtraError
from nnlo_common.data import Batches, FileBatches, FileSource, LeasedBatches, Leases, portion
from nnlo_common.data._listing import list_files
from tests.helpers.format_files import FORMATS, make

for package in ("h5py", "pyarrow", "uproot", "zarr"):
    pytest.importorskip(package, reason="the environment for MPICH has no readers of files")


def columns(start, stop):
    """Return columns of every kind, in which each sample has its number."""
    n = np.arange(start, stop)
    return {
        "x": np.stack([n, n * 2], 1).astype("f4"),
        "n": n.astype("i8"),
        "even": n % 2 == 0,
        "w": n / 7,
        "small": (n % 200).astype("u1"),
        "image": (n[:, None, None] + np.zeros((1, 2, 3))).astype("i4"),
    }


@pytest.fixture(params=FORMATS)
def kind(request):
    return request.param


@pytest.fixture
def files(kind, tmp_path):
    """Files of 7, 1 and 12 samples, in pieces of 3."""
    return [
        make(kind, tmp_path / name, columns(*ends))
        for name, ends in zip("abc", [(0, 7), (7, 8), (8, 20)], strict=True)
    ]


def test_any_slice_is_what_was_written(files):
    wanted = columns(0, 20)
    options = {"features": ["x", "image", "small"], "labels": "n,even", "weights": "w"}
    for cache in ("none", "memory"):
        with closing(FileSource(files, **options, cache=cache)) as source:
            assert (len(source), list(source.lengths)) == (20, [7, 1, 12])
            for start in range(20):
                for stop in range(start + 1, 21):
                    features, labels, weights = source.take(start, stop)
                    for found, name in zip(features, options["features"], strict=True):
                        np.testing.assert_array_equal(found, wanted[name][start:stop])
                        assert found.dtype == wanted[name].dtype
                    np.testing.assert_array_equal(labels[:, 0], wanted["n"][start:stop])
                    np.testing.assert_array_equal(labels[:, 1], wanted["even"][start:stop])
                    np.testing.assert_array_equal(weights, wanted["w"][start:stop])


def test_over_all_workers_each_sample_comes_once_in_each_epoch(files):
    with closing(FileSource(files, features="x", labels="n")) as source:
        for workers in range(1, 6):
            orders = []
            for epoch in range(2):
                found = []
                for worker in range(workers):
                    part = portion(20, worker, workers)
                    batches = Batches(
                        source, batch_size=3, shuffle=True, seed=4, block=2, window=2, part=part
                    )
                    for x, n in batches.epoch(epoch):
                        np.testing.assert_array_equal(x[:, 1], 2 * n)
                        found += n.tolist()
                    batches.close()
                orders.append(found)
                assert sorted(found) == list(range(20))
            assert orders[0] != orders[1]


def test_the_order_of_an_epoch_does_not_depend_on_the_format(files):
    with closing(FileSource(files, features="n")) as source:
        batches = Batches(source, batch_size=3, shuffle=True, block=2, window=3)
        found = [n.tolist() for (n,) in batches.epoch(1)]
        again = pickle.loads(pickle.dumps(batches))
        assert [n.tolist() for (n,) in again.epoch(1)] == found
        again.source.close()
    with closing(FileSource({"n": Sliced(np.arange(20))}, features="n")) as source:
        plain = Batches(source, batch_size=3, shuffle=True, block=2, window=3)
        plain._order = batches._order  # of three files, not of one
        assert [n.tolist() for (n,) in plain.epoch(1)] == found


def test_leases_are_an_epoch(files):
    with closing(FileSource(files, features="n")) as source:
        batches = Batches(source, batch_size=2, shuffle=True, block=2, window=2, leased=True)
        mine = LeasedBatches(batches, Alone(20, [1], unit=batches.window_size))
        found = []
        while mine.more(0):
            (batch,), size = mine.take(0)
            assert len(batch) == size
            found += batch.tolist()
        batches.close()
    assert sorted(found) == list(range(20)) != found


class Alone(Leases):
    """The ledger of a single worker."""

    def take(self, epoch, unused):
        return self.ask(1, epoch, unused)


class Sliced:
    """An object with a length, whose slices are arrays."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, some):
        assert isinstance(some, slice)
        return self.array[some]


@pytest.mark.parametrize("rows", [[0, 0.5, 1.5], (True, 3, 1.5), [[1, 2], [3, 4.5], [5, 6]], [1, 2, 2**63]])
def test_a_list_has_the_type_of_all_its_rows(rows):
    with closing(FileSource({"x": rows}, features="x")) as source:
        (found,) = source.take(0, 3)
    np.testing.assert_array_equal(found, np.asarray(rows))


def test_a_list_of_numbers_and_texts_is_one_of_texts():
    with pytest.raises(ConfigurationError, match=r"x has the type object \(texts\)"):
        FileSource({"x": [1, "b"]}, features="x")


@pytest.mark.parametrize(("first", "later"), [(3, 0.5), (True, 2), (3, "b"), (np.uint8(3), -1), (3, None)])
def test_slices_of_an_object_that_do_not_fit_its_first_row_are_refused(first, later):
    class Unlike(Sliced):
        def __getitem__(self, some):
            return [first] if some == slice(0, 1) else self.array[some]

    with (
        closing(FileSource({"x": Unlike([first, later, later])}, features="x")) as source,
        pytest.raises(ConfigurationError, match=r"of x cannot be read: its rows are \S+, but the first is"),
    ):
        source.take(0, 3)


def test_cuts_choose_samples_and_what_is_numbered_after_them(files):
    cut = "n > 3 and not even or n == 0"
    wanted = [0, *range(5, 20, 2)]
    with closing(FileSource(files, features="x", labels="n", select=cut)) as source:
        assert source.take(0, len(source))[1].tolist() == wanted
        batches = Batches(source, batch_size=2, shuffle=True)
        assert sorted(chain.from_iterable(n.tolist() for _, n in batches.epoch(0))) == wanted
        batches.close()
    with closing(FileSource(files, features="n", select=cut, samples=[1, 3])) as source:
        assert source.take(0, 2)[0].tolist() == [wanted[1], wanted[3]]


@pytest.mark.parametrize(
    ("cut", "wanted"),
    [
        ("a - b > 0", [2]),
        ("-a < 0", [0, 1, 2]),
        ("a + b == 455", [2]),
        ("a * b == 4", [1]),
        ("a * 1000 == 1000", [0]),
        ("a * 2.5 == 5", [1]),
        ("abs(c) == 128", [0]),
        ("c - 1 < 0", [0, 1]),
        ("abs(sqrt(b) * sqrt(b) - 200) < 0.001", [2]),
        ("flag + (a > 1) + (b > 2) == 2", [1, 2]),
        ("flag - (a > 1) < 0", [2]),
        ("large % 10 == 7", [1, 2]),
        ("large - 5 == 2", [2]),
    ],
)
def test_whole_numbers_of_a_cut_do_not_wrap_around(cut, wanted):
    columns = {
        "a": np.array([1, 2, 255], "u1"),
        "b": np.array([2, 2, 200], "u1"),
        "c": np.array([-128, 0, 100], "i1"),
        "flag": np.array([True, True, False]),
        "large": np.array([2**63, 2**63 + 9, 7], "u8") if "%" in cut else np.array([5, 6, 7], "u8"),
        "n": np.arange(3),
    }
    with closing(FileSource(columns, features="n", select=cut)) as source:
        assert source.take(0, len(source))[0].tolist() == wanted


@pytest.mark.parametrize("cut", ["u + 1 > 0", "-u < 0", "u - u == 0", "i * i > 0", "i + i > 0", "i - u > 0"])
def test_whole_numbers_that_64_bits_do_not_hold_are_refused(cut):
    columns = {"u": np.array([1, 2**63], "u8"), "i": np.array([1, 2**62])}
    with pytest.raises(ConfigurationError, match=r"select='.*': .* beyond 64 bits.*multiply .* by 1\.0"):
        FileSource(columns, features="i", select=cut)


def test_names_that_are_missing_are_named_with_those_that_are_there(files):
    with pytest.raises(ConfigurationError, match=r"has no 'imag'; it has .*Did you mean 'image'\?"):
        FileSource(files, features="imag")
    with pytest.raises(ConfigurationError, match=r"'q\*' names no column; the first file has .*'image'"):
        FileSource(files, features="q*")
    with pytest.raises(ConfigurationError, match=r"features=None: give the name .* has .*'image'"):
        FileSource(files)


def test_files_that_differ_are_refused(kind, files, tmp_path):
    other = columns(0, 4) | {"x": np.zeros((4, 3), "f4")}
    files.append(make(kind, tmp_path / "other", other))
    with pytest.raises(ConfigurationError, match=r"samples of \(3,\) float32, but .* has \(2,\) float32"):
        FileSource(files, features="x")
    FileSource(files, features="n").close()


def test_patterns_and_lists_name_files_of_every_format(files, tmp_path):
    ending = files[0].removeprefix(f"{tmp_path}/a")
    (tmp_path / "train.list").write_text(f"?{ending}  # all\n")
    for given in (f"{tmp_path}/?{ending}", tmp_path / "train.list"):
        with closing(FileSource(given, features="n")) as source:
            assert source.take(0, 20)[0].tolist() == list(range(20))


@pytest.mark.parametrize("damage", ["empty", "truncated", "other"])
def test_damaged_files_are_refused_by_name(kind, files, damage):
    if kind == "Zarr":
        pytest.skip("it is a folder")
    path = files[2].removesuffix(":events")
    content = Path(path).read_bytes()
    content = {"empty": b"", "truncated": content[: len(content) // 2], "other": b"hello " * 100}[damage]
    Path(path).write_bytes(content)
    with (
        pytest.raises(ConfigurationError, match=r"c\.\w+") as caught,
        closing(FileSource(files, features=["x", "n"])) as source,
    ):
        source.take(0, 20)
    assert len(str(caught.value)) < 600


def test_missing_files_folders_and_pipes_are_refused(kind, files, tmp_path):
    ending = files[0].removesuffix(":events").rpartition("/a")[2]
    path = tmp_path / f"new{ending}"
    with pytest.raises(ConfigurationError, match="does not exist on this host"):
        FileSource(path, features="n")
    if kind != "Zarr":
        path.mkdir()
        with pytest.raises(ConfigurationError, match="is a folder; name its files"):
            FileSource(path, features="n")


def test_files_of_two_formats_are_not_one_data_set(tmp_path):
    files = [make(kind, tmp_path / "a", columns(0, 3)) for kind in ("npz", "HDF5")]
    with pytest.raises(ConfigurationError, match=r"is a .* file and .* a .* file; name files of one format"):
        FileSource(files, features="n")


@pytest.mark.parametrize("names", [(":events", ""), ("", ":events"), (":events", ":events;1"), ("", "")])
def test_a_tree_that_would_count_twice_is_refused(tmp_path, names):
    path = make("TTree", tmp_path / "a", columns(0, 5)).removesuffix(":events")
    (tmp_path / "b.root").symlink_to(path)
    other = path if names[0] != names[1] else tmp_path / "b.root"
    with pytest.raises(ConfigurationError, match=r"are one file.*name one of them only"):
        FileSource([f"{path}{names[0]}", f"{other}{names[1]}"], features="n")


def test_two_trees_of_a_file_are_two_sets_of_samples(tmp_path):
    uproot = pytest.importorskip("uproot")
    with uproot.recreate(tmp_path / "a.root") as file:
        for number, name in enumerate(("one", "two")):
            file.mktree(name, {"n": "i8"}).extend({"n": np.full(2, number)})
    names = [f"{tmp_path}/a.root:{name}" for name in ("one", "two")]
    with closing(FileSource(names, features="n")) as source:
        assert source.take(0, 4)[0].tolist() == [0, 0, 1, 1]


def test_a_tree_of_a_file_with_a_bracket_in_its_name_is_found(tmp_path):
    (tmp_path / "run[1].root").touch()
    assert list_files(tmp_path / "run[1].root:events") == (f"{tmp_path}/run[1].root:events",)


def test_a_folder_under_two_names_is_refused(tmp_path):
    path = make("Zarr", tmp_path / "a", columns(0, 5))
    (tmp_path / "b.zarr").symlink_to(path)
    with pytest.raises(ConfigurationError, match=r"b\.zarr and .*a\.zarr are one file"):
        FileSource(tmp_path / "*.zarr", features="n")


@pytest.fixture
def unequal(tmp_path):
    """A Zarr folder with arrays of 100 and of 20 rows, in chunks of 8."""
    import zarr

    store = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for name, size in (("train/x", 100), ("train/y", 100), ("test/x", 20), ("test/z", 19)):
        store.create_array(name, shape=(size,), chunks=(8,), dtype="f4")[:] = np.arange(size)
    return str(tmp_path / "a.zarr")


@pytest.mark.parametrize("piece", [1, 2**20])
def test_an_array_of_a_folder_has_its_own_length(unequal, monkeypatch, piece):
    monkeypatch.setattr("nnlo_common.data.formats._zarr._PIECE_BYTES", piece)
    for name, size in (("train", 100), ("test/x", 20), ("test/z", 19)):
        with closing(FileSource(unequal, features=name)) as source:
            assert len(source) == size
            (found,) = source.take(0, size)
            np.testing.assert_array_equal(found[0] if name == "train" else found, np.arange(size))


@pytest.mark.parametrize(("features", "labels"), [("train/x", "test/x"), ("test", None)])
def test_arrays_of_unequal_lengths_are_refused_together(unequal, features, labels):
    with pytest.raises(
        ConfigurationError, match=r"a\.zarr has columns of unequal lengths: \S+ has \d+, \S+ has "
    ):
        FileSource(unequal, features=features, labels=labels)


def test_without_its_package_a_format_says_what_to_install(tmp_path, monkeypatch):
    for kind, package, extra in [("Parquet", "pyarrow", "parquet"), ("TTree", "uproot", "root")]:
        path = make(kind, tmp_path / "a", columns(0, 3))
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"{package}.*nnlo\[{extra}\]"):
            FileSource(path, features="n")


@pytest.mark.parametrize("kind", ["Parquet", "Arrow", "TTree", "Zarr"])
def test_remote_names_are_left_to_the_library(kind, tmp_path):
    path = make(kind, tmp_path / "a", columns(0, 5))
    with closing(FileSource(f"file://{path}", features="x", labels="n")) as source:
        assert source.take(1, 5)[1].tolist() == [1, 2, 3, 4]
    missing = f"file://{path.replace('/a.', '/b.')}"
    with pytest.raises(
        ConfigurationError, match=r"b\.\w+\S* cannot be opened here \(.*copy it first by stage_to="
    ):
        FileSource(missing, features="x")


@pytest.mark.parametrize("kind", ["Parquet", "Arrow", "TTree", "RNTuple", "Zarr"])
def test_files_in_the_memory_of_fsspec_are_read(kind, tmp_path):
    import fsspec

    path, tree = re.fullmatch(r"(.*?\.root|.*)(:\w+)?", make(kind, tmp_path / "a", columns(0, 9))).groups("")
    memory, place = fsspec.filesystem("memory"), f"/{tmp_path.name}/{Path(path).name}"
    for file in [Path(path)] if Path(path).is_file() else Path(path).rglob("*"):
        if file.is_file():
            memory.pipe(f"{place}{str(file).removeprefix(path)}", file.read_bytes())
    with closing(FileSource(f"memory:/{place}{tree}", features="x", labels="n")) as source:
        assert source.take(1, 9)[1].tolist() == [*range(1, 9)]
    memory.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def far(tmp_path):
    """A folder in the memory of fsspec: three files of events, one with a bracket in its name, and a text."""
    import fsspec

    memory, folder = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    for name, first in [("b.parquet", 4), ("a.parquet", 0), ("run[1].parquet", 9)]:
        memory.pipe(
            f"{folder}/{name}", Path(make("Parquet", tmp_path / "x", columns(first, first + 4))).read_bytes()
        )
    memory.pipe(f"{folder}/readme.txt", b"two runs")
    yield f"memory://{folder}"
    memory.rm(folder, recursive=True)


@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_a_pattern_of_remote_names_stands_for_all_that_match(far, chain):
    assert list_files(f"{chain}{far}/[ab].parquet") == (
        f"{chain}{far}/a.parquet",
        f"{chain}{far}/b.parquet",
    )
    with closing(FileSource(f"{chain}{far}/[ab].parquet", features="n")) as source:
        assert source.take(0, 8)[0].tolist() == [*range(8)]


def test_a_remote_name_with_a_bracket_in_it_is_a_name(far):
    assert list_files(f"{far}/run[1].parquet") == (f"{far}/run[1].parquet",)


def test_a_pattern_in_a_list_file_and_a_tree_after_one_stay(far, tmp_path):
    (tmp_path / "all.txt").write_text(f"{far}/[b].parquet\n# old\n{far}/a*\n")
    assert list_files(tmp_path / "all.txt") == (f"{far}/a.parquet", f"{far}/b.parquet")
    import fsspec

    fsspec.filesystem("memory").pipe(f"{far.removeprefix('memory://')}/c.root", b"root")
    assert list_files(f"{far}/*.root:events") == (f"{far}/c.root:events",)


def test_a_pattern_of_remote_names_that_matches_nothing_is_refused(far):
    with pytest.raises(ConfigurationError, match=r"files='memory:\S*/z\*' matches nothing on the other side"):
        list_files(f"{far}/z*")


def test_files_that_cannot_be_listed_are_said_so(far, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(self, path, **_):
        raise PermissionError(f"no access to {path}")

    monkeypatch.setattr(MemoryFileSystem, "glob", refuse)
    with pytest.raises(
        ConfigurationError, match=r"files cannot be listed \(PermissionError: no access .*may read"
    ):
        list_files(f"{far}/*")


def test_a_pattern_of_remote_names_says_which_package_lists_them(absent):
    protocol, package, extra = absent
    told = rf"listing {protocol}://h//\*.h5 needs the package '{package}'.*'nnlo\[{extra}\]'"
    with pytest.raises(MissingExtraError, match=told):
        list_files(f"{protocol}://h//*.h5")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.h5", "does not exist on this host"),
        ("a.parquet", "does not exist on this host"),
        ("cut.h5", "cannot be opened"),
        ("cut.parquet", "is damaged"),
    ],
)
def test_where_columns_are_named_by_a_pattern_a_bad_file_is_told_as_elsewhere(name, told, tmp_path):
    (tmp_path / "cut.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50))
    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + bytes(50))
    with pytest.raises(ConfigurationError, match=rf"{re.escape(str(tmp_path / name))} {told}"):
        FileSource(tmp_path / name, features="x*")


def test_a_pattern_of_columns_is_looked_up_in_the_copies(tmp_path):
    path = make("Parquet", tmp_path / "a", columns(0, 5))
    copy = "import shutil, sys; shutil.copyfile(sys.argv[1], sys.argv[3])"
    (tmp_path / "disk").mkdir()
    staging = {
        "stage_to": tmp_path / "disk",
        "copy_command": [sys.executable, "-c", copy, path, "{src}", "{dst}"],
    }
    with closing(FileSource("nowhere://host/a.parquet", features="n*", **staging)) as source:
        assert source.take(0, 5)[0].reshape(-1).tolist() == [*range(5)]
    with pytest.raises(ConfigurationError, match=r"'z\*' names no column; the first file has"):
        FileSource("nowhere://host/a.parquet", features="z*", **staging)


REMOTE = {
    "root": ("fsspec-xrootd", "xrootd"),
    "s3": ("s3fs", "s3"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
}


@pytest.fixture(params=REMOTE)
def absent(request, monkeypatch):
    """A protocol whose package is not installed, the package, and the extra that brings it."""
    package, extra = REMOTE[request.param]
    for module in ("fsspec.implementations.http", "aiohttp", "s3fs", "fsspec_xrootd"):
        monkeypatch.setitem(sys.modules, module, None)
    return request.param, package, extra


@pytest.mark.parametrize(
    ("name", "features"),
    [("a.parquet", "x,n"), ("a.arrow", "jet_*"), ("a.root:events", None), ("a.zarr", "x")],
)
def test_a_remote_name_says_which_package_it_needs(absent, name, features):
    protocol, package, extra = absent
    path = f"{protocol}://host//data/{name}"
    told = re.escape(
        f"reading {path} needs the package {package!r}, which is not installed. Install it with: "
    )
    told += re.escape(f"pip install 'nnlo[{extra}]'")
    with pytest.raises(MissingExtraError, match=told):
        FileSource(path, features=features)
    with pytest.raises(MissingExtraError, match=told):
        FileBatches(
            ["memory://b." + name.split(".", 1)[1], path], "Batches", trained_on=True, features=features
        )


def test_a_remote_name_needs_fsspec_and_the_package_of_its_format(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"reading s3://a.parquet needs .*'fsspec'.*'nnlo\[s3\]'"):
        FileSource("s3://a.parquet", features="x")
    monkeypatch.setitem(sys.modules, "uproot", None)
    with pytest.raises(MissingExtraError, match=r"reading ROOT files needs .*'uproot'.*'nnlo\[root\]'"):
        FileSource("root://host//a.root", features="x")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("gs://a/b.parquet", r"gs://a/b.parquet .*gcsfs.* or copy it first by stage_to= and copy_command="),
        ("simplecache::oci://a/b.parquet", r"oci://a/b.parquet .*ocifs"),
        (
            "nowhere://a/b.zarr",
            r"nowhere://a/b.zarr: nothing here opens names with nowhere://; correct the name",
        ),
        ("s3://a/b.h5", r"s3://a/b.h5 is not on this machine; pass stage_to= and copy_command= to fetch it"),
        ("http://a/b.npz", r"http://a/b.npz is not on this machine; pass stage_to="),
    ],
)
def test_remote_names_that_nothing_opens_are_refused(path, told, monkeypatch):
    for module in ("gcsfs", "ocifs"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=told):
        FileSource(path, features="x")


def test_a_remote_name_that_is_copied_first_needs_no_package(tmp_path, absent):
    path = make("Parquet", tmp_path / "a", columns(0, 5))
    copy = "import shutil, sys; shutil.copyfile(sys.argv[1], sys.argv[3])"
    staging = {
        "stage_to": tmp_path / "disk",
        "copy_command": [sys.executable, "-c", copy, path, "{src}", "{dst}"],
    }
    (tmp_path / "disk").mkdir()
    with closing(FileSource(f"{absent[0]}://host//a.parquet", features="n", **staging)) as source:
        assert source.take(0, 5)[0].tolist() == [*range(5)]


def test_a_file_of_an_unknown_name_is_known_by_its_beginning(tmp_path):
    path = make("Parquet", tmp_path / "a", columns(0, 3))
    (tmp_path / "data").symlink_to(path)
    with closing(FileSource(tmp_path / "data", features="n")) as source:
        assert source.take(0, 3)[0].tolist() == [0, 1, 2]
