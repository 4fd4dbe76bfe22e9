"""Locks that admit one job at a time to a folder or a journal."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.base._file_access import hold

HOLDER = """
import pathlib, sys
from nnlo_common.base._file_access import hold
hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Start another process that holds the folder's lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_another_job_is_refused_by_name(holder, tmp_path):
    told = re.escape(f"another job (process {holder.pid} on {os.uname().nodename}) is training in {tmp_path}")
    with pytest.raises(ConfigurationError, match=told):
        hold(tmp_path)


def test_when_it_is_killed_the_folder_is_free(holder, tmp_path):
    holder.kill()
    holder.wait()
    hold(tmp_path)
    hold(tmp_path)
    assert (tmp_path / "in-use").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"


def test_a_folder_that_cannot_be_made_is_nobodys(tmp_path):
    (tmp_path / "file").write_text("")
    hold(tmp_path / "file" / "run")
