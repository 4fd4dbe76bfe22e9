"""Copies in a shared folder: what others have planted there is not read, and each wait has a limit."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

import nnlo_common.data._staging as module
from nnlo_common import ConfigurationError
from nnlo_common.data import Staging
from tests.helpers.strangers import NOBODY

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of other users")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.h5"
    path.write_text("genuine")
    return str(path)


@pytest.fixture
def shared(tmp_path):
    """A folder like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def name_for(file):
    return f"nnlo-staged-{os.getuid()}-{module._fingerprint([file])}"


def plant(folder, user=None):
    """Make a folder under a computed name, with a copy in it."""
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    planted = folder / "00000-a.h5"
    planted.write_text("planted")
    if user is not None:
        for path in (planted, folder):
            os.chown(path, user, user)
    return planted


@pytest.mark.parametrize(
    "user", [pytest.param(NOBODY, marks=as_root), None], ids=["other user", "open to all"]
)
def test_a_planted_copy_is_not_read(file, shared, user):
    planted = plant(shared / name_for(file), user)
    staging = Staging(shared)
    (copy,) = staging.stage([file])
    assert Path(copy).read_text() == "genuine"
    staging.close()
    assert planted.read_text() == "planted"


def test_a_link_in_place_of_the_folder_is_not_followed(file, shared, tmp_path):
    target = tmp_path / "target"
    plant(target)
    (shared / name_for(file)).symlink_to(target)
    staging = Staging(shared)
    (copy,) = staging.stage([file])
    assert Path(copy).read_text() == "genuine"
    staging.close()
    assert sorted(path.name for path in target.iterdir()) == ["00000-a.h5"]


def test_links_in_place_of_locks_and_copies_are_not_followed(file, shared, tmp_path):
    """Within the user's own folder, which only the user could have planted them in."""
    folder = shared / name_for(file)
    for name in ("users.lock", "00000-a.h5.lock"):
        folder.mkdir(mode=0o700, exist_ok=True)
        target = tmp_path / f"target-{name}"
        (folder / name).symlink_to(target)
        with pytest.raises(ConfigurationError, match=r"cannot be used .*symbolic links"):
            Staging(shared).stage([file])
        assert not target.exists()
        (folder / name).unlink(missing_ok=True)  # or the folder was deleted with it
    folder.mkdir(mode=0o700, exist_ok=True)
    target = tmp_path / "other.h5"
    target.write_text("planted")
    (folder / "00000-a.h5").symlink_to(target)
    staging = Staging(shared)
    assert Path(*staging.stage([file])).read_text() == "genuine"
    staging.close()
    assert target.read_text() == "planted"


def test_a_copy_of_another_size_is_made_anew(file, shared):
    folder = shared / name_for(file)
    folder.mkdir(mode=0o700)
    (folder / "00000-a.h5").write_text("half")
    staging = Staging(shared)
    assert Path(*staging.stage([file])).read_text() == "genuine"
    staging.close()


@as_root
def test_where_all_names_are_taken_the_folder_is_refused(file, shared):
    for index in range(10):
        plant(shared / (name_for(file) + (f"-{index}" if index else "")), NOBODY)
    with pytest.raises(
        ConfigurationError, match=r"stage_to=.*belong to other users.*name a folder of your own"
    ):
        Staging(shared).stage([file])


def test_a_folder_where_anybody_can_exchange_files_is_refused(file, shared):
    shared.chmod(0o777)
    with pytest.raises(ConfigurationError, match=r"without the sticky bit.*chmod \+t"):
        Staging(shared).stage([file])
    assert list(shared.iterdir()) == []


@as_root
def test_leftovers_of_others_are_left_alone(file, shared):
    planted = plant(shared / f"nnlo-staged-{os.getuid()}-trash-0", NOBODY)
    staging = Staging(shared)
    staging.stage([file])
    staging.close()
    assert planted.read_text() == "planted"


@pytest.mark.parametrize("name", ["users.lock", "00000-a.h5.lock"])
def test_a_lock_that_is_never_released_has_a_limit_and_is_named(file, shared, name, monkeypatch, caplog):
    monkeypatch.setenv("NNLO_COPY_LIMIT_S", "0.3")
    monkeypatch.setattr(module, "_SAY_AFTER_S", 0.1)
    folder = shared / name_for(file)
    folder.mkdir(mode=0o700)
    with (folder / name).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match=rf"has held .*{name} for 0.3 s, .*NNLO_COPY_LIMIT_S"):
            Staging(shared).stage([file])
    assert [f"holds {folder / name}" in message for message in caplog.messages] == [True]


def test_a_copy_command_that_writes_nothing_has_a_limit(file, shared, monkeypatch):
    monkeypatch.setenv("NNLO_COPY_LIMIT_S", "0.3")
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)", "{src}", "{dst}"]
    with pytest.raises(ConfigurationError, match=r"has not written to the copy for 0.3 s and was ended"):
        Staging(shared, sleep).stage([file])
    assert list(shared.iterdir()) == []


def test_a_copy_that_grows_may_take_longer_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("NNLO_COPY_LIMIT_S", "10")
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    growing = tmp_path / "copy.part"
    growth = module._Growth(growing)
    for size in range(5):
        now[0] += 8
        growing.write_bytes(bytes(size))
        assert not growth.ended()
    now[0] += 11
    assert growth.ended()
