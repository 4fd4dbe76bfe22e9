"""Folders that a job has written once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["written_once"]


def written_once(factory: pytest.TempPathFactory, name: str, write: Callable[[Path], object]) -> Path:
    """Return the folder that `write` has filled, in this process or in another one of the same test run.

    pytest-xdist gives the tests of one file to several processes, and a job takes many seconds. If `write`
    raises, the next process calls it again.

    Args:
        factory: the fixture `tmp_path_factory`.
        name: of the folder; another one for each job.
        write: gets the empty folder.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of the folders of all processes
    folder, written = base / name, base / f"{name}.written"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not written.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                write(folder)
                written.touch()
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
    return folder
