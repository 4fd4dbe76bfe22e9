"""Weights that are not views of the vector: what is done to them by hand does what it does with float32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()
WRAPPERS = {"Downpour": {}, "Synchronous": {}, "EASGD": {"alpha": 0.5, "every": 1}, "LocalSGD": {"every": 1}}
#: Weights of 16 bits, and others that are no views.
KINDS = {
    "bfloat16": lambda weight: weight.to(torch.bfloat16),
    "float16": lambda weight: weight.to(torch.float16),
    "channels last": lambda weight: weight.reshape(2, 2, 2, 2).to(memory_format=torch.channels_last),
}


class Weight(torch.nn.Module):
    """A weight that its loss does not move: only what is done by hand does."""

    def __init__(self, kind=None):
        super().__init__()
        weight = torch.zeros(16)
        self.weight = torch.nn.Parameter(weight if kind is None else KINDS[kind](weight))

    def fill(self, number):
        with torch.no_grad():
            self.weight.fill_(number)

    @property
    def number(self):
        (number,) = set(self.weight.detach().float().flatten().tolist())
        return number


def step(optimizer, model):
    optimizer.zero_grad()
    (0.0 * model.weight.float().sum()).backward()
    optimizer.step()


def between_epochs(optimizer, model, epoch):
    if optimizer.serves and epoch == 1:
        model.fill(1.0)


def after_the_last_epoch(optimizer, model, epoch):
    if optimizer.serves and epoch == 2:
        model.fill(1.0)


def on_all_ranks(optimizer, model, epoch):
    if epoch == 1:
        model.fill(1.0)


def on_a_worker(optimizer, model, epoch):
    if not optimizer.serves and epoch == 1:
        model.fill(1.0)


def inside_evaluation(optimizer, model, epoch):
    between_epochs(optimizer, model, epoch)
    return optimizer.evaluate(lambda batch: {"number": model.weight.float().mean()}, [torch.zeros(1)])[
        "number"
    ]


def inside_center_weights(optimizer, model, epoch):
    between_epochs(optimizer, model, epoch)
    optimizer.mean({})  # workers look after the server has changed it
    with optimizer.center_weights():
        return model.number


CHANGES = [
    between_epochs,
    after_the_last_epoch,
    on_all_ranks,
    on_a_worker,
    inside_evaluation,
    inside_center_weights,
]


def seen(name, change, kind=None):
    """What each rank sees of a weight of zeros that becomes 1 by hand."""

    def program(world):
        model = Weight(kind)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = getattr(nt, name)(inner, model=model, world=world, **WRAPPERS[name])
        found = []
        for epoch in range(3):
            for _ in optimizer.epoch(range(2)):
                step(optimizer, model)
            found.append((change(optimizer, model, epoch), model.number))
        optimizer.close()
        return [*found, model.number]

    return on_ranks(2, program)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_change_by_hand_does_what_it_does_with_float32(name, kind, change):
    expected = seen(name, change)
    assert seen(name, change, kind) == expected


def test_what_a_server_loads_between_two_epochs_is_the_centre():
    """As the test above, which compares with float32, cannot tell."""
    for name in ("Downpour", "Synchronous", "EASGD"):
        server, worker = seen(name, between_epochs, "bfloat16")
        assert server[1][1] == 1.0
        assert server[-1] > 0, name
        assert worker[-1] > 0, name


KEEPING = [
    ("EASGD", {"alpha": 0.5, "every": 2}),
    ("EASGD", {"alpha": 0.5, "every": 2, "lag": 1}),
    ("LocalSGD", {"every": 2}),
    ("DiLoCo", {"every": 2, "outer_learning_rate": 0.5, "outer_momentum": 0.5}),
]


def seen_after_steps(name, options, kind=None):
    """What a worker sees of its weight, which it changes by hand after each step."""

    def program(world):
        model = Weight(kind)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = getattr(nt, name)(inner, model=model, world=world, **options)
        found = []
        for number in optimizer.epoch(range(8)):
            step(optimizer, model)
            found.append(model.number)
            with torch.no_grad():
                model.weight.add_(number % 3)
        optimizer.close()
        return [*found, model.number]

    return on_ranks(2, program)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "options"), KEEPING)
def test_where_the_optimizer_runs_on_workers_they_keep_what_is_changed(name, options, kind):
    expected = seen_after_steps(name, options)
    assert expected[1][-1] > 0
    assert seen_after_steps(name, options, kind) == expected


def with_checkpoints(folder, name, batches, dtype, **options):
    def program(world):
        model = cases.model_of().to(dtype)
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = getattr(nt, name)(inner, model=model, world=world, **options)
        data = torch.utils.data.TensorDataset(X, Y)
        sampler = nt.ShardSampler(data, shuffle=False, optimizer=optimizer)
        loader = torch.utils.data.DataLoader(data, batch_size=6, sampler=sampler)
        checkpoint = nt.Checkpoint(folder, optimizer, epochs=int(batches > 0), batches=batches)
        for _ in checkpoint.epochs(2):
            for x, y in checkpoint.batches(loader):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
                optimizer.step()
        optimizer.close()
        return cases.values(model)

    return on_ranks(2, program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [("Downpour", {}), ("EASGD", {"every": 2}), ("LocalSGD", {"every": 3}), ("GEM", {}), ("Synchronous", {})],
)
def test_a_checkpoint_does_not_change_the_training(tmp_path, name, options, dtype):
    """A server's model shows the centre of the last epoch while the vector moves on."""
    plain, saved = (
        with_checkpoints(tmp_path / str(batches), name, batches, dtype, **options) for batches in (0, 4)
    )
    assert list((tmp_path / "4").glob("checkpoint-*/manifest.json"))
    for one, other in zip(plain, saved, strict=True):
        assert cases.same(one, other)
