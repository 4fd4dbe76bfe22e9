"""LARS and LARC around optimizers of torch, against the core's in NumPy, alone and at the centre."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import nnlo_torch as nt  # noqa: E402
from nnlo_common import LARS as CoreLARS  # noqa: E402
from nnlo_common import SGD, ConfigurationError  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402

KINDS = {"LARS": (nt.LARS, False), "LARC": (nt.LARC, True)}


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    )


def gradients(model, step):
    """Gradients of very different lengths, the same each time."""
    draws = np.random.default_rng(step)
    for index, parameter in enumerate(model.parameters()):
        gradient = draws.normal(size=parameter.shape) * 10.0 ** (index % 4 - 2)
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_each_step_is_the_cores(kind, decay):
    make, clip = KINDS[kind]
    model, (rate, momentum) = network(), (0.4, 0.9)
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
    optimizer = make(sgd, trust=0.02)
    expected = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    # The core scales what it is fitted to; vectors are stepped by plain SGD with decay and momentum.
    core = [
        CoreLARS(rate, momentum=momentum, weight_decay=decay, trust=0.02, clip=clip)
        if one.ndim > 1
        else SGD(rate, momentum=momentum)
        for one in expected
    ]
    for step in range(6):
        gradients(model, step)
        for one, parameter, own in zip(expected, model.parameters(), core, strict=True):
            gradient = parameter.grad.numpy().copy()
            if one.ndim == 1:
                gradient += decay * one
            own.step(one.reshape(-1), gradient.reshape(-1))
        optimizer.step()
    for one, parameter in zip(expected, model.parameters(), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), one, rtol=2e-5, atol=1e-7)
    assert sgd.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize("length", [1e-4, 1.0, 1e4])
def test_a_step_of_lars_has_the_length_that_the_formula_says(length):
    x = torch.nn.Parameter(torch.randn(6, 3, generator=torch.Generator().manual_seed(1)))
    before = x.detach().clone()
    x.grad = length * torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    nt.LARS(torch.optim.SGD([x], lr=0.5), trust=0.01, epsilon=0.0).step()
    moved = torch.linalg.vector_norm(x.detach() - before)
    assert float(moved) == pytest.approx(0.5 * 0.01 * float(torch.linalg.vector_norm(before)), rel=1e-5)


def test_larc_never_steps_further_than_the_optimizer_itself():
    for length in (1e-4, 1.0, 1e4):
        x = torch.nn.Parameter(torch.ones(3, 3))
        x.grad = torch.full((3, 3), length)
        nt.LARC(torch.optim.SGD([x], lr=0.1), trust=0.02).step()
        moved = float(torch.linalg.vector_norm(x.detach() - 1))
        assert moved <= 0.1 * length * 3 * 1.01  # rounded at 1
        assert moved <= 0.02 * 3 * (1 + 1e-5)


def test_what_has_no_direction_is_left_to_the_optimizer():
    zero, still = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    nt.LARS(torch.optim.SGD([zero, still], lr=0.5, weight_decay=0.1)).step()
    assert zero.tolist() == [[-0.5, -0.5], [-0.5, -0.5]]
    assert still.tolist() == [[1, 1], [1, 1]]


def test_adamw_keeps_its_decay():
    one, other = (torch.nn.Parameter(torch.full((2, 2), 2.0)) for _ in range(2))
    for x in (one, other):
        x.grad = torch.full((2, 2), 3.0)
    torch.optim.AdamW([one], lr=0.1, weight_decay=0.5).step()
    nt.LARS(torch.optim.AdamW([other], lr=0.1, weight_decay=0.5), epsilon=0.0).step()
    # Adam's first step does not depend on the gradient's length.
    assert torch.allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.optim.SGD(x, lr=1.0, weight_decay=0.1),
        lambda x: torch.optim.SGD(x, lr=1.0, weight_decay=0.1, maximize=True),
        lambda x: torch.optim.AdamW(x, lr=0.1, weight_decay=0.1),
        *(
            partial(make, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)
            for make in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)
            if "decoupled_weight_decay" in inspect.signature(make).parameters
        ),
    ],
)
@pytest.mark.parametrize("ndim", [1, 2])
def test_weights_decay_whatever_the_kind_of_decay(make, ndim):
    plain, wrapped = (torch.nn.Parameter(torch.full((1,) * ndim, 3.0)) for _ in range(2))
    for x in (plain, wrapped):
        x.grad = torch.full_like(x, 1e-3 if ndim > 1 else 0.0)
    one = make([plain])
    one.step()
    nt.LARS(make([wrapped]), trust=1.0).step()
    assert wrapped.item() < 3
    if ndim == 1:  # what has no direction has the decay of the optimizer
        assert wrapped.item() == plain.item()


@pytest.mark.filterwarnings("ignore:You are using .torch.load. with:FutureWarning")  # torch 2.4
@pytest.mark.parametrize("kind", [nt.LARS, nt.LARC])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("wrap", [lambda one: one, nt.Downpour])
def test_a_copy_steps_as_it_does(kind, copied, wrap):
    x = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = wrap(kind(torch.optim.SGD([x], lr=1.0, momentum=0.9), trust=0.1))
    for step in range(3):
        x.grad = torch.full_like(x, 1.0 + step)
        twin = copied(optimizer)
        (other,) = twin.param_groups[0]["params"]
        other.grad = x.grad.clone()
        for one in (optimizer, twin):
            one.step()
        assert other is not x
        assert torch.equal(x, other)
        assert not torch.equal(x, torch.tensor([[3.0, 4.0]]))


def test_all_parameters_are_scaled_if_asked():
    bias = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    bias.grad = torch.tensor([10.0, 0.0])
    nt.LARS(torch.optim.SGD([bias], lr=1.0), trust=0.1, adapts=lambda parameter: True).step()
    assert bias.tolist() == pytest.approx([2.5, 4.0])


def test_schedules_states_and_copies_are_the_optimizers():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    optimizer = nt.LARS(sgd)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    gradients(model, 0)
    optimizer.step()
    scheduler.step()
    assert sgd.param_groups[0]["lr"] == 0.2
    state = copy.deepcopy(optimizer.state_dict())
    gradients(model, 1)
    optimizer.step()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups is sgd.param_groups
    for one, other in zip(sgd.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


@pytest.mark.parametrize("wrapper", ["Synchronous", "LocalSGD", "Steady"])
def test_it_acts_where_the_optimizer_runs(wrapper):
    models = [network(), network()]  # made here: threads share torch's random numbers

    def train(world):
        model = models[world.rank]
        optimizer = getattr(nt, wrapper)(
            nt.LARS(torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9), trust=0.02), world=world
        )
        data = torch.utils.data.TensorDataset(torch.randn(12, 5, generator=torch.Generator().manual_seed(3)))
        for x, *_ in optimizer.epoch(torch.utils.data.DataLoader(data, 4)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.close()
        return [parameter.detach().numpy().copy() for parameter in model.parameters()]

    with MemoryCluster(2) as cluster:
        center, _ = cluster.run(train)
    model = network()
    optimizer = nt.LARS(torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9), trust=0.02)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    for part in x.split(4):
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()
    for one, parameter in zip(center, model.parameters(), strict=True):
        np.testing.assert_allclose(one, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda one: nt.LARS(one, trust=0), "trust=0.* above 0"),
        (lambda one: nt.LARC(one, epsilon=-1), r"LARC\(epsilon=-1\)"),
        (lambda one: nt.LARS("sgd"), "wraps a torch optimizer, not a str"),
        (lambda one: nt.LARS(nt.Downpour(one)), "cannot wrap another wrapper"),
        (lambda one: nt.GEM(nt.LARS(one)), "needs a torch.optim.SGD"),
    ],
)
def test_what_makes_no_sense_is_refused(call, text):
    with pytest.raises(ConfigurationError, match=text):
        call(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, 1))], lr=0.1))
