"""One report for each mistake of the ranks on one host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nnlo_common.cluster._aborting import claim, mistake_of

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
