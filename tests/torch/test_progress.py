"""`Progress` alone, on a server with its workers, and on ranks without a server, as threads."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402
from nnlo_common.training.report import _progress_display  # noqa: E402
from nnlo_common.training.report._live_ranks import read_live  # noqa: E402

pytestmark = pytest.mark.framework("torch")

BATCHES, BATCH, EPOCHS = 7, 3, 2


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch):
    """Show and note in each step, as if each took long."""
    for name in ("PLAIN_S", "_NOTED_S"):
        monkeypatch.setattr(_progress_display, name, 0.0)


def training(folder, world=None, **options):
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = nt.Downpour(sgd, model=model, world=world, **options)
    workers = optimizer.share[1]
    samples = workers * BATCHES * BATCH
    progress = nt.Progress(optimizer, live=False, run=folder, epochs=EPOCHS, samples=samples)
    for _ in range(EPOCHS):
        for x in optimizer.epoch([torch.ones(BATCH, 2)] * BATCHES):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            progress.note({"loss": loss})
            loss.backward()
            optimizer.step()
        scores = optimizer.evaluate(lambda x: {"val_loss": model(x).square().mean()}, [torch.ones(5, 2)])
        progress.epoch({"loss": 0.5, **scores})
    optimizer.close()
    progress.end(scores)
    return model.weight.detach().clone()


CASES = {"alone": (1, {}, 1), "a server": (4, {}, 3), "no server": (3, {"servers": 0}, 3)}


@pytest.mark.parametrize(("ranks", "options", "workers"), CASES.values(), ids=CASES)
def test_one_rank_prints_for_all_and_all_write(ranks, options, workers, tmp_path, capsys):
    if ranks == 1:
        training(tmp_path)
    else:
        with MemoryCluster(ranks) as cluster:
            cluster.run(lambda world: training(tmp_path, world, **options))
    lines = capsys.readouterr().out.splitlines()
    ends = [line for line in lines if " 100 %" in line and "val_loss" in line and "loss 0.5000 |" in line]
    assert {re.match(r"epoch +(\d)/2", line)[1] for line in ends} == {"1", "2"}
    assert any(re.match(r"epoch   1/2 +\d?\d % .* samples/s .*\d:\d\d left", line) for line in lines)
    run = read_live(tmp_path)
    assert run.ended
    assert not run.unreadable
    whole = EPOCHS * BATCHES * BATCH
    counted = [one.samples for one in run.ranks]
    assert counted == ([workers * whole] if ranks == workers + 1 else []) + workers * [whole]
    assert [one.rank for one in run.ranks] == list(range(ranks))
    assert all(one.scores["loss"] == 0.5 for one in run.ranks)


def test_progress_changes_no_number(tmp_path, monkeypatch):
    torch.manual_seed(3)
    shown = training(tmp_path)
    monkeypatch.setattr(nt.Progress, "__init__", lambda self, *_, **__: None)
    for name in ("note", "epoch", "end"):
        monkeypatch.setattr(nt.Progress, name, lambda *_: None)
    torch.manual_seed(3)
    assert torch.equal(training(tmp_path), shown)
