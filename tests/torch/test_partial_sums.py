"""A loop that divides its sum over a part of the data by the size of the whole is named once."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from nnlo_common.base import _errors

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _sampler  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch):
    monkeypatch.setattr(_errors, "_SHOWN", {})


def step(model, optimizer, index):
    index = int(index[0])
    optimizer.zero_grad()
    loss = cases.loss_of(model, X[6 * index :][:6], Y[6 * index :][:6])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def said(*loops, size=3, batch_sampler=False, num_workers=0):
    """The warnings of two epochs of each loop, with a training loader and one over all data."""

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.05), world=world, model=model)
        data = list(range(8))
        sampler = nt.ShardSampler(data, optimizer=optimizer)
        how = {"batch_sampler": torch.utils.data.BatchSampler(sampler, 1, False)} if batch_sampler else {}
        loader = torch.utils.data.DataLoader(data, **(how or {"sampler": sampler}), num_workers=num_workers)
        held_out = torch.utils.data.DataLoader(data)
        for loop in loops:
            for _ in range(2):
                loop(model, optimizer, loader, held_out)
        optimizer.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # From Python 3.12 on of processes that a loader forks beside the threads of this test.
        warnings.filterwarnings("ignore", ".* use of fork", DeprecationWarning)
        on_ranks(size, program) if size > 1 else program(None)
    return [str(one.message) for one in caught]


def at_once(model, optimizer, loader, held_out):
    total = 0.0
    for index in loader:
        total += step(model, optimizer, index)
    return total / len(loader.dataset)


def in_place(model, optimizer, train_loader, held_out):
    total = sum(step(model, optimizer, index) for index in train_loader)
    total /= len(train_loader.dataset)
    return total


def by_a_name(model, optimizer, loader, held_out):
    size = len(loader.dataset)
    total = sum([step(model, optimizer, index) for index in loader])
    return total / size


def of_an_attribute(model, optimizer, loader, held_out):
    trainer = SimpleNamespace(loaders=SimpleNamespace(train=loader))
    for index in trainer.loaders.train:
        step(model, optimizer, index)
    return 1.0 / len(trainer.loaders.train.dataset)


def batches_of(loader):
    yield from loader


def through_a_generator(model, optimizer, loader, held_out):
    total = sum(step(model, optimizer, index) for index in batches_of(loader))
    return total / len(loader.dataset)


def of_what_another_has_summed(model, optimizer, loader, held_out):
    def trained():
        return sum(step(model, optimizer, index) for index in loader)

    return trained() / len(loader.dataset)


WRONG = [at_once, in_place, by_a_name, of_an_attribute, through_a_generator, of_what_another_has_summed]


@pytest.mark.parametrize("loop", WRONG)
def test_a_partial_sum_divided_by_the_size_of_all_is_named_once(loop):
    (text,) = said(loop)
    lines = Path(__file__).read_text().splitlines()
    place, _, rest = text.partition(" divides by len(")
    file, _, line = place.rpartition(":")
    assert file == __file__
    assert "dataset" in lines[int(line) - 1] or "total / size" in lines[int(line) - 1]
    assert rest.startswith(("loader.", "train_loader.", "trainer.loaders.train."))
    assert 'optimizer.mean({"loss": total / max(count, 1)}, count)["loss"]' in text


@pytest.mark.parametrize("options", [{"batch_sampler": True}, {"num_workers": 1}])
def test_it_is_found_however_the_loader_draws(options):
    assert len(said(at_once, **options)) == 1


def by_the_other_loader(model, optimizer, loader, held_out):
    total = sum(step(model, optimizer, index) for index in loader)
    return total / max(len(loader), 1) + 1.0 / len(held_out.dataset)


def through_a_property(model, optimizer, loader, held_out):
    class Trainer:
        @property
        def loader(self):
            raise AssertionError("nothing of the script is run")

    trainer, reads = Trainer(), False
    for index in loader:
        step(model, optimizer, index)
    return 1.0 / len(trainer.loader.dataset) if reads else 0.0


def inside_another_function(model, optimizer, loader, held_out):
    def mean(loader):
        return 1.0 / len(loader.dataset)

    for index in loader:
        step(model, optimizer, index)
    return mean(held_out)


def of_two_sizes(model, optimizer, loader, held_out):
    size = len(loader.dataset)
    for index in loader:
        step(model, optimizer, index)
    size = 1.0
    return 1.0 / size


def by_its_own_count(model, optimizer, loader, held_out):
    total, count = 0.0, 0
    for index in loader:
        total += step(model, optimizer, index)
        count += len(index)
    fraction = len(loader.dataset) / max(count, 1)
    return optimizer.mean({"loss": total / max(count, 1)}, count)["loss"] + fraction


def from_text(text):
    names = {"step": step}
    exec(text, names)
    return names["loop"]


without_a_source = from_text(
    "def loop(model, optimizer, loader, held_out):\n"
    "    return sum(step(model, optimizer, index) for index in loader) / len(loader.dataset)"
)
RIGHT = [by_the_other_loader, through_a_property, inside_another_function, of_two_sizes, by_its_own_count]


@pytest.mark.parametrize("loop", [*RIGHT, without_a_source])
def test_what_is_right_or_cannot_be_read_is_not(loop):
    assert said(loop) == []


@pytest.mark.parametrize("loop", WRONG)
def test_alone_a_loop_has_all_data(loop):
    assert said(loop, size=1) == []


def test_a_source_is_read_once(monkeypatch):
    read = []
    tree_of = _sampler._tree_of
    monkeypatch.setattr(_sampler, "_tree_of", lambda frame: read.append(frame.f_code) or tree_of(frame))
    said(at_once, by_its_own_count)
    assert at_once.__code__ in read
    assert len(read) == len(set(read))


def test_the_code_of_a_module_is_read_too(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "total = 0.0\n"
        "for index in loader:\n"
        "    total += step(model, optimizer, index)\n"
        "print(total / len(loader.dataset))\n"
    )

    def run(model, optimizer, loader, held_out):
        names = {"__name__": "__main__", "loader": loader, "step": step, "model": model}
        exec(compile(script.read_text(), str(script), "exec"), names | {"optimizer": optimizer})

    (text,) = said(run)
    assert text.startswith(f"{script}:4 divides by len(loader.dataset)")
