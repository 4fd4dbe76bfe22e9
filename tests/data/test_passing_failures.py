"""A file system that fails for a while: the file is opened and read again, within a limit, and named."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data import FileSource, _passing_failures
from nnlo_common.data.formats._numpy import NPY

ROWS = 12


class Failing:
    """Makes an opened file's reads fail for some calls."""

    def __init__(self, monkeypatch, error, times):
        self.left, self.opened, self.waits = times, 0, []
        made = NPY.open

        def opened(this, path, locking):
            self.opened += 1
            file = made(this, path, locking)
            read = file.read

            def reads(name, first, last, out):
                if self.left:
                    self.left -= 1
                    out[...] = -1  # what came before the failure
                    raise error
                read(name, first, last, out)

            file.read = reads
            return file

        monkeypatch.setattr(NPY, "open", opened)
        monkeypatch.setattr(_passing_failures.time, "sleep", self.waits.append)


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(ROWS * 2.0, dtype="f4").reshape(ROWS, 2))
    return str(tmp_path / "x.npy")


def read(path):
    source = FileSource(path, features="array", cache="none")
    array = source.fields[0].empty(ROWS)
    source.read(0, ROWS, [array])
    source.close()
    return array


@pytest.mark.parametrize("times", [1, 3, 5])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(
            "Can't synchronously read data (file read failed: time = now, errno = 5, error message = 'I/O')"
        ),
    ],
    ids=["ESTALE", "HDF5"],
)
def test_a_file_is_read_again_when_its_server_is_back(path, monkeypatch, error, times):
    failing = Failing(monkeypatch, error, times)
    with pytest.warns(RuntimeWarning, match=r"x\.npy cannot be read now .*; trying again for 30 s") as told:
        found = read(path)
    np.testing.assert_array_equal(found, np.load(path))
    assert len(told) == 1
    assert failing.waits == [1.0, 2.0, 4.0, 8.0, 15.0][:times]
    assert failing.opened == 1 + times + 0, "each time anew"


def test_a_server_that_stays_away_ends_the_training_by_name(path, monkeypatch):
    failing = Failing(monkeypatch, OSError(errno.EIO, "Input/output error"), 99)
    with (
        pytest.warns(RuntimeWarning, match="trying again"),
        pytest.raises(
            ConfigurationError, match=r"x\.npy: samples 0 to 11 of array cannot be read .*Input/output"
        ),
    ):
        read(path)
    assert sum(failing.waits) == 30


def test_a_file_that_cannot_be_opened_meanwhile_is_opened_later(path, monkeypatch):
    failing = Failing(monkeypatch, OSError(errno.EIO, "Input/output error"), 1)
    opened, away = NPY.open, [2]

    def later(this, path, locking):
        if failing.opened and away[0]:
            away[0] -= 1
            raise ConfigurationError(f"{path} does not exist on this host")
        return opened(this, path, locking)

    monkeypatch.setattr(NPY, "open", later)
    with pytest.warns(RuntimeWarning, match="trying again"):
        np.testing.assert_array_equal(read(path), np.load(path))
    assert failing.waits == [1.0, 2.0, 4.0]


def test_where_the_arrays_of_a_file_are_looked_for_it_may_not_open_for_a_while(path, monkeypatch):
    made, left = NPY.open, []

    def opened(this, one, locking):
        if left:
            raise left.pop()
        return made(this, one, locking)

    monkeypatch.setattr(NPY, "open", opened)
    source = FileSource(path, features="array", cache="none")
    left.append(OSError(errno.EIO, "Input/output error"))
    assert source.resident([(0, ROWS)]) is None  # so it is read, by what waits
    assert not left
    arrays, rows = source.resident([(3, 5)])
    assert arrays[0][rows].tolist() == [[6, 7], [8, 9]]
    source.close()


@pytest.mark.parametrize(
    "error", [OSError("inflate() failed"), ValueError("damaged"), OSError(errno.ENOSPC, "full")]
)
def test_a_damaged_file_is_named_at_once(path, monkeypatch, error):
    failing = Failing(monkeypatch, error, 99)
    with pytest.raises(ConfigurationError, match="make it again"):
        read(path)
    assert failing.waits == []
