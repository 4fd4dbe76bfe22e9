"""What `Report` writes: alone, on a server and its workers, and in groups, as threads."""

from __future__ import annotations

import json
import time
import weakref
from functools import partial

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands._trace import merged
from nnlo_common.commands.report._run_reader import read_run
from nnlo_common.training.report import _facts_writer
from nnlo_common.training.report._course import Course
from nnlo_common.training.report._facts_writer import read_facts
from tests.helpers.threads import writers_left
from tests.helpers.traces import problems_in, self_times

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402

pytestmark = pytest.mark.framework("torch")

BATCHES, EPOCHS = 6, 2


def training(folder, world=None, first=0, before_step=lambda optimizer: None, profile=None, **options):
    """Two epochs of some batches on each worker, written down."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    make = nt.Synchronous if options else nt.EASGD
    settings = {} if options else {"every": 3, "beta": 0.5}
    optimizer = make(sgd, model=model, world=world, **settings, **options)
    traces = {"timeline": True, "profile": profile}
    report = nt.Report(optimizer, folder, initial_epoch=first, config={"lr": 0.01}, **traces)
    for _ in range(EPOCHS):
        for x in optimizer.epoch([torch.ones(4, 2)] * BATCHES):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            before_step(optimizer)
            optimizer.step()
        optimizer.evaluate(lambda x: {"loss": model(x).mean()}, [torch.ones(3, 2)])
        report.epoch({"loss": 0.5, "worse": float("nan")})
    optimizer.close()


def lines(folder, rank, what="epoch"):
    return [line for line in read_facts(folder / f"ranks/facts.rank{rank}.jsonl") if line["what"] == what]


def test_the_report_has_a_line_for_each_epoch(tmp_path):
    training(tmp_path / "new")
    training(tmp_path / "new", first=2)  # goes on in the same file
    found = lines(tmp_path / "new", 0)
    assert [line["epoch"] for line in found] == [0, 1, 2, 3]
    for line in found:
        assert (line["batches"], line["samples"]) == (BATCHES, 4 * BATCHES)
        assert line["samples_per_second"] == pytest.approx(4 * BATCHES / line["seconds"], rel=0.01)
        assert line["learning_rate"] == 0.01
        assert line["metrics"] == {"loss": 0.5, "worse": None}
        assert "exchanges" not in line
        assert sum(line["spent"].values()) == pytest.approx(line["seconds"], abs=1e-4)
        assert min(line["spent"][kind] for kind in ("compute", "read", "validate")) > 0
    assert [line["over"] for line in lines(tmp_path / "new", 0, "end")] == [True, True]
    assert [line["role"] for line in lines(tmp_path / "new", 0, "start")] == ["alone", "alone"]


def test_a_server_and_two_workers_write_what_each_has_seen(tmp_path):
    with MemoryCluster(3) as cluster:
        cluster.run(lambda world: training(tmp_path, world))
    server, worker = lines(tmp_path, 0), lines(tmp_path, 1)
    assert server[-1]["exchanges"] == sum(line["updates"] for line in server) == 2 * EPOCHS * BATCHES // 3
    assert sum(line["samples"] for line in server) == 2 * EPOCHS * BATCHES * 4
    counts = {rank: sum(found.values()) for rank, found in server[-1]["staleness"].items()}
    assert counts == {"1": 4, "2": 4}
    assert "batches" not in server[0]
    assert [(line["batches"], line["samples"]) for line in worker] == EPOCHS * [(BATCHES, 4 * BATCHES)]
    assert all(line["spent"]["apply"] > 0 and line["spent"]["wait"] == 0 for line in server)
    assert all(line["spent"]["wait"] > 0 and line["spent"]["idle"] == 0 for line in worker)
    assert {line["role"]: line["workers"] for line in lines(tmp_path, 2, "start")} == {"worker 1": 2}


def test_a_merged_trace_keeps_the_rules_and_has_the_times_of_the_report(tmp_path):
    with MemoryCluster(4) as cluster:
        cluster.run(lambda world: training(tmp_path, world))
    events, dropped = merged(tmp_path)
    assert problems_in(events) == []
    assert dropped == 0
    kinds = {event["name"] for event in events if event["ph"] == "s"}
    assert {"JOIN", "EXCHANGE", "CENTER", "ASK", "ANSWER", "LEAVE"} <= kinds
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"mean staleness", "queue"}
    times = self_times(events)
    for rank in range(4):
        spent = lines(tmp_path, rank, "sample")[-1]["spent"]
        total = sum(times[rank].values())
        assert total == pytest.approx(sum(spent.values()), rel=0.05)
        for kind, seconds in spent.items():
            assert times[rank].get(kind, 0.0) / total == pytest.approx(
                seconds / sum(spent.values()), abs=0.02
            ), kind


class Slow:
    """Delays one rank of a group before its steps."""

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, optimizer):
        if optimizer.rank == self.rank:
            time.sleep(0.01)


@pytest.mark.parametrize(("servers", "size"), [(0, 3), (1, 4)])
def test_waits_within_a_group_are_no_computing(servers, size, tmp_path):
    last = size - 1  # sleeps, so all others of its group wait for it in the meeting before the step
    with MemoryCluster(size) as cluster:
        cluster.run(
            lambda world: training(tmp_path, world, servers=servers, group_size=3, before_step=Slow(last))
        )
    for rank in range(servers, last):
        waited = sum(line["spent"]["wait"] for line in lines(tmp_path, rank))
        assert waited > EPOCHS * BATCHES * 0.01


@pytest.mark.parametrize("name", ["gather", "add_up", "broadcast", "gather_bytes"])
def test_every_wait_of_a_lead_for_its_group_and_its_queries_is_seen(name, tmp_path, monkeypatch):
    """A lead that is slow in one of the group's operations has waited, wherever it is called."""
    from nnlo_common.testing._memory import MemoryGroup

    plain, slept = getattr(MemoryGroup, name), {}

    def slow(self, *given):
        time.sleep(0.002)
        slept[self.ranks[self.index]] = slept.get(self.ranks[self.index], 0) + 0.002
        return plain(self, *given)

    monkeypatch.setattr(MemoryGroup, name, slow)
    with MemoryCluster(2) as cluster:
        cluster.run(lambda world: training(tmp_path, world, servers=0, group_size=2))
    for rank in range(2):
        spent = lines(tmp_path, rank, "sample")[-1]["spent"]
        assert slept[rank] * 0.95 <= spent["wait"]


def saved_training(folder, epochs, world=None, reports=False, **options):
    """Some epochs that are saved; without a report of its own if `reports` is False."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), model=model, world=world)
    checkpoint = nt.Checkpoint(folder, optimizer, **options)
    data = torch.ones(4 * BATCHES * (2 if world else 1), 2)  # on two workers
    loader = torch.utils.data.DataLoader(data, 4, sampler=nt.ShardSampler(data, optimizer=optimizer))
    report = None
    for epoch in checkpoint.epochs(epochs):
        if reports and report is None:  # as late as a script may
            report = nt.Report(optimizer, folder.parent / "of the script", initial_epoch=epoch)
        for x in checkpoint.batches(loader):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.mean({"loss": epoch})
        if report is not None:
            report.epoch()
    optimizer.close()


def test_what_is_saved_has_facts_and_a_resumed_training_adds_to_them(tmp_path):
    for epochs in (2, 3):
        with MemoryCluster(3) as cluster:
            cluster.run(lambda world: saved_training(tmp_path, epochs, world))  # noqa: B023 - called at once
    for rank, samples in ((0, 2 * 4 * BATCHES), (1, 4 * BATCHES)):
        found = lines(tmp_path, rank)
        assert [(line["epoch"], line["samples"]) for line in found] == [
            (epoch, samples) for epoch in range(3)
        ]
        assert [line["metrics"] for line in found] == [{"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}]
        assert [line["over"] for line in lines(tmp_path, rank, "end")] == [True, True]
    run = read_run(tmp_path)
    assert (run.history, len(run.ranks)) == ({"loss": [0.0, 1.0, 2.0]}, 3)


def test_facts_are_written_once_or_not_at_all(tmp_path):
    saved_training(tmp_path / "first", 2, reports=True)
    assert [line["metrics"] for line in lines(tmp_path / "of the script", 0)] == [
        {"loss": 0.0},
        {"loss": 1.0},
    ]
    saved_training(tmp_path / "second", 2, report=False)
    assert not [*(tmp_path / "first").rglob("facts*"), *(tmp_path / "second").rglob("facts*")]


def test_facts_that_cannot_be_written_do_not_end_the_training(tmp_path, monkeypatch, caplog):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_facts_writer, "append_file", full)
    saved_training(tmp_path, 2)
    # The training of another test may end here, too.
    (warned,) = [record.message for record in caplog.records if f"{tmp_path}/ranks/facts" in record.message]
    assert "facts.rank0.jsonl cannot be written ([Errno 28] No space left on device); the training" in warned
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


@pytest.mark.extended
def test_the_profiler_sees_the_steps_that_were_named_on_the_ranks_that_were_named(tmp_path):
    with MemoryCluster(3) as cluster:
        cluster.run(lambda world: training(tmp_path, world, profile="2-4@0,2"))
    (found,) = (tmp_path / "ranks").glob("profile*")  # rank 0 is a server, which makes no steps
    events = json.loads((found / "trace.json").read_text())["traceEvents"]
    assert found.name == "profile.rank2"
    steps = [event for event in events if event["name"] == "Optimizer.step#SGD.step"]
    assert len(steps) == 3


def test_a_place_that_cannot_be_written_to_is_named_before_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    optimizer = nt.Downpour(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=r"Report.* cannot write .*name a"):
        nt.Report(optimizer, tmp_path / "file" / "here")


@pytest.mark.parametrize("size", [1, 3])
def test_a_report_that_nobody_closes_ends_with_its_script(size, tmp_path):
    """Nothing of it stays in memory, and no thread goes on writing."""
    before, models = writers_left(), []

    def program(world):
        model = torch.nn.Linear(3, 1)
        models.append(weakref.ref(model))
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=world)
        checkpoint = nt.Checkpoint(tmp_path, optimizer, report=False)
        nt.Report(optimizer, tmp_path)
        for _ in checkpoint.epochs(2):
            for x in checkpoint.batches(optimizer.epoch([torch.ones(2, 3)] * 3)):
                model(x).sum().backward()
                optimizer.step()
                raise OSError("of the user's")

    def run():
        if size == 1:
            program(None)
        with MemoryCluster(size) as cluster:
            cluster.run(program, 60)

    with pytest.raises(OSError, match="of the user's"):
        run()
    assert writers_left() == before
    assert [one() for one in models] == [None] * size


@pytest.mark.parametrize(("stop", "epoch", "samples"), [(3, 0, 12), (9, 1, 12), (12, 2, 24)])
def test_a_resumed_training_counts_what_this_start_has_done(tmp_path, monkeypatch, stop, epoch, samples):
    def trained(stop=None):
        model = torch.nn.Linear(2, 1)
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01))
        checkpoint = nt.Checkpoint(tmp_path, optimizer, batches=1)
        progress = nt.Progress(optimizer, epochs=3, live=False)
        report = nt.Report(optimizer, tmp_path)
        paces, done = [], 0
        for _ in checkpoint.epochs(3):
            for x in checkpoint.batches(optimizer.epoch([torch.ones(4, 2)] * BATCHES)):
                if done == stop:
                    raise KeyboardInterrupt
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                done += 1
            moment = progress._display._course.now(optimizer.report())
            paces.append((moment.epoch, moment.rate))
            progress.epoch()
            report.epoch()
        optimizer.close()
        return paces

    with pytest.raises(KeyboardInterrupt):
        trained(stop=stop)
    clock = [0.0]
    monkeypatch.setattr("nnlo_torch._progress_lines.Course", partial(Course, clock=lambda: clock[0]))
    began = nt.Progress._begin_at

    def begin_at(progress, number):
        began(progress, number)
        clock[0] += 2.0

    monkeypatch.setattr(nt.Progress, "_begin_at", begin_at)
    assert trained()[0] == (epoch + 1, samples / 2)
    found = [line for line in lines(tmp_path, 0) if line["epoch"] == epoch]
    assert (found[-1]["samples"], found[-1]["batches"]) == (samples, samples // 4)
    assert [line["epoch"] for line in lines(tmp_path, 0)] == [0, 1, 2]
