"""Weights that a loop changes by hand after a step are refused where the next exchange would undo it."""

from __future__ import annotations

import pytest

from nnlo_common import ConfigurationError

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()
#: The algorithms whose exchanges alone move a worker's weights.
OVERWRITING = ["Downpour", "Synchronous", "DynSGD", "AGN", "GEM", "EAMSGD"]
KEEPING = ["EASGD", "LocalSGD", "DiLoCo"]


def wrapped(name, model, world, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=name == "EAMSGD")
    return getattr(nt, name)(inner, world=world, model=model, **options)


def clamped(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def copied(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.9)


def by_numpy(model):
    model[0].weight.data.numpy()[0, 0] += 1


def as_a_vector(model):
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector.detach() * 0.5, model.parameters())


def without_grad(model):
    with torch.no_grad():
        model[2].bias.add_(1.0)


def by_another_optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(model.parameters(), fused=True).step()


CHANGES = [clamped, copied, by_numpy, without_grad, by_another_optimizer]


def trained(
    world, name, change, *, when=lambda step: True, make=cases.model_of, epochs=2, steps=10, **options
):
    """The weights at the end of a loop that changes the weights after some of its steps."""
    model = make()
    optimizer = wrapped(name, model, world, **options)
    for _ in range(epochs):
        for step, index in enumerate(optimizer.epoch(torch.arange(steps)[:, None])):
            optimizer.zero_grad()
            x, y = X[6 * int(index) :][:6], Y[6 * int(index) :][:6]
            torch.nn.functional.cross_entropy(
                model(x.to(next(model.parameters()).dtype)).float(), y
            ).backward()
            optimizer.step()
            if when(step):
                change(model)
    optimizer.close()
    return cases.values(model)


def refused(name, change, **options):
    with pytest.raises(ConfigurationError) as refusal:
        on_ranks(2, lambda world: trained(world, name, change, **options))
    return str(refusal.value)


@pytest.mark.parametrize("name", OVERWRITING)
def test_weights_clipped_after_a_step_are_refused_where_an_exchange_undoes_it(name):
    said = refused(name, clamped)
    assert "0.weight was changed outside of step()" in said
    assert f"with {name} " in said
    assert "optimizer.after_commit(...)" in said
    assert "LocalSGD" in said


@pytest.mark.parametrize("change", CHANGES)
def test_any_way_to_change_weights_is_found(change):
    assert "was changed outside of step()" in refused("Downpour", change)


@pytest.mark.parametrize("options", [{"lag": 1}, {"every": 3}, {"local": 0.01}, {"n_push": 1, "n_fetch": 4}])
def test_it_is_found_however_seldom_the_centre_is_fetched(options):
    assert "was changed outside of step()" in refused("Downpour", clamped, **options)


@pytest.mark.parametrize("every", [2, 5, 7])
def test_weights_that_are_changed_only_now_and_then_are_found(every):
    said = refused("Downpour", without_grad, when=lambda step: step % every == every - 1)
    assert "2.bias was changed" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_compared_with_what_they_were_given(dtype):
    make = lambda: cases.model_of().to(dtype)  # noqa: E731
    assert "0.weight was changed" in refused("Downpour", clamped, make=make)


def halves():
    return cases.model_of().to(torch.bfloat16)


def wide():
    return cases.initialised(
        torch.nn.Sequential(torch.nn.Linear(5, 9000), torch.nn.Tanh(), torch.nn.Linear(9000, 3))
    )


def test_a_change_within_a_large_model_is_found_when_its_turn_comes():
    """Every third of the later steps compares a part of the weights."""
    late = refused("Downpour", without_grad, when=lambda step: step > 0, make=wide, steps=60)
    assert "2.bias was changed" in late


@pytest.mark.parametrize("name", KEEPING)
def test_where_the_optimizer_runs_on_workers_they_keep_what_is_changed(name):
    clipped = on_ranks(2, lambda world: trained(world, name, clamped, every=2))
    assert max(float(value.abs().max()) for value in clipped[1]) < 0.0501


@pytest.mark.parametrize("name", [*OVERWRITING, *KEEPING])
@pytest.mark.parametrize("size", [2, 3])
def test_an_ordinary_loop_is_not_refused(name, size):
    def program(world):
        return [trained(world, name, lambda model: None, make=make) for make in (cases.model_of, halves)]

    assert len(on_ranks(size, program)) == size


def test_looking_at_the_centre_between_two_steps_is_no_change():
    def program(world):
        model = cases.model_of()
        optimizer = wrapped("Downpour", model, world, every=4)
        for index in optimizer.epoch(torch.arange(10)[:, None]):
            optimizer.zero_grad()
            cases.loss_of(model, X[6 * int(index) :][:6], Y[6 * int(index) :][:6]).backward()
            optimizer.step()
            with optimizer.center_weights():
                model(X)
        optimizer.close()
        return optimizer.report().steps

    assert on_ranks(2, program)[1] == 10


class Words(torch.nn.Module):
    """Its embedding renormalises the rows that each forward pass reads."""

    def __init__(self, max_norm):
        super().__init__()
        self.words = torch.nn.Embedding(9, 4, max_norm=max_norm)
        self.head = torch.nn.Linear(4, 3)
        cases.initialised(self)

    def forward(self, index):
        return self.head(self.words(index))


def words_on_ranks(max_norm, change):
    def program(world):
        model = Words(max_norm)
        optimizer = wrapped("Downpour", model, world)
        for index in optimizer.epoch(torch.arange(12)[:, None]):
            optimizer.zero_grad()
            model(torch.tensor([int(index) % 9, 3])).sum().backward()
            optimizer.step()
            model(torch.arange(9))  # renormalises all rows
            change(model)
        optimizer.close()
        return cases.values(model)

    return on_ranks(2, program)


def test_an_embedding_that_renormalises_itself_is_exempt_but_what_is_beside_it_is_not():
    assert words_on_ranks(0.1, lambda model: None)
    with pytest.raises(ConfigurationError, match=r"head\.bias was changed"):
        words_on_ranks(0.1, lambda model: model.head.bias.data.add_(1.0))


def test_alone_it_is_the_plain_loop():
    plain = cases.model_of()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for index in range(10):
            optimizer.zero_grad()
            cases.loss_of(plain, X[6 * index :][:6], Y[6 * index :][:6]).backward()
            optimizer.step()
            clamped(plain)
    assert cases.same(trained(None, "Downpour", clamped), cases.values(plain))
