"""Ways to add up the gradients of a group in torch, also while a backward pass still runs."""

from __future__ import annotations

import importlib.util

import pytest

from nnlo_common import ConfigurationError
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from nnlo_common.plugin import GroupRank  # noqa: E402
from nnlo_torch._flat_model import FlatModel  # noqa: E402
from nnlo_torch._group_gradients import Buckets  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.torch.test_groups import backward, close, flat, train, train_large, wrapped  # noqa: E402

pytestmark = pytest.mark.framework("torch")

WAYS = ["mpi", "shared", "thread", "torch"]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr("nnlo_torch._group_gradients._SIZE", 20)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_group_is_one_rank_with_the_large_batch(way, servers):
    options = {"servers": servers, "group_size": 3, "all_reduce": way}
    found = on_ranks(servers + 3, lambda world: train(world, **options))
    expected = on_ranks(servers + 1, lambda world: train_large(world, k=3, servers=max(servers, 1)))
    for vector, _ in found[servers:]:
        assert close(vector, expected[-1])
        assert torch.equal(vector, found[-1][0])


@pytest.mark.parametrize("way", ["thread", "torch"])
def test_batches_of_unequal_sizes_and_several_backward_passes(way):
    def program(world, parts, servers, **options):
        model, optimizer = wrapped(world, "Synchronous", servers=servers, **options)
        for step in optimizer.epoch(range(3), samples=lambda step: 1):
            optimizer.zero_grad()
            for number, rows in enumerate(parts(step)):
                optimizer.weight = float(len(rows))
                if number == 1:  # a third pass adds to what this one leaves apart
                    with optimizer.no_sync():
                        backward(model, rows)
                else:
                    backward(model, rows)
            optimizer.step()
        optimizer.close()
        return flat(model)

    def mine(rank):
        cuts = ((0, 3), (3, 8)), ((8, 9), (9, 14)), ((14, 16), (16, 19))
        return lambda step: [torch.arange(*cut[rank]) + 19 * step for cut in cuts]

    found = on_ranks(2, lambda world: program(world, mine(world.rank), 0, all_reduce=way))
    plainly = on_ranks(2, lambda world: program(world, mine(world.rank), 0, all_reduce="mpi"))
    assert torch.equal(*found)
    assert close(found[0], plainly[0])


@pytest.mark.parametrize("way", ["thread", "torch"])
def test_parameters_that_are_unfrozen_and_frozen_later_are_added_up_like_the_others(way):
    """As in fine-tuning: the head first, then all, then all but the head."""

    def program(world, **options):
        model = cases.model_of()
        *body, head = [part for part in model.modules() if not [*part.children()] and [*part.parameters()]]
        for part in body:
            part.requires_grad_(False)
        optimizer = nt.Synchronous(
            torch.optim.SGD(model.parameters(), lr=0.05), model=model, world=world, servers=0, **options
        )
        for step in optimizer.epoch(range(6), samples=lambda step: 1):
            if step in (2, 4):
                for part in body:
                    part.requires_grad_(True)
                head.requires_grad_(step == 2)
            optimizer.zero_grad()
            backward(model, torch.arange(4) + 8 * step + 4 * world.rank)
            largest = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert torch.isfinite(largest)
            optimizer.step()
        optimizer.close()
        return flat(model)

    found = on_ranks(2, lambda world: program(world, all_reduce=way))
    plainly = on_ranks(2, lambda world: program(world, all_reduce="mpi"))
    assert torch.equal(*found)
    assert close(found[0], plainly[0])


class Noting:
    """A reducer of a group of one, which notes when sums begin."""

    name, overlaps = "noting", True

    def __init__(self, notes):
        self.notes = notes

    def fit(self, layout):
        pass

    def start(self, part, at=0):
        self.notes.append(f"start {part.size}")

    def finish(self):
        self.notes.append("finish")


class OneRank:
    index, ranks = 0, (0,)

    def gather(self, numbers):
        return numbers[None]


def test_sums_begin_in_one_order_as_soon_as_the_gradients_before_them_are_there():
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3, bias=False) for _ in range(4)])
    flat_model, notes = FlatModel([*model.named_parameters()], catches=False), []
    buckets = Buckets(GroupRank(OneRank(), lambda group: Noting(notes)), flat_model, size=16)
    buckets.begin(1, 1)
    model(torch.ones(2, 3)).square().sum().backward()
    for index in (0, 1, 3, 2):
        notes.append(index)
        buckets.notice(index)
    buckets.finish()
    assert notes == [0, 1, 3, "start 16", 2, "start 16", "start 16", "start 16", "finish"]
    for view, parameter in zip(flat_model.gradient_views, model.parameters(), strict=True):
        assert torch.equal(view, parameter.grad)


def test_a_backward_pass_that_failed_is_not_mixed_with_the_next():
    def program(world):
        model, optimizer = wrapped(world, "Synchronous", servers=0, all_reduce="thread")
        last = next(iter(model.parameters()))
        for _ in optimizer.epoch(range(1)):
            optimizer.zero_grad()
            handle = last.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backward(model, torch.arange(4))
            handle.remove()
            backward(model, torch.arange(4))

    with pytest.raises(ConfigurationError, match="has changed while it was being added up"):
        on_ranks(2, program)


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_horovod_is_refused_where_it_is_not_installed():
    with pytest.raises(ConfigurationError, match=r"Horovod, which is not installed here; docs/pytorch\.md"):
        wrapped(None, servers=0, all_reduce="horovod")


def test_ways_without_groups_are_refused_and_the_choice_can_be_read():
    with pytest.raises(ConfigurationError, match="Downpour: all_reduce='torch' was given, but there are no"):
        wrapped(None, all_reduce="torch")

    def program(world):
        _, optimizer = wrapped(world, servers=0)
        optimizer.close()
        return optimizer.all_reduce

    assert on_ranks(2, program) == ["mpi"] * 2
    assert nt.Downpour(torch.optim.SGD(cases.model_of().parameters(), lr=0.1)).all_reduce == ""


@pytest.mark.parametrize(("servers", "name"), [(0, "Synchronous"), (1, "EASGD")])
def test_a_weight_changed_on_one_rank_is_named_when_the_epoch_ends(servers, name):
    def change(world, model, seen):
        seen.append(1)
        if world.rank == servers + 1 and len(seen) == 3:
            with torch.no_grad():
                next(iter(model.parameters())).add_(1)

    def program(world):
        seen = []
        options = {"servers": servers, "group_size": 2, "every": 100} if servers else {"servers": 0}
        return train(world, name, before_step=lambda model: change(world, model, seen), **options)

    text = f"parameters of rank {servers + 1} differ from those of rank {servers} of the same group after 7"
    with pytest.raises(ConfigurationError, match=text):
        on_ranks(servers + 2, program)


@pytest.mark.parametrize("way", ["mpi", "thread"])
def test_a_gradient_that_is_not_finite_is_named_unless_the_step_is_skipped(way):
    def program(world, *, skips):
        model, optimizer = wrapped(world, "Synchronous", servers=0, all_reduce=way)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=skips)
        for step in optimizer.epoch(range(3)):
            optimizer.zero_grad()
            factor = float("inf") if (step, world.rank) == (1, 1) else 1.0
            loss = model(cases.data()[0][step : step + 4]).square().mean()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.close()
        return flat(model)

    first, second = on_ranks(2, lambda world: program(world, skips=True))  # a warning would be an error
    assert torch.equal(first, second)
    assert first.isfinite().all()
    with pytest.warns(RuntimeWarning, match="rank 1 is not finite .* in step 2, so") as seen:
        on_ranks(2, lambda world: program(world, skips=False))
    assert len(seen) == 1
