"""`torch.save` in a script on several ranks: a worker that writes what all write is named once."""

from __future__ import annotations

import functools
import inspect
import io
import tempfile
import warnings
from pathlib import Path

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.base import _errors

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _compat  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import collect, on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch):
    monkeypatch.setattr(_errors, "_SHOWN", {})


@pytest.fixture
def path(tmp_path):
    """Where the scripts save; the names of a test's folder may have any number."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "model.pt"


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """A failed training of another test may still be open, and watch."""
    monkeypatch.setattr(_compat, "_saves", _compat._Saves())
    monkeypatch.setattr(torch, "save", inspect.unwrap(torch.save))
    before = torch.save
    yield
    assert torch.save is before


def said(save, *, size=3, **options):
    """The warnings of a training that saves after each epoch."""

    def program(world):
        model = cases.model_of()
        optimizer = nt.Downpour(
            torch.optim.SGD(model.parameters(), lr=0.05), world=world, model=model, **options
        )
        for _ in range(2):
            for index in optimizer.epoch(range(4)):
                optimizer.zero_grad()
                cases.loss_of(model, X[6 * index :][:6], Y[6 * index :][:6]).backward()
                optimizer.step()
            save(model, optimizer)
        optimizer.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        on_ranks(size, program) if size > 1 else program(None)
    return [str(one.message) for one in caught]


def to_a_name(path, model, optimizer):
    torch.save(model.state_dict(), str(path))


def by_keyword(path, model, optimizer):
    torch.save(obj=model.state_dict(), f=path)


def to_a_file(path, model, optimizer):
    with path.open("wb") as file:
        torch.save(model.state_dict(), file)


def inside_center_weights(path, model, optimizer):
    with optimizer.center_weights():
        torch.save(model.state_dict(), path)


def to_another_file_each_time(path, model, optimizer):
    torch.save(model.state_dict(), path.with_stem(f"after {1000 + optimizer.report().steps} steps"))


SAVES = [to_a_name, by_keyword, to_a_file, inside_center_weights, to_another_file_each_time]


@pytest.mark.parametrize("save", SAVES)
def test_a_file_that_all_ranks_write_is_named_once(path, save):
    (text,) = said(functools.partial(save, path))
    assert text.startswith(f"rank 1 writes {path.parent}")
    assert "it is a worker" in text
    assert 'optimizer.save(model.state_dict(), "model.pt")' in text


def by_the_wrapper(path, model, optimizer):
    optimizer.save(model.state_dict(), path)


def in_memory(path, model, optimizer):
    torch.save(model.state_dict(), io.BytesIO())


def for_itself(path, model, optimizer):
    torch.save(model.state_dict(), path.with_stem(f"model of {optimizer.rank:03}"))


def in_a_folder_for_itself(path, model, optimizer):
    folder = path.with_name(f"rank{optimizer.rank}")
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / path.name)


def named_after_the_worker(path, model, optimizer):
    torch.save(model.state_dict(), path.with_stem(optimizer.role))


def by_the_server(path, model, optimizer):
    if optimizer.serves:
        torch.save(model.state_dict(), path)


def to_a_temporary_file(path, model, optimizer):
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:
        torch.save(model.state_dict(), file)


def after_the_training(path, model, optimizer):
    optimizer.close()
    torch.save(model.state_dict(), path)


RIGHT = [by_the_wrapper, in_memory, for_itself, in_a_folder_for_itself, named_after_the_worker]


@pytest.mark.parametrize("save", [*RIGHT, by_the_server, to_a_temporary_file])
def test_what_no_other_rank_writes_is_not(path, save):
    assert said(functools.partial(save, path)) == []


def test_alone_every_file_is_its_own(path):
    assert said(functools.partial(to_a_name, path), size=1) == []


def test_with_several_servers_each_has_the_whole_centre_between_epochs(path):
    assert said(functools.partial(by_the_server, path), size=4, servers=2) == []


def test_a_library_that_chooses_the_rank_by_itself_is_left_alone(path):
    code = "def save(path, model, optimizer):\n    torch.save(model.state_dict(), path)"
    for package, count in (("lightning.fabric.utilities", 0), ("transformers.trainer", 0), ("fastai", 1)):
        names = {"__name__": package, "torch": torch}
        exec(code, names)
        assert len(said(functools.partial(names["save"], path))) == count, package


def trained(world, save=lambda model, optimizer: None):
    model = cases.model_of()
    optimizer = nt.EASGD(torch.optim.SGD(model.parameters(), lr=0.05), world=world, model=model)
    for index in optimizer.epoch(range(2)):
        optimizer.zero_grad()
        cases.loss_of(model, X[6 * index :][:6], Y[6 * index :][:6]).backward()
        optimizer.step()
    save(model, optimizer)
    optimizer.close()


def test_it_is_an_ordinary_function_while_a_training_is_open():
    before, seen = torch.save, []

    def look(model, optimizer):
        if optimizer.share[0] == 0:
            seen.append((torch.save.__name__, torch.save.__doc__, inspect.signature(torch.save)))
            assert torch.save is not before

    on_ranks(2, lambda world: trained(world, look))
    assert seen == [(before.__name__, before.__doc__, inspect.signature(before))]


def test_once_the_training_is_over_nothing_is_said(path):
    def program(world):
        trained(world)
        torch.save([1.0], path)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, program)


def test_each_training_is_watched_by_itself(path):
    """The second one is warned of though the first was closed before."""

    def program(world):
        for name in ("first.pt", "second.pt"):
            trained(world, functools.partial(to_a_name, path.with_name(name)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        on_ranks(2, program)
    names = [Path(str(one.message).split()[3]).name for one in caught]
    assert names == ["first.pt", "second.pt"]


def test_what_replaces_it_meanwhile_stays_and_still_saves(path, monkeypatch):
    calls = []

    def replace(model, optimizer):
        if optimizer.share[0] == 0:
            beneath = torch.save

            def another(*args):
                calls.append(len(args))
                return beneath(*args)

            monkeypatch.setattr(torch, "save", another)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, lambda world: trained(world, replace))
        torch.save([1.0], path)
    assert calls == [2]
    assert torch.load(path, weights_only=True) == [1.0]
    (text,) = said(functools.partial(to_a_name, path))
    assert text.startswith("rank 1 writes")
    monkeypatch.undo()  # what was beneath the other one passes calls on
    torch.save([2.0], path)
    assert torch.load(path, weights_only=True) == [2.0]
    torch.save = inspect.unwrap(torch.save)


def test_a_training_that_has_failed_is_not_watched_any_more(path):
    def fail(model, optimizer):
        raise ConfigurationError("no more")

    with pytest.raises(ConfigurationError, match="no more"):
        on_ranks(2, lambda world: trained(world, fail))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save([1.0], path)
    collect()  # the training, which then restores it
