"""One report for each mistake of the ranks on one host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from nnlo_common.cluster._aborting import claim, mistake_of, reports

ASKS = """
import sys
from nnlo_common.cluster._aborting import claim
print(claim("no such file", {}, int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def caught(script):
    try:
        exec(compile(script, "user.py", "exec"), {})
    except Exception as error:
        return error.with_traceback(error.__traceback__.tb_next)


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ("def load(): raise KeyError(6)\nload()", True),  # another text: another rank's share of the samples
        ("def load(): raise ValueError(5)\nload()", False),
        ("def load(): raise KeyError(5)\n\nload()", False),
    ],
)
def test_a_mistake_is_known_by_its_class_and_the_line_of_the_script(other, alike):
    one = mistake_of(caught("def load(): raise KeyError(5)\nload()"))
    assert (mistake_of(caught(other)) == one) is alike
    assert one == "KeyError user.py:2"


@pytest.mark.slow
def test_the_first_process_of_a_job_has_the_report_until_it_ends():
    mine, other = os.getpid(), -os.getpid()  # names are shared with tests that run beside this one
    job = {"PMIX_NAMESPACE": f"prterun-{mine}@1"}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", ASKS, str(mine)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout.readline() == "True\n"
        assert not claim("no such file", {}, mine)
        assert claim("no such file", {}, other)  # of another launcher, so another job
        assert claim("no such file", job, mine)
        assert not claim("no such file", job, other)
        assert claim("not enough samples", {}, mine)
        assert first.communicate() == ("", "")  # it ends without a warning
    assert claim("no such file", {}, mine)


def test_who_waits_leaves_the_report_to_one_that_has_made_it_and_ended_meanwhile(monkeypatch):
    """As a launcher ends a job rank by rank: the name of the first is free before the second's turn."""
    now, held = [0.0], []
    bind = socket.socket.bind

    def remembered(holder, name):
        bind(holder, name)
        held.append(holder.dup())

    def other_process(seconds):
        now[0] += seconds
        if not reported and now[0] > 0.3:
            with monkeypatch.context() as patch:
                patch.setattr(socket.socket, "bind", remembered)
                patch.setattr(socket.socket, "detach", socket.socket.close)
                reported.append(claim("no such sample", {}, -os.getpid()))
        if now[0] > 0.6:
            while held:
                held.pop().close()

    reported = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", other_process)
    assert not reports("no such sample", 0.8, {}, -os.getpid())
    assert reported == [True]
    other_process(1)
    assert reports("no such sample", 0.8, {}, -os.getpid())  # nobody holds it: the next job's
    assert now[0] == pytest.approx(1.3 + 0.8, abs=0.1)
