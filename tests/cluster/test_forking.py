"""Advice for who forks a rank of an MPI job."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nnlo_common.cluster._threads import why_forking_is_unsafe

CARD, CUDA, THREAD = "the network card", "CUDA is initialised", "a thread that moves messages"


@pytest.mark.parametrize(
    ("cards", "cuda", "threads", "reason"),
    [
        ("none", False, False, None),
        ("none", False, True, THREAD),
        ("none", True, False, CUDA),
        ("none", True, True, CUDA),
        ("absent", False, False, None),
        ("absent", False, True, THREAD),
        ("file", False, False, None),
        ("one", False, False, CARD),
        ("one", True, True, CARD),
        ("the second", False, False, CARD),
    ],
)
def test_why_forking_is_unsafe(tmp_path, cards, cuda, threads, reason):
    first, second = tmp_path / "infiniband", tmp_path / "cxi"
    if cards == "file":
        first.write_text("")
    elif cards != "absent":
        first.mkdir()
    if cards == "one":
        (first / "mlx5_0").mkdir()
    if cards == "the second":
        second.mkdir()
        (second / "cxi0").mkdir()
    found = why_forking_is_unsafe(threads=threads, cuda=cuda, cards=(first, second))
    assert found is None if reason is None else found.startswith(reason)


FORKS = """
import os, sys, warnings
from nnlo_common.cluster import _threads

_threads.why_forking_is_unsafe.__kwdefaults__["cards"] = ()  # whatever this host has
busy = []
_threads.advise_on_fork(lambda: bool(busy))
_threads.advise_on_fork(lambda: bool(busy))  # another training of this process

def fork(inside=lambda: None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        child = os.fork()
        if not child:
            inside()
            os._exit(len([w for w in caught if w.category is RuntimeWarning]))
        return [str(w.message) for w in caught if w.category is RuntimeWarning], os.waitpid(child, 0)[1] >> 8

assert fork() == ([], 0), "nothing is at work"
busy.append(1)
(text,), _ = fork()
assert "forkserver" in text and "a thread that moves messages" in text and "num_workers" in text, text
assert fork() == ([], 0), "it was said"
"""

GRANDCHILD = """
def again():
    busy.append(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        os._exit(10 + len([w for w in caught if w.category is RuntimeWarning]))
"""


@pytest.mark.slow
def test_a_fork_is_warned_of_once():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_what_a_copy_of_a_rank_forks_is_its_own_affair():
    program = (
        FORKS[: FORKS.index('assert fork() == ([], 0), "nothing')]
        + GRANDCHILD
        + ("said, inside = fork(again)\nassert (said, inside) == ([], 10), (said, inside)\n")
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
