"""Tars of samples, as WebDataset packs them: arrays and numbers, and what is wrong with a tar."""

from __future__ import annotations

import io
import tarfile
from contextlib import closing

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data import FileSource


def array(values):
    file = io.BytesIO()
    np.save(file, np.asarray(values))
    return file.getvalue()


def packed(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if content is None:
                member.type = tarfile.DIRTYPE
            tar.addfile(member, io.BytesIO(content))
    return str(path)


def samples(count, *more):
    for row in range(count):
        yield f"run1/{row:04}.x.npy", array(np.float32([row, -row]))
        yield f"run1/{row:04}.cls", str(row % 3).encode()
        yield f"run1/{row:04}.value", f"{row / 4}\n".encode()
        yield from ((f"run1/{row:04}.{name}", content) for name, content in more)


def test_arrays_and_numbers_are_columns(tmp_path):
    extra = [("README", b"of the packer"), (".hidden.x.npy", b"no sample")]
    path = packed(tmp_path / "a.tar", [*extra, *samples(600)])
    with closing(FileSource(path, features="x", labels="cls", weights="value")) as source:
        assert len(source) == 600
        x, cls, value = source.take(250, 520)  # over pieces
    rows = np.arange(250, 520)
    np.testing.assert_array_equal(x, np.stack([rows, -rows], 1))
    assert x.dtype == np.float32
    np.testing.assert_array_equal(cls, rows % 3)
    np.testing.assert_array_equal(value, rows / 4)


def test_what_is_no_array_may_lie_beside(tmp_path):
    path = packed(tmp_path / "a.tar", samples(3, ("jpg", b"\xff\xd8"), ("json", b"{}")))
    with closing(FileSource(path, features="x")) as source:
        assert source.take(0, 3)[0].shape == (3, 2)
    with pytest.raises(
        ConfigurationError, match=r"jpg has \.jpg files, which are not arrays; store .*NAME\.npy"
    ):
        FileSource(path, features="jpg")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([*samples(2), ("run1/0002.cls", b"1")], "'run1/0002' has not the same files as those before"),
        ([*samples(2), ("run1/0001.cls", b"1")], "'run1/0001' has not the same files"),
        ([*samples(2), ("run1/0002.z.npy", array(1))], "'run1/0002' has not the same files"),
        (
            [("0.x.npy", array([1])), ("1.x.npy", array([1, 2]))],
            r"'1' has int64 of \(2,\), but the first one int64",
        ),
        ([("0.x.npy", array([1])), ("1.x.npy", b"damaged")], "samples 0 to 1 of x cannot be read"),
        ([("0.x.npy", array([1])), ("0.cls", b"a cat")], "invalid literal"),
        ([("0.x.npy", array([1])), ("0.cls", b"1" * 500)], "is no number"),
        ([("0.x.npy", array([{}]))], "holds Python objects"),
    ],
)
def test_a_tar_that_is_no_data_set_is_refused(tmp_path, files, problem):
    path = packed(tmp_path / "a.tar", files)
    names = (
        {"features": "x", "labels": "cls"} if any("cls" in name for name, _ in files) else {"features": "x"}
    )
    with pytest.raises(ConfigurationError, match=problem), closing(FileSource(path, **names)) as source:
        source.take(0, len(source))


def test_a_compressed_tar_is_refused(tmp_path):
    path = packed(tmp_path / "a.tar", samples(2), "w:gz")
    with pytest.raises(ConfigurationError, match=r"a\.tar"):
        FileSource(path, features="x")


def test_a_tar_without_its_end_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    packed(path, samples(4))
    with tarfile.open(path) as tar:
        end = tar.getmembers()[-1].offset
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ConfigurationError, match="is truncated: its end is missing"):
        FileSource(str(path), features="x")


def test_links_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("0.x.npy")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(ConfigurationError, match=r"'0\.x\.npy' is no whole, ordinary file"):
        FileSource(str(path), features="x")
