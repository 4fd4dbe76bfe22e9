"""HDF5 files that would end the process, fill the memory or read for ever: refused by name before."""

from __future__ import annotations

import os
import warnings

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data import _listing

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no HDF5")

from nnlo_common.data import HDF5Source, list_files  # noqa: E402


def virtual(path, name, *sources):
    """Write a virtual dataset; each source is a file and a dataset."""
    layout = h5py.VirtualLayout(shape=(4 * len(sources), 3), dtype="f4")
    for index, (file, dataset) in enumerate(sources):
        layout[4 * index : 4 * index + 4] = h5py.VirtualSource(str(file), dataset, shape=(4, 3), dtype="f4")
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset(name, layout)


def real(path, name="x", value=1.0):
    with h5py.File(path, "a") as file:
        file[name] = [[value] * 3] * 4


def source(path, **options):
    return HDF5Source(str(path), features="x", **options)


def beside_real_data(folder):
    real(folder / "a.h5", "r")
    virtual(folder / "a.h5", "x", (".", "r"), (".", "x"))


def by_a_link(folder):
    virtual(folder / "a.h5", "x", (".", "l"))
    soft(folder / "a.h5", "l", "/x")


def by_another_name_of_the_file(folder):
    virtual(folder / "a.h5", "x", ("b.h5", "x"))
    os.link(folder / "a.h5", folder / "b.h5")


def by_another_file(folder):
    virtual(folder / "a.h5", "x", ("b.h5", "y"))
    virtual(folder / "b.h5", "y", ("a.h5", "x"))


def by_a_pattern(folder):
    """A link of a name that the pattern matches."""
    rows, unlimited = h5py.h5s.create_simple((4, 3)), h5py.h5s.UNLIMITED
    found = h5py.h5s.create_simple((0, 3), (unlimited, 3))
    found.select_hyperslab((0, 0), (unlimited, 1), stride=(4, 3), block=(4, 3))
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_virtual(found, b".", b"part%b", rows)
    with h5py.File(folder / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((4, 3), (unlimited, 3))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_FLOAT, space, plan)
    soft(folder / "a.h5", "part0", "/x")


CIRCLES = {
    "itself": lambda f: virtual(f / "a.h5", "x", (".", "x")),
    "itself by its file's name": lambda f: virtual(f / "a.h5", "x", ("a.h5", "x")),
    "itself beside real data": beside_real_data,
    "itself by a link": by_a_link,
    "itself by another name of its file": by_another_name_of_the_file,
    "another that leads back": by_another_file,
    "a pattern that matches itself": by_a_pattern,
    "many inside each other": lambda f: [virtual(f / "a.h5", n(i), (".", n(i + 1))) for i in range(30)],
}


def n(index):
    return "x" if index == 0 else f"x{index}"


def soft(path, name, target):
    with h5py.File(path, "a") as file:
        file[name] = h5py.SoftLink(target)


@pytest.mark.parametrize("case", CIRCLES)
def test_a_virtual_dataset_that_has_its_data_in_itself_is_refused(case, tmp_path):
    """Reading it ends the process within HDF5."""
    CIRCLES[case](tmp_path)
    with pytest.raises(ConfigurationError, match=r"data in itself|inside each other") as caught:
        source(tmp_path / "a.h5")
    assert str(tmp_path) in str(caught.value)


def test_virtual_datasets_of_several_files_and_of_each_other_are_read(tmp_path):
    for number in range(3):
        real(tmp_path / f"part{number}.h5", value=number)
    virtual(tmp_path / "b.h5", "y", *((tmp_path / f"part{number}.h5", "x") for number in range(3)))
    virtual(tmp_path / "a.h5", "x", ("b.h5", "y"), ("part1.h5", "x"))
    (rows,) = source(tmp_path / "a.h5").take(0, 8)
    assert rows[:, 0].tolist() == [0.0] * 4 + [1.0] * 4


def test_a_sample_that_no_machine_holds_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4, 2**36), "f4", chunks=(1, 1000))
    with pytest.raises(ConfigurationError, match=r"a sample of /x, .* has 256 GiB, .*rows and columns"):
        source(tmp_path / "a.h5")


def test_a_batch_that_does_not_fit_into_memory_is_named(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2**30, 2**30), "f4", chunks=(1, 1000))[0, 0] = 1
    with pytest.raises(ConfigurationError, match=r"1073741824 samples of /x need 4294967296.0 GiB of memory"):
        source(tmp_path / "a.h5").take(0, 2**30)


def test_rows_that_nobody_has_written_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2**40, 3), "f4", chunks=(1000, 3))
        file.create_dataset("few", (1000, 3), "f4", chunks=(10, 3))
    with pytest.raises(ConfigurationError, match="has 1099511627776 rows, but none was ever written"):
        source(tmp_path / "a.h5")
    assert len(HDF5Source(str(tmp_path / "a.h5"), features="few")) == 1000


def test_an_epoch_of_days_is_said_before_it_begins(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2**40, 3), "f4", chunks=(1000, 3))[0] = 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(source(tmp_path / "a.h5")) == 2**40
    assert "an epoch has 1099511627776 samples; at a million samples a second it takes 12.7 days" in str(
        caught[0].message
    )


# -- patterns -------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    for name in ("a.h5", "one/b.h5", "one/two/c.h5", "one/two/c.txt", "one/.hidden/d.h5", "[odd]/e.h5"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**/*.h5", ["[odd]/e.h5", "a.h5", "one/b.h5", "one/two/c.h5"]),
        ("one/**/*.h5", ["one/b.h5", "one/two/c.h5"]),
        ("o*/**/two/*.h5", ["one/two/c.h5"]),
        ("**/two/**/*.h5", ["one/two/c.h5"]),
        ("one/**", ["one/b.h5", "one/two/c.h5", "one/two/c.txt"]),
        ("one/b**.h5", ["one/b.h5"]),
    ],
)
def test_a_pattern_finds_files_in_all_folders(tree, pattern, found):
    assert [os.path.relpath(path, tree) for path in list_files(str(tree / pattern))] == found


def test_a_pattern_that_looks_at_the_whole_machine_has_a_limit(tree, monkeypatch):
    monkeypatch.setattr(_listing, "_MOST_FOLDERS", 50)
    with pytest.raises(ConfigurationError, match=r"files='/\*\*/\*\.h5' looks into more than 50 folders"):
        list_files("/**/*.h5")
    assert len(list_files(str(tree / "**/*.h5"))) == 4


def test_folders_that_are_links_to_themselves_have_a_limit(tree, monkeypatch):
    (tree / "one" / "again").symlink_to(tree / "one")
    monkeypatch.setattr(_listing, "_MOST_FOLDERS", 500)
    assert len(list_files(str(tree / "**/c.h5"))) > 1
