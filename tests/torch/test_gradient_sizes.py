"""`Report(gradients=N)`: how large the values of each layer's gradient are, now and then, and its figure."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import nnlo_torch as nt  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.commands.report._run_figures import run_figures  # noqa: E402
from nnlo_common.commands.report._run_reader import read_run  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402


def train(folder, world=None, every=3, steps=7):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), world=world)
    report = nt.Report(optimizer, folder, gradients=every)
    seen = []
    for x in optimizer.epoch([torch.ones(2, 4) for _ in range(steps)]):
        optimizer.zero_grad()
        (1e-4 * model(x)).sum().backward()
        seen.append(model[1].weight.grad.reshape(-1).numpy().copy())
        optimizer.step()
    report.epoch({"loss": 1.0})
    optimizer.close()
    return seen


def told(folder, rank=0):
    lines = map(json.loads, (folder / f"ranks/facts.rank{rank}.jsonl").read_text().splitlines())
    return [line for line in lines if line["what"] == "gradients"]


def test_each_third_gradient_is_told_by_layer(tmp_path):
    seen = train(tmp_path / "run")
    lines = told(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 3, 6]
    for line in lines:
        assert [*line["layers"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        exponents = np.frexp(np.abs(seen[line["step"]]))[1].tolist()
        counts = {str(one): exponents.count(one) for one in sorted(set(exponents))}
        assert line["layers"]["1.weight"] == {"zeros": 0, "counts": counts}


def test_the_page_draws_the_last_one(tmp_path):
    pytest.importorskip("plotly")
    train(tmp_path / "run")
    run = read_run(tmp_path / "run")
    step, layers = run.ranks[0].gradients
    assert step == 6
    assert sum(layers["0.weight"].values()) == 12
    figure = run_figures([run])["Gradients by layer"]
    assert [*figure.data[0].y] == [*layers]
    assert np.sum(figure.data[0].z, axis=1) == pytest.approx([1] * 4)


def test_on_several_ranks_those_that_train_tell(tmp_path):
    with MemoryCluster(3) as cluster:
        cluster.run(lambda world: train(tmp_path / "run", world))
    assert not told(tmp_path / "run", 0)
    for rank in (1, 2):
        assert [line["step"] for line in told(tmp_path / "run", rank)][:1] == [0]


def test_without_it_nothing_is_told(tmp_path):
    train(tmp_path / "run", every=0)
    assert not told(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="gradients=-1"):
        train(tmp_path / "other", every=-1)


def test_a_damaged_line_is_no_figure(tmp_path):
    train(tmp_path / "run")
    path = tmp_path / "run" / "ranks/facts.rank0.jsonl"
    damaged = {
        "what": "gradients",
        "time": 1.0,
        "step": 9,
        "layers": {"a": {"counts": {"x": 1, "-3": "many"}}},
    }
    path.write_text(path.read_text() + json.dumps(damaged) + "\n")
    assert read_run(tmp_path / "run").ranks[0].gradients == (9, {})
