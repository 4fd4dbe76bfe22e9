"""Doors over real MPI, on both wheels: order, memory, closing, time limits, and strangers."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.shared_folders import written_once

PROGRAM = PROGRAMS / "endpoint_all.py"
CHECKS = re.search(r"^CHECKS = \[([^]]*)\]", PROGRAM.read_text(), re.MULTILINE)[1].replace(",", "").split()


@pytest.fixture(scope="module", params=[2, 3])
def done(request, tmp_path_factory):
    """One job that makes all checks, one after another; the first that fails ends it."""

    def run(folder):
        job = mpiexec(request.param, PROGRAM)
        (folder / "job.json").write_text(json.dumps([job.returncode, job.stdout, job.stderr]))

    folder = written_once(tmp_path_factory, f"doors-{request.param}", run)
    return json.loads((folder / "job.json").read_text())


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_doors(done, check):
    _, printed, said = done
    assert f"<{check}>" in printed, said[-3000:]


@pytest.mark.mpi
@pytest.mark.slow
def test_the_job_ends_in_good_order(done):
    status, _, said = done
    # On a busy machine ranks may be late, and are named.
    beside = [line for line in said.splitlines() if not re.search("(has|have) not come", line)]
    assert (status, beside) == (0, [])
    assert len(CHECKS) == 20


PARTS = 8


@pytest.mark.mpi
@pytest.mark.slow
def test_a_worker_that_waits_for_a_part_can_look_around(tmp_path):
    done = mpiexec(2, PROGRAMS / "parts_death.py", "server stops", str(tmp_path), timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"server: {PARTS} parts computed",
        f"worker: {PARTS} parts, waited True",
    ]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "lent"),
    [
        ("worker dies before", []),
        ("worker dies", []),
        ("worker dies", ["lent"]),
        ("server dies", []),
        ("server dies", ["lent"]),
    ],
)
def test_a_death_in_the_middle_of_a_reply(what, lent, tmp_path):
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH ends the job")
    words = [what, str(tmp_path), *lent]
    done = mpiexec(2, PROGRAMS / "parts_death.py", *words, timeout_s=60, options=["--with-ft", "ulfm"])
    said = done.stdout.splitlines()
    if what == "worker dies before":  # the centre moves as a whole all the same
        assert said == ["server: Lost(rank=1)", "server: 1 parts computed"], done.stderr
    elif what == "worker dies":
        assert said == [f"server: {PARTS} parts computed", "server: Lost(rank=1)"], done.stderr
    else:
        assert len(said) == 1, done.stderr
        parts = int(
            re.fullmatch(r"worker: after (\d) parts: .*rank 0.*in the middle of a reply.*", said[0])[1]
        )
        assert 1 <= parts <= 3


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("packed", [[], ["packed"]])
@pytest.mark.parametrize("what", ["worker dies", "worker dies later", "server dies"])
def test_a_death_in_the_middle_of_a_vector_that_travels_ahead(what, packed):
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH ends the job")
    words = [what, *packed]
    done = mpiexec(2, PROGRAMS / "ahead_death.py", *words, timeout_s=60, options=["--with-ft", "ulfm"])
    expected = "worker: Lost(rank=0)" if what == "server dies" else "server: Lost(rank=1)"
    assert done.stdout.splitlines() == [expected], done.stderr


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("wire", ["int8", "bfloat16"])
def test_a_long_vector_is_packed_while_it_leaves_with_the_same_bits(wire, servers):
    done = mpiexec(1 + servers, PROGRAMS / "packed.py", wire, str(servers), timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 3 * (1 + servers)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_message_that_comes_after_the_receiver_has_closed_disturbs_nothing_later():
    """MPI would take it for one of the next communicator, which may have the same number."""
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH has no calls for ranks that outlive others")
    done = mpiexec(2, PROGRAMS / "late_leave.py", timeout_s=20, options=["--with-ft", "ulfm"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['rank 0', 'rank 1']"] * 2


@pytest.mark.mpi
@pytest.mark.slow
def test_python_ends_without_a_watch_that_still_runs():
    """It can crash where a thread asks for the interpreter at its end."""
    done = mpiexec(2, PROGRAMS / "threads_at_end.py", timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1", "1", "[]", "[]"]
