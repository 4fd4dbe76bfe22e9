"""What tests of killed jobs and odd uses share: a job is run to whatever end it comes to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.helpers.jobs import running

__all__ = ["Ended", "assert_differences_named", "assert_over", "to_its_end"]


@dataclass
class Ended:
    """How a job ended.

    Attributes:
        status: of the launcher.
        out: what it printed.
        err: what it complained about.
        left: the processes of it that were there still.
    """

    status: int
    out: str
    err: str
    left: list[psutil.Process] = field(default_factory=list)


def to_its_end(
    program: Path,
    *args: str,
    n: int = 3,
    sends: int | None = None,
    to: int | None = None,
    timeout_s: float = 90,
) -> Ended:
    """Run a program to its end; once it is ready, send a signal to the job or to one of its ranks.

    A job that does not end in `timeout_s` fails the test.
    """
    with running(n, program, *args, timeout_s=timeout_s) as process:
        said, pids, members = [], {}, []
        for line in process.stdout:
            said.append(line)
            if line.startswith("pid "):
                _, rank, pid = line.split()
                pids[int(rank)] = int(pid)
            if line.strip() == "ready" and not members:
                members = psutil.Process(process.pid).children(recursive=True)
                if sends is not None and to is None:
                    os.killpg(process.pid, sends)  # as a terminal does
                elif sends is not None:
                    os.kill(pids[to], sends)
        status = process.wait(30)
        _, left = psutil.wait_procs(members, timeout=5)
        if process.overdue:
            pytest.fail(f"no end after {timeout_s} s\n{''.join(said)}\n{process.complaints()}")
        return Ended(status, "".join(said), process.complaints(), left)


def assert_over(ended: Ended, *words: str, blocks: int = 1) -> None:
    """The job failed, left nobody, and said the words in so many blocks."""
    assert ended.status != 0, ended
    assert not ended.left
    assert "done" not in ended.out, ended
    # Who sees another one die may say so before the launcher ends it, too.
    said = re.findall(r"^nnlo: rank \d+ of \d+ on (?!.* has died).*$", ended.err, re.MULTILINE)
    assert len(said) == blocks, ended.err
    assert "Exception ignored" not in ended.err
    for word in words:
        assert word in ended.err, ended.err


def assert_differences_named(ended: Ended, differences: Mapping[str, str]) -> None:
    """All three ranks said what differs on the first and on the last one, for each of these, and went on."""
    assert ended.status == 0, ended
    lines = ended.out.splitlines()
    for name, pattern in differences.items():
        for odd, named in ((0, 1), (2, 2)):
            said = [line for line in lines if line.startswith(f"{name}, odd rank {odd}, on rank")]
            assert len(said) == 3, ended.out
            for line in said:
                assert re.search(pattern, line), line
                assert f", on rank {named} (host " in line
                assert "run the same script on all 3 ranks" in line
