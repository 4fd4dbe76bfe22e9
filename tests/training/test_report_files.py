"""Traces, the facts of a rank, and what a process uses."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nnlo_common import ConfigurationError, Downpour, Synchronous, TrainingReport
from nnlo_common.base._spans import Finished, recorder, span
from nnlo_common.commands._trace import merged
from nnlo_common.training.report import _facts_writer, _trace_file, _usage
from nnlo_common.training.report._facts_writer import FactsFile, FactsWriter, RankPlace, read_facts
from nnlo_common.training.report._profiled_steps import ProfiledSteps, StepProfiler
from nnlo_common.training.report._trace_file import Trace
from nnlo_common.training.report._usage import Usage, gpus_here

A_LONG_TIME_S = 60.0


def computed(name, begin_s, end_s, **facts):
    return Finished("main", "compute", name, begin_s, end_s, facts)


def test_a_trace_is_valid_after_every_write(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("of another training " * 100)
    trace = Trace(path, 2, "worker 1")
    for count in range(3):
        found = json.loads(path.read_text())
        names = ["process_name", *["thread_name"][:count], *(f"batch {i}" for i in range(count))]
        assert [event["name"] for event in found] == names
        trace.add(computed(f"batch {count}", 1.0, 1.25))
        trace.flush()
    assert {event["pid"] for event in found} == {2}
    assert found[-1]["dur"] == 250_000


def test_a_trace_keeps_its_latest_events_within_its_limit(tmp_path):
    trace = Trace(tmp_path / "t.json", 0, "alone", limit_mb=0.02)
    for number in range(1000):
        trace.add(computed(f"batch {number}", number, number + 1))
        if number % 7 == 0:
            trace.flush()
    trace.flush()
    older, newer = tmp_path / "t.older.json", tmp_path / "t.json"
    assert older.stat().st_size + newer.stat().st_size < 25_000  # the limit, and one flush
    events = [one for path in (older, newer) for one in json.loads(path.read_text())]
    numbers = [int(one["name"].split()[1]) for one in events if one["ph"] == "X"]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) > 100
    assert [one["name"] for one in events].count("process_name") == 2  # each half can be looked at alone


class Team:
    """A session of a server."""

    over, serving, member = True, None, SimpleNamespace(group=None, server=None)

    def __init__(self, algorithm):
        self.algorithm = algorithm

    def when_taking_over(self, call):
        pass


@pytest.mark.parametrize(
    ("unit", "algorithm", "expected"),
    [("samples", Downpour(), None), ("batches", Downpour(), "batches"), ("batches", Synchronous(), None)],
)
def test_the_unit_of_a_noise_scale_is_that_of_the_weights(tmp_path, unit, algorithm, expected):
    report, team = TrainingReport(noise_scale=7.0), Team(algorithm)
    place = RankPlace(rank=0, role="server 0", host="a", cores=1)
    facts = FactsWriter(tmp_path, team, lambda: report, unit=unit, place=place)
    facts.epoch(0, {}, 0.1, {})
    facts.close()
    (line,) = [one for one in read_facts(tmp_path / "ranks/facts.rank0.jsonl") if one["what"] == "epoch"]
    assert (line["noise_scale"], line.get("noise_unit")) == (7.0, expected)


def test_the_pace_in_a_trace_is_without_the_samples_before_a_resumption(tmp_path):
    facts = FactsWriter(tmp_path, None, lambda: TrainingReport(samples=1_000_000), timeline=True)
    facts.close()
    events = json.loads((tmp_path / "ranks/timeline.rank0.json").read_text())
    paces = [one["args"]["value"] for one in events if one["name"] == "samples/s"]
    assert paces
    assert not any(paces)


class FullDisk:
    """A file that takes the first bytes only, or none."""

    def __init__(self, file, takes):
        self.file, self.takes = file, takes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def seek(self, place):
        self.file.seek(place)

    def write(self, data):
        if not self.takes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data[: self.takes])


@pytest.mark.parametrize("takes", [0, 30])
def test_a_training_goes_on_where_its_trace_cannot_be_written(tmp_path, monkeypatch, caplog, takes):
    facts = FactsWriter(tmp_path, None, TrainingReport, timeline=True)
    monkeypatch.setattr(
        _trace_file, "open", lambda *how, **more: FullDisk(os.fdopen(*how, **more), takes), raising=False
    )
    facts.epoch(0, {}, 0.1, {})
    facts.close()
    assert caplog.text.count("timeline.rank0.json cannot be written") == 1
    assert [line["what"] for line in read_facts(tmp_path / "ranks/facts.rank0.jsonl")][-1] == "end"
    assert merged(tmp_path)[1] == 0  # what was written is read


def test_both_ends_of_a_message_have_one_number(tmp_path):
    ends = {}
    for rank, what, peer in ((1, "sends", 0), (0, "takes", 1), (2, "sends", 0)):
        trace = Trace(tmp_path / f"{rank}.json", rank, f"rank {rank}")
        trace.add(computed("message", 1.0, 1.5, **{what: (peer, 0, "PUSH", 7)}))
        trace.flush()
        ends[rank] = json.loads((tmp_path / f"{rank}.json").read_text())[-1]
    assert [ends[rank]["ph"] for rank in (1, 0, 2)] == ["s", "f", "s"]
    assert ends[1]["id"] == ends[0]["id"] != ends[2]["id"]


def test_what_a_process_uses_grows():
    before = Usage.now()
    block = mmap.mmap(-1, 50_000_000)  # not of memory that this process had before, and has freed
    block.write(bytes(len(block)))
    while (after := Usage.now()).cpu_s <= before.cpu_s:
        sum(range(100_000))
    assert after.memory_mb > before.memory_mb + 40
    block.close()


def test_the_load_of_gpus_is_read_where_the_library_is(monkeypatch):
    class NVMLError(Exception):
        pass

    def load(handle):
        if handle == 1:
            raise NVMLError
        return SimpleNamespace(gpu=35)

    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=load,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3_000_000),
        NVMLError=NVMLError,
    )
    monkeypatch.setattr(_usage.importlib, "import_module", lambda name: {"pynvml": library}[name])
    assert gpus_here()() == [{"index": 0, "busy": 0.35, "memory_mb": 3.0}]
    library.nvmlInit = lambda: 1 / 0
    assert gpus_here()() == []


def test_waits_for_a_core_are_those_of_all_threads(monkeypatch, tmp_path):
    for thread, waited_ns in ((7, 2_000_000_000), (9, 500_000_000)):
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "schedstat").write_text(f"123 {waited_ns} 5\n")
    before = Usage.now()
    monkeypatch.setattr(_usage, "_TASKS", tmp_path)
    first = Usage.now()
    assert first.core_wait_s == pytest.approx(2.5)
    (tmp_path / "7" / "schedstat").write_text("123 3000000000 9\n")
    assert Usage.now().core_wait_since(first) == pytest.approx(1.0)
    monkeypatch.setattr(_usage, "_TASKS", tmp_path / "of another system")
    assert Usage.now().core_wait_since(before) is None


# -- the facts of a rank -------------------------------------------------------------------------------


def lines_of(folder):
    return list(read_facts(folder / "ranks/facts.rank0.jsonl"))


def test_the_spans_of_an_epoch_add_up_to_its_time(tmp_path):
    facts = FactsWriter(tmp_path, None, TrainingReport, config={"lr": 0.1}, timeline=True)
    with span("validate"), span("wait"):
        pass
    facts.epoch(0, {"samples": 40}, 0.1, {"loss": float("inf")}, {"loss": 0.5})
    with span("read"):
        pass
    facts.epoch(1, {"samples": 42}, 0.1, {})
    assert recorder() is not None
    facts.close()
    facts.close()  # once more does nothing
    assert recorder() is None
    start, *found, end = [one for one in lines_of(tmp_path) if one["what"] != "sample"]
    assert (start["role"], start["config"], end["what"]) == ("alone", {"lr": 0.1}, "end")
    assert [(one["samples"], one["metrics"], one.get("own")) for one in found] == [
        (40, {"loss": None}, {"loss": 0.5}),
        (42, {}, None),
    ]
    for one in found:
        assert sum(one["spent"].values()) == pytest.approx(one["seconds"], abs=1e-4)
    assert min(found[0]["spent"]["validate"], found[0]["spent"]["wait"], found[1]["spent"]["read"]) > 0
    assert found[1]["spent"]["wait"] == 0
    assert any(one["what"] == "sample" for one in lines_of(tmp_path))
    events = json.loads((tmp_path / "ranks/timeline.rank0.json").read_text())
    assert {"epoch 0", "epoch 1", "validate", "wait", "read", "compute"} <= {one["name"] for one in events}


def test_losses_and_stalls_are_written_once(tmp_path):
    lost = []
    facts = FactsWriter(tmp_path, None, lambda: TrainingReport(lost=tuple(lost)))
    for text in ("rank 1", "rank 2"):
        lost.append(text)
        facts.epoch(0, {}, 0.1, {})
    facts.close()
    assert [one["text"] for one in lines_of(tmp_path) if one["what"] == "lost"] == ["rank 1", "rank 2"]


@pytest.mark.parametrize(("name", "value"), [("every_s", 0), ("limit_mb", float("inf")), ("every_s", "1")])
def test_impossible_options_are_refused(name, value, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"Report\(.*{name}={value!r}\) must be a number above 0"):
        FactsWriter(tmp_path / "run", None, TrainingReport, **{name: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "0", "3-2", "1-", "2@", "2@x", "2@1,", "1-2-3", 7])
def test_steps_that_cannot_be_profiled_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"profile=.* must name steps.* '10-20@1,3'"):
        ProfiledSteps.parse(text)


def test_the_profiler_runs_for_the_named_steps_of_the_named_ranks(tmp_path):
    seen = []

    def begin(folder):
        seen.append(("begin", len(done), folder.name))
        return lambda: seen.append(("end", len(done), folder.name))

    for rank, text in ((0, "3-5@0,2"), (1, "3-5@0,2"), (2, "1"), (2, "6-9")):
        done = []
        profiler = StepProfiler(text, tmp_path, rank, 3, begin)
        for step in range(7):
            done.append(step)
            profiler.end_step()
        profiler.close()
    assert seen == [
        *[("begin", 2, "profile.rank0"), ("end", 5, "profile.rank0")],
        *[("begin", 0, "profile.rank2"), ("end", 1, "profile.rank2")],
        *[("begin", 5, "profile.rank2"), ("end", 7, "profile.rank2")],
    ]
    with pytest.raises(ConfigurationError, match=r"'3@1,7' names rank 7, but the last one is 2"):
        StepProfiler("3@1,7", tmp_path, 0, 3, begin)


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    file = FactsFile(tmp_path, 0)
    file.add("epoch", epoch=0)
    with file.path.open("a") as raw:
        raw.write('{"what": "epo')
    assert [one["epoch"] for one in read_facts(file.path)] == [0]
    with file.path.open("a") as raw:
        raw.write("\n{}\n")
    with pytest.raises(ConfigurationError, match=r"line 2: .*; remove that line"):
        list(read_facts(file.path))


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    file = FactsFile(tmp_path, 0)
    file.add("epoch", epoch=np.int64(3), metrics={"loss": np.float32(0.5), "bad": np.float32("nan")})
    (line,) = read_facts(file.path)
    assert (line["epoch"], line["metrics"]) == (3, {"loss": 0.5, "bad": None})


def test_a_line_about_many_workers_is_read(tmp_path):
    file = FactsFile(tmp_path, 0)
    file.add("end", staleness={rank: dict.fromkeys(range(200), 1000) for rank in range(1000)})
    file.add("start")
    assert file.path.stat().st_size > 2_000_000
    assert [one["what"] for one in read_facts(file.path)] == ["end", "start"]


def test_a_resumed_run_goes_on_after_a_line_that_was_cut_off(tmp_path):
    path = FactsFile(tmp_path, 0).path
    path.write_text('{"what": "epoch", "epoch": 0}\n{"what": "epo')
    FactsFile(tmp_path, 0).add("epoch", epoch=1)
    assert [one["epoch"] for one in read_facts(path)] == [0, 1]
    path.write_text('{"what": "epo')
    FactsFile(tmp_path, 0).add("epoch", epoch=1)
    assert [one["epoch"] for one in read_facts(path)] == [1]


def test_a_line_that_a_full_disk_has_cut_off_is_left_out(tmp_path, monkeypatch, caplog):
    file = FactsFile(tmp_path, 0)
    file.add("epoch", epoch=0)

    @contextmanager
    def full(path):
        with Path(path).open("ab") as there:
            yield SimpleNamespace(write=lambda data: there.write(data[:9]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(_facts_writer, "append_file", full)
        file.add("epoch", epoch=1)
        file.add("epoch", epoch=2)
    file.add("epoch", epoch=3)
    assert [one["epoch"] for one in read_facts(file.path)] == [0, 3]
    assert caplog.text.count("cannot be written") == 1


class Script:
    """Holds a report that it never closes."""


def test_an_owner_that_is_gone_ends_the_facts_and_waits_for_no_thread(tmp_path):
    asks, goes_on = threading.Event(), threading.Event()

    def report():
        if threading.current_thread().name == "nnlo-facts":
            asks.set()
            goes_on.wait()  # as for a lock that the thread holds in which garbage is collected
        return TrainingReport(samples=7)

    facts, owner = FactsWriter(tmp_path, None, report), [Script()]
    facts.end_with(owner[0])
    asks.wait()
    collecting = threading.Thread(target=owner.clear)
    collecting.start()
    collecting.join(A_LONG_TIME_S)
    waited = collecting.is_alive()
    goes_on.set()
    collecting.join()
    assert not waited
    facts._thread.join(A_LONG_TIME_S)
    lines = [line["what"] for line in read_facts(tmp_path / "ranks/facts.rank0.jsonl")]
    assert lines[-1] == "end"

    facts.close()
    assert [line["what"] for line in read_facts(tmp_path / "ranks/facts.rank0.jsonl")] == lines


def test_facts_that_are_closed_by_their_script_end_once(tmp_path):
    owner = Script()
    facts = FactsWriter(tmp_path, None, TrainingReport)
    facts.end_with(owner)
    facts.close()
    del owner
    facts.close()
    assert [line["what"] for line in read_facts(tmp_path / "ranks/facts.rank0.jsonl")].count("end") == 1
    assert recorder() is None
