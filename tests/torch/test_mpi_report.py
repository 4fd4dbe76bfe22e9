"""The facts and timelines of real processes: whole, killed, and beside what the system says."""

from __future__ import annotations

import json

import pytest

from nnlo_common.commands._cli import main
from nnlo_common.commands.report._run_reader import read_run
from nnlo_common.training.report._facts_writer import facts_files, read_facts
from tests.helpers.chromium import needs_tracing_page, read_by_tracing_page
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.traces import problems_in, self_times

pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

pytestmark = [pytest.mark.framework("torch"), pytest.mark.mpi, pytest.mark.extended]

PROGRAM = PROGRAMS / "facts_torch.py"


def facts(folder, what):
    return {
        rank: [line for line in read_facts(path) if line["what"] == what]
        for path, rank in facts_files(folder)
    }


def trace_of(folder):
    assert main(["trace", str(folder)]) == 0
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_four_ranks_have_one_trace_with_the_times_of_their_report(tmp_path):
    ended = mpiexec(4, PROGRAM, str(tmp_path), "whole")
    assert ended.returncode == 0, ended.stderr
    events = trace_of(tmp_path)
    assert problems_in(events) == []
    starts = facts(tmp_path, "start")
    assert sorted(starts) == [0, 1, 2, 3]
    assert all(one["clock_error_s"] < 0.05 for (one,) in starts.values())
    for rank, samples in facts(tmp_path, "sample").items():
        spent = samples[-1]["spent"]
        found = self_times(events)[rank]
        for kind, seconds in spent.items():
            share = seconds / sum(spent.values())
            assert found.get(kind, 0.0) / sum(found.values()) == pytest.approx(share, abs=0.02)


def test_a_killed_job_leaves_whole_facts_and_a_valid_trace(tmp_path):
    ended = mpiexec(4, PROGRAM, str(tmp_path), "killed")
    assert ended.returncode != 0
    epochs = facts(tmp_path, "epoch")
    assert [len(epochs[rank]) for rank in range(4)] == [1] * 4
    assert all(
        samples[-1]["spent"]["wait"] > 0 for rank, samples in facts(tmp_path, "sample").items() if rank
    )
    assert facts(tmp_path, "end")[1] == []
    for rank in range(4):
        json.loads((tmp_path / f"ranks/timeline.rank{rank}.json").read_text())
    assert problems_in(trace_of(tmp_path)) == []
    assert main(["report", str(tmp_path)]) == 0


@needs_tracing_page
@pytest.mark.parametrize("kind", ["whole", "killed"])
def test_the_tracing_page_of_chromium_takes_all_of_a_trace(kind, tmp_path):
    ended = mpiexec(4, PROGRAM, str(tmp_path), kind)
    assert (ended.returncode == 0) == (kind == "whole"), ended.stderr
    events = trace_of(tmp_path)
    found = read_by_tracing_page(events, tmp_path)
    assert found["warnings"] == []
    assert found["arrows"] == sum(event["ph"] == "s" for event in events) > 0
    for rank in range(4):
        mine = [event for event in events if event["pid"] == rank]
        told = found["processes"][str(rank)]
        assert told["spans"] == sum(event["ph"] == "X" for event in mine) > 0
        assert {one.split(".")[-1] for one in told["counters"]} == {
            event["name"] for event in mine if event["ph"] == "C"
        }


def test_memory_and_processor_time_are_what_gnu_time_tells(tmp_path):
    words = [str(tmp_path), str(PROGRAM), str(tmp_path), "measured"]
    ended = mpiexec(2, PROGRAMS / "told_usage.py", *words)
    assert ended.returncode == 0, ended.stderr
    ranks = {one.rank: one for one in read_run(tmp_path).ranks}
    assert len(ranks) == 2
    for rank, one in ranks.items():
        lines = (tmp_path / f"usage.rank{rank}.txt").read_text().splitlines()
        told = dict(line.strip().rsplit(": ", 1) for line in lines if ": " in line)
        peak_mb = int(told["Maximum resident set size (kbytes)"]) * 1024 / 1e6
        cpu_s = float(told["User time (seconds)"]) + float(told["System time (seconds)"])
        usage = one.samples_of_usage
        assert peak_mb > 350  # what it held, and its libraries
        assert max(sample.memory_mb for sample in usage) == pytest.approx(peak_mb, rel=0.05)
        assert one.peak_memory_mb == pytest.approx(peak_mb, rel=0.01)
        assert usage[-1].cpu_s == pytest.approx(cpu_s, rel=0.05)
