"""One timeline of ranks on three hosts whose clocks differ by seconds."""

from __future__ import annotations

import json

import pytest

from nnlo_common.commands._cli import main
from nnlo_common.training.report._facts_writer import read_facts
from tests.helpers.hosts import hosts
from tests.helpers.jobs import running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.traces import backwards_s, problems_in

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.extended,
    pytest.mark.framework("torch"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="started by PRRTE, the launcher of Open MPI"),
]


@pytest.mark.parametrize("kind", ["whole", "killed"])
def test_a_trace_of_three_hosts_has_one_time(kind, tmp_path):
    with hosts(3, tmp_path) as cluster:
        status, text = cluster.run([2, 1, 1], PROGRAMS / "facts_torch.py", str(tmp_path), kind, timeout_s=180)
    assert (status == 0) == (kind == "whole"), text
    for rank, (host, true_s) in enumerate([("node1", 0), ("node1", 0), ("node2", 7), ("node3", -3)]):
        start = next(read_facts(tmp_path / f"ranks/facts.rank{rank}.jsonl"))
        assert start["host"] == host
        assert abs(start["clock_ahead_s"] - true_s) <= start["clock_error_s"]
    assert main(["trace", str(tmp_path)]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert problems_in(events) == []
    assert {event["pid"] for event in events if event["ph"] == "f"} == {0, 1, 2, 3}
    assert backwards_s(events) < 1e-3
