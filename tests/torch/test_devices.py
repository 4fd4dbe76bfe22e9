"""Models whose parameters do not lie in the host's memory: on CUDA, and as if they did not on the CPU."""

from __future__ import annotations

import pytest

from nnlo_common.testing import MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _flat_model  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.devices import DEVICES, device_of, on_gpu  # noqa: E402

pytestmark = pytest.mark.framework("torch")


class Net(torch.nn.Module):
    """Float32 and 16-bit parameters side by side, running statistics, a frozen and an unused parameter."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        # No bias: before the norm its gradient is rounding alone, which Adam would magnify.
        self.first = torch.nn.Linear(5, 8, bias=False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.offset = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
        self.last = torch.nn.Linear(8, 3)
        self.unused = torch.nn.Linear(2, 2)
        cases.initialised(self)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)) + self.offset.float()))


@pytest.fixture
def device(request, monkeypatch):
    """Where the model is."""
    return device_of(request.param, monkeypatch)


def loop(model, optimizer, sampler, device, epochs=2):
    x, y = (part.to(device) for part in cases.data())
    for _ in range(epochs):
        indices = []
        for index in sampler:
            indices.append(index)
            if len(indices) == 6:
                optimizer.zero_grad()
                cases.loss_of(model, x[indices], y[indices]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                indices = []


def values(model):
    floats = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return [tensor.detach().float().cpu().clone() for tensor in floats]


def on_ranks(wrap, device, make, *, servers=1, dtype=torch.bfloat16):
    def program(world):
        model = Net(dtype).to(device)
        optimizer = wrap(make(model), world=world, servers=servers)
        loop(model, optimizer, nt.ShardSampler(range(60), seed=3, optimizer=optimizer), device)
        with optimizer.evaluation():
            center = values(model)
        optimizer.close()
        return center, values(model), [tensor.device.type for tensor in model.parameters()]

    with MemoryCluster(servers + 1) as cluster:
        return cluster.run(program, timeout_s=30)


OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_trains_as_the_plain_loop_wherever_the_model_is(name, servers, device):
    model = Net(torch.float32).to(device)
    loop(model, OPTIMIZERS[name](model), nt.ShardSampler(range(60), seed=3), device)
    found = on_ranks(nt.Downpour, device, OPTIMIZERS[name], servers=servers, dtype=torch.float32)
    for center, own, devices in found:
        assert set(devices) == {device}
        assert all(torch.equal(a, b) for a, b in zip(center, own, strict=True))
        for got, expected in zip(center, values(model), strict=True):
            if device == "cpu":
                assert torch.equal(got, expected)
            else:  # the centre is stepped on the CPU, which rounds otherwise
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_block_is_the_view_s_equal_to_the_bit(monkeypatch):
    """The same training, once with parameters that are the vector and once with copied blocks."""
    torch.set_num_threads(1)
    views = on_ranks(nt.Downpour, "cpu", OPTIMIZERS["adam"])
    monkeypatch.setattr(_flat_model, "_storage", as_block)
    blocks = on_ranks(nt.Downpour, "cpu", OPTIMIZERS["adam"])
    for (center, own, _), (expected, expected_own, _) in zip(blocks, views, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(center, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(own, expected_own, strict=True))


def as_block(tensor):
    return _flat_model.Storage.BLOCK if tensor.dtype is torch.float32 else _flat_model.Storage.COPY


@pytest.mark.parametrize("wrap", [nt.EASGD, nt.GEM, nt.AGN, nt.LocalSGD, nt.DiLoCo, nt.Synchronous])
def test_every_road_gives_the_same_bits_with_every_wrapper(wrap, monkeypatch):
    torch.set_num_threads(1)

    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def wrapped(optimizer, **options):
        return (
            wrap(optimizer, **options)
            if wrap in (nt.GEM, nt.Synchronous)
            else wrap(optimizer, every=2, **options)
        )

    views = on_ranks(wrapped, "cpu", make)
    monkeypatch.setattr(_flat_model, "_storage", as_block)
    for (center, own, _), (expected, expected_own, _) in zip(
        on_ranks(wrapped, "cpu", make), views, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(center, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(own, expected_own, strict=True))


@pytest.mark.gpu
@on_gpu[1]
def test_memory_for_cuda_is_page_locked():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(10, device="cuda"))], lr=0.1)
    flat_model = _flat_model.FlatModel(_flat_model.named_parameters(optimizer))
    assert torch.from_numpy(flat_model.parameters.vector).is_pinned()
