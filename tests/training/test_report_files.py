"""Traces, what a process uses, and how long it has waited."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

from nnlo_common.training._observer import Observed
from nnlo_common.training.report._epoch_log import Usage
from nnlo_common.training.report._trace_file import Trace


def test_a_trace_is_valid_after_every_write(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("of another training " * 100)
    trace = Trace(path, 2, "worker 1")
    for count in range(3):
        found = json.loads(path.read_text())
        assert [event["name"] for event in found] == ["process_name", *(f"batch {i}" for i in range(count))]
        trace.add(f"batch {count}", 1.0, 1.25, waited_ms=3)
        trace.flush()
    assert {event["pid"] for event in found} == {2}
    assert (found[-1]["dur"], found[-1]["args"]) == (250_000, {"waited_ms": 3})


def test_a_trace_keeps_little_in_memory(tmp_path):
    trace = Trace(tmp_path / "trace.json", 0, "alone")
    for _ in range(5000):
        trace.add("batch", 0.0, 1.0)
        assert len(trace._waiting) < 1000
    trace.flush()
    assert len(json.loads((tmp_path / "trace.json").read_text())) == 5001


def test_what_a_process_uses_grows():
    before = Usage.now()
    block = bytearray(50_000_000)
    while (after := Usage.now()).cpu_s <= before.cpu_s:
        sum(range(100_000))
    assert after.memory_mb > before.memory_mb + 40
    assert len(block) == 50_000_000


def test_an_observed_part_does_what_it_did_and_tells_how_long_it_waited():
    def step(weight):
        part._endpoint.receive()
        return 2 * weight

    part = SimpleNamespace(
        _endpoint=SimpleNamespace(receive=lambda timeout_s=None: time.sleep(0.01)), step=step, due=True
    )
    told = []
    observed = Observed(part, lambda *what: told.append(what))
    assert observed.step(3) == 6
    assert observed.due
    ((name, begin_s, end_s, waited_s),) = told
    assert name == "exchange"
    assert 0.01 <= waited_s <= end_s - begin_s
