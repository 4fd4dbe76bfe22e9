"""`nnlo rechunk`: what was in the files is in the new ones, and those read fast."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nnlo_common.commands._cli import main
from nnlo_common.data import FileSource
from tests.helpers.format_files import FORMATS, make

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")
for package in ("pyarrow", "uproot", "zarr"):
    pytest.importorskip(package, reason="the environment for MPICH has no readers of files")


@pytest.mark.parametrize("filter_", ["none", "lzf", "gzip"])
def test_an_hdf5_file_keeps_all_that_is_in_it(tmp_path, capsys, filter_):
    x = np.arange(2000.0).reshape(100, 20)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("deep/x", data=x, chunks=(1, 1), compression="gzip")
        file["deep/x"].attrs["unit"] = "GeV"
        file.attrs["run"] = 7
        file["y"], file["names"], file["one"] = np.arange(100), np.array([b"pt", b"eta"]), 3.0
        file["link"] = h5py.SoftLink("/deep/x")
    words = ["--filter", filter_, *(["--rows", "30"] if filter_ != "none" else [])]
    assert main(["rechunk", str(tmp_path / "a.h5"), "--to", str(tmp_path / "new"), *words]) == 0
    said = capsys.readouterr().out
    assert said.count("MB/s") == 2
    with h5py.File(tmp_path / "new" / "a.h5") as file:
        np.testing.assert_array_equal(file["deep/x"], x)
        assert file["deep/x"].chunks == (None if filter_ == "none" else (30, 20))
        assert file["deep/x"].compression == (None if filter_ == "none" else filter_)
        assert (file["deep/x"].attrs["unit"], file.attrs["run"], file["one"][()]) == ("GeV", 7, 3)
        assert list(file["names"]) == [b"pt", b"eta"]
        assert file.get("link", getlink=True).path == "/deep/x"
        np.testing.assert_array_equal(file["y"], np.arange(100))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_becomes_hdf5(kind, tmp_path):
    n = np.arange(10)
    columns = {"x": np.stack([n, n * 2], 1).astype("f4"), "n": n.astype("i8")}
    path = make(kind, tmp_path / "a", columns)
    assert main(["rechunk", path, "--to", str(tmp_path / "new"), "--names", "x", "n"]) == 0
    with closing(FileSource(tmp_path / "new/a.h5", features="x", labels="n")) as source:
        for found, wanted in zip(source.take(0, 10), columns.values(), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_name_counts_once_and_names_within_each_other_are_refused(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(5)
    assert main(["rechunk", str(tmp_path / "a.h5"), "--to", str(tmp_path / "new"), "--names", "x", "x"]) == 0
    with h5py.File(tmp_path / "new/a.h5") as file:
        assert list(file) == ["x"]
    np.savez(tmp_path / "b.npz", **{"x": np.zeros(5), "x/y": np.zeros(5)})
    assert main(["rechunk", str(tmp_path / "b.npz"), "--to", str(tmp_path / "new")]) == 2
    assert "b.npz cannot be written as HDF5 (" in capsys.readouterr().err
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["a.h5"]


def test_two_files_that_would_have_one_name_are_refused_before_any_is_written(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        with h5py.File(tmp_path / folder / "x.h5", "w") as file:
            file["x"] = np.zeros(5)
    files = [str(tmp_path / folder / "x.h5") for folder in ("a", "b")]
    assert main(["rechunk", *files, "--to", str(tmp_path / "new")]) == 2
    assert f"{files[0]} and {files[1]} would both become" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_has_the_size_of_all_files_in_it(tmp_path, capsys):
    path = make("Zarr", tmp_path / "a", {"x": np.random.default_rng(0).random(100_000)}, piece=50_000)
    assert main(["rechunk", path, "--to", str(tmp_path / "new")]) == 0
    before, after = re.findall(r"\(([\d.]+) MB", capsys.readouterr().out)
    assert float(before) == pytest.approx(0.8, abs=0.11)
    assert after == "0.8"


def test_what_is_no_number_is_left_out_and_rows_of_unequal_length_need_a_length(tmp_path, capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"x": [1.0, 2.0], "name": ["a", "b"], "hits": [[1, 2, 3], []]})
    pq.write_table(table, tmp_path / "a.parquet")
    for words, there in (([], {"x"}), (["--pad", "2"], {"x", "hits", "hits_count"})):
        assert (
            main(["rechunk", str(tmp_path / "a.parquet"), "--to", str(tmp_path / f"new{len(words)}"), *words])
            == 0
        )
        with h5py.File(tmp_path / f"new{len(words)}" / "a.h5") as file:
            assert set(file) == there
    assert "left out: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "30"], "--rows 30 with --filter none: without a filter there are no chunks;"),
        (["--pad", "4"], "--pad 4 with the HDF5 file {}: without --names it is copied as it is;"),
    ],
)
def test_what_would_do_nothing_is_refused(words, said, tmp_path, capsys):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)
    assert main(["rechunk", str(path), "--to", str(tmp_path / "new"), *words]) == 2
    assert said.format(path) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_there_stays(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3)
    before = (tmp_path / "a.h5").read_bytes()
    assert main(["rechunk", str(tmp_path / "a.h5"), "--to", str(tmp_path)]) == 2
    assert "is there already; name another folder" in capsys.readouterr().err
    assert (tmp_path / "a.h5").read_bytes() == before
    Path(tmp_path, "bad.h5").write_bytes(before[:500])
    assert main(["rechunk", str(tmp_path / "bad.h5"), "--to", str(tmp_path / "new")]) == 2
    assert [*Path(tmp_path, "new").iterdir()] == []
