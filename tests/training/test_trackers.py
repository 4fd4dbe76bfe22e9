"""Trackers: what TensorBoard's files, MLflow and Weights & Biases get of a training of several ranks.

MLflow and Weights & Biases are large: fakes take their place, with the calls that the real ones took.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest

from nnlo_common import ConfigurationError, MissingExtraError
from nnlo_common.training._rank_parts import TrainingReport
from nnlo_common.training.report._course import Course
from nnlo_common.training.report._progress_display import ProgressDisplay
from nnlo_common.training.report._trackers import TRACKERS, Trackers

STEPS = [(70, {"server 0": {"val_loss": 0.5, "bad": float("nan")}, "worker 0": {"loss": 0.25}})]
FLAT = {"server 0/val_loss": 0.5, "worker 0/loss": 0.25}


class FakeWandb:
    """As version 0.31 was called, offline."""

    def __init__(self):
        self.calls = []

    def init(self, *, project, name, mode, **folder):
        self.calls.append((project, name, mode))
        return SimpleNamespace(
            log=lambda values, step: self.calls.append((step, values)),
            finish=lambda: self.calls.append("finish"),
        )


class FakeMlflow:
    """As version 3 was called."""

    def __init__(self):
        self.calls = []
        self.entities = SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, step))

    def MlflowClient(self, *, tracking_uri):
        self.calls.append(tracking_uri.partition(":")[0])
        return SimpleNamespace(
            get_experiment_by_name=lambda name: None,
            create_experiment=lambda name: f"experiment {name}",
            create_run=lambda experiment, run_name: SimpleNamespace(
                info=SimpleNamespace(run_id=f"{experiment}, {run_name}")
            ),
            log_batch=lambda run, metrics: self.calls.append((run, metrics)),
            set_terminated=lambda run: self.calls.append(("ended", run)),
        )


def logged(name, folder):
    trackers = Trackers([name], folder)
    for step, series in STEPS:
        trackers.log(step, series)
    trackers.close()


def test_tensorboard_gets_a_series_for_each_rank(tmp_path):
    pytest.importorskip("tensorboardX", reason="the environment for MPICH has no tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    logged("tensorboard", tmp_path)
    found = {}
    for path in tmp_path.glob("tensorboard/*/events.*"):
        data = path.read_bytes()
        while data:  # a record: its length, the checksum of that, the event, and its checksum
            size = int.from_bytes(data[:8], "little")
            event, data = data[12 : 12 + size], data[16 + size :]
            for one in Event.FromString(event).summary.value:
                found[path.parent.name, one.tag] = Event.FromString(event).step, one.simple_value
    assert found == {("server-0", "val_loss"): (70, 0.5), ("worker-0", "loss"): (70, 0.25)}


def test_weights_and_biases_get_one_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    logged("wandb", tmp_path)
    assert fake.calls == [("nnlo", tmp_path.name, "offline"), (70, FLAT), "finish"]


def test_mlflow_gets_one_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", fake := FakeMlflow())
    logged("mlflow", tmp_path)
    run = f"experiment nnlo, {tmp_path.name}"
    assert fake.calls == ["sqlite", (run, [(name, one, 70) for name, one in FLAT.items()]), ("ended", run)]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_before_the_training(name, tmp_path, monkeypatch):
    module, package, _ = TRACKERS[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=rf"log_to {name} .*'{package}'.*pip install 'nnlo\[{name}\]'"
    ):
        Trackers([name], tmp_path)


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match="log_to 'tensorbord': give one of tensorboard, mlflow, wandb"
    ):
        Trackers(["tensorbord"], tmp_path)
    with pytest.raises(ConfigurationError, match="also give run=FOLDER"):
        ProgressDisplay(0, "alone", Course(), log_to="wandb")


def test_a_training_goes_on_where_its_tracker_fails(tmp_path, monkeypatch, caplog):
    fake = FakeWandb()
    fake.init = lambda **_: SimpleNamespace(
        log=lambda *_, **__: 1 / 0, finish=lambda: pytest.fail("it is out")
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logged("wandb", tmp_path)
    assert [one.getMessage() for one in caplog.records] == [
        "wandb gets no more numbers of this training: division by zero"
    ]


def test_the_rank_with_the_centre_logs_for_all(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    now = SimpleNamespace(s=0.0)
    displays = [
        ProgressDisplay(
            rank,
            role,
            Course(samples=70, clock=lambda: now.s),
            run=tmp_path,
            log_to="wandb",
            clock=lambda: now.s,
        )
        for rank, role in enumerate(("server 0", "worker 0", "worker 1"))
    ]
    now.s = 2.0
    for rank in (1, 2, 0):
        report = TrainingReport(samples=7 * rank, exchanges=3 * (rank == 0), mean_staleness=1.5)
        displays[rank].look(partial(TrainingReport, samples=7 * rank), partial(dict, loss=0.25 * rank))
        displays[rank].end_epoch(report, {"val_loss": 0.5} if rank == 0 else {"loss": 0.25 * rank})
        if rank:
            displays[rank].end()
    displays[0].end()
    assert len(fake.calls) == 3  # one run: its begin, one epoch, its end
    _, values = fake.calls[1]
    assert values["server 0/val_loss"] == 0.5
    assert values["server 0/staleness"] == 1.5
    assert (values["worker 0/loss"], values["worker 1/loss"]) == (0.25, 0.5)
