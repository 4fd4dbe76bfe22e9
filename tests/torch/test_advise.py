"""`nnlo_torch.advise`: what the probe sees of a loop, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import nnlo_torch as nt  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.simulation import _advice  # noqa: E402
from nnlo_torch._advise import TorchProbed  # noqa: E402

loss = torch.nn.functional.mse_loss


@pytest.fixture(autouse=True)
def fewer_layouts(monkeypatch):
    """Leave out the largest numbers of ranks, which take seconds."""
    monkeypatch.setattr(_advice, "WORKERS", (1, 2, 4))
    monkeypatch.setattr(_advice, "RANKS", (2, 4))


def training(batch=16, size=320):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(size, 6, generator=draws)
    data = torch.utils.data.TensorDataset(x, x[:, :2] + 0.1 * torch.randn(size, 2, generator=draws))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, torch.utils.data.DataLoader(data, batch, shuffle=True), optimizer


def test_model_optimizer_and_random_numbers_are_as_before(tmp_path):
    model, loader, optimizer = training()
    model.eval()
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    random_state = torch.get_rng_state()
    advice = nt.advise(model, loss, loader, optimizer, seconds=1, folder=tmp_path / "a")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert optimizer.state_dict() == before[1]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    facts = advice.facts
    assert (facts.batch, facts.samples, facts.parameters, facts.slots) == (16, 320, 90, 2)
    assert [*facts.steps_s] == [4, 8, 16, 32, 64]
    assert json.loads((tmp_path / "a" / "advice.json").read_text())["parameters"] == 90
    assert (tmp_path / "a" / "advice.html").stat().st_size > 1000


def test_its_gradients_are_those_of_autograd():
    model, loader, optimizer = training()
    one = TorchProbed(model, loss, loader, optimizer)
    batch = one.read(16)
    found = one.gradient(batch)
    expected = torch.autograd.grad(loss(model(batch[0]), batch[1]), [*model.parameters()])
    np.testing.assert_allclose(
        found, np.concatenate([one.numpy().reshape(-1) for one in expected]), rtol=1e-5
    )
    assert [name for name, _ in one.layers] == [name for name, _ in model.named_parameters()]


def test_batches_of_any_size_have_each_sample_once():
    data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1), torch.arange(40.0))
    model = torch.nn.Linear(1, 1)
    one = TorchProbed(
        model, loss, torch.utils.data.DataLoader(data, 8), torch.optim.SGD(model.parameters(), 0.1)
    )
    read = [one.read(size) for size in (8, 3, 5, 20, 4)]
    assert torch.cat([x for x, _ in read]).reshape(-1).tolist() == list(range(40))
    assert torch.cat([y for _, y in read]).tolist() == list(range(40))
    assert [len(y) for _, y in read] == [8, 3, 5, 20, 4]


def test_a_planted_underflow_is_named():
    model, loader, optimizer = training()

    def tiny(output, labels):
        return 1e-9 * loss(output, labels)

    advice = nt.advise(model, tiny, loader, optimizer, seconds=1)
    assert advice.flushed > 0.5
    scale = advice.loss_scale
    assert scale is not None
    assert f"a loss scale of {scale:.0f}" in advice.section("float16")[0]
    one = TorchProbed(model, tiny, loader, optimizer)
    gradient = one.gradient(one.read(64))
    gradient = gradient[gradient != 0]
    assert np.mean(np.float16(gradient) == 0) > 0.5
    assert np.mean(np.float16(np.float32(scale) * gradient) == 0) < 0.05


def test_the_parts_of_a_step_are_timed_in_the_loop(monkeypatch):
    model, loader, optimizer = training()
    one, other = TorchProbed(model, loss, loader, optimizer), copy.deepcopy(model)
    clock = iter([1.0, 1.25, 1.75])
    monkeypatch.setattr("nnlo_torch._advise.time.perf_counter", lambda: next(clock))
    batch = one.read(16)
    assert one.step_parts(batch) == (0.25, 0.5)
    reference = torch.optim.Adam(other.parameters(), lr=1e-3)
    loss(other(batch[0]), batch[1]).backward()
    reference.step()
    for copied, its in zip(one._collected, other.parameters(), strict=True):
        assert torch.equal(copied, its.grad)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_wrapper_alone_is_its_optimizer():
    model, loader, optimizer = training()
    advice = nt.advise(model, loss, loader, nt.Steady(optimizer), seconds=1)
    assert advice.facts.slots == 2


def nothing():
    yield from ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": lambda output, labels: float("nan") * output.sum()}, "the loss is nan in step 1"),
        ({"loss": lambda output, labels: output}, "not one number"),
        ({"loader": nothing()}, "yields no batches"),
        ({"loader": (batch for batch in training()[1])}, "the loader has ended, and it begins only once"),
        ({"loader": [torch.zeros(4, 6)]}, r"takes batches \(x, y\)"),
        ({"loader": [("a", "b")]}, "tensors of samples were expected"),
        ({"model": torch.nn.Flatten()}, "no parameters to train"),
        ({"size": 2}, "there are 2 samples"),
        ({"seconds": -1}, "seconds=-1"),
    ],
)
def test_what_cannot_be_tried_is_refused_and_nothing_is_written(change, text, tmp_path):
    model, loader, optimizer = training(size=change.get("size", 64))
    given = {"model": model, "loss": loss, "loader": loader, "seconds": 1, **change}
    given.pop("size", None)
    with pytest.raises(ConfigurationError, match=text):
        nt.advise(**given, optimizer=optimizer, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()
