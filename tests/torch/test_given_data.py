"""`optimizer.epoch` over a loader that gives all workers the same data is named once."""

from __future__ import annotations

import warnings

import pytest

from nnlo_common.base import _errors

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch):
    monkeypatch.setattr(_errors, "_SHOWN", {})


def said(batches_of, *, size=3, wrapper=nt.Downpour, **options):
    """The warnings of two epochs over what each rank is given."""

    def program(world):
        model = cases.model_of()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = wrapper(inner, world=world, model=model, **options)
        batches = batches_of(optimizer)
        for _ in range(2):
            for x, y in optimizer.epoch(batches):
                optimizer.zero_grad()
                cases.loss_of(model, x, y).backward()
                optimizer.step()
        steps = optimizer.report().steps
        optimizer.close()
        return steps

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = on_ranks(size, program) if size > 1 else [program(None)]
    assert steps[-1] > 0
    return [str(one.message) for one in caught]


class Held(Dataset):
    """A map-style data set of one's own."""

    def __init__(self, x, y):
        self.x, self.y = x.numpy(), y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def in_order(optimizer):
    return DataLoader(TensorDataset(X, Y), batch_size=6)


def shuffled(optimizer):
    return DataLoader(Held(X, Y), batch_size=6, shuffle=True, drop_last=True)


def of_pairs(optimizer):
    return DataLoader([*zip(X, Y, strict=True)], batch_size=6)


def equal_subsets(optimizer):
    return DataLoader(Subset(TensorDataset(X, Y), range(0, 60, 2)), batch_size=6)


@pytest.mark.parametrize("given", [in_order, shuffled, of_pairs, equal_subsets])
@pytest.mark.parametrize("size", [3, 4])
def test_the_same_data_on_all_workers_are_named_once(given, size):
    (text,) = said(given, size=size)
    assert f"on all {size - 1} workers" in text
    assert f"an epoch has each {size - 1} times" in text
    assert "DataLoader(data, sampler=nnlo_torch.ShardSampler(data))" in text


@pytest.mark.parametrize(("wrapper", "options"), [(nt.Synchronous, {}), (nt.Downpour, {"lag": 1})])
def test_they_are_with_any_algorithm(wrapper, options):
    assert len(said(in_order, wrapper=wrapper, **options)) == 1


def a_share(optimizer):
    worker, workers = optimizer.share
    return DataLoader(TensorDataset(X[worker::workers], Y[worker::workers]), batch_size=6)


def a_subset(optimizer):
    worker, workers = optimizer.share
    return DataLoader(Subset(TensorDataset(X, Y), range(max(worker, 0), 60, workers)), batch_size=6)


def a_random_split(optimizer):
    parts = torch.utils.data.random_split(TensorDataset(X, Y), [0.5, 0.5], torch.Generator().manual_seed(0))
    return DataLoader(parts[max(optimizer.share[0], 0)], batch_size=6)


def by_a_sampler_of_its_own(optimizer):
    worker, workers = optimizer.share
    sampler = SubsetRandomSampler(range(max(worker, 0), 60, workers))
    return DataLoader(TensorDataset(X, Y), batch_size=6, sampler=sampler)


def by_batches_of_its_own(optimizer):
    worker = max(optimizer.share[0], 0)
    batches = [[*range(6 * one, 6 * one + 6)] for one in range(worker, 10, 2)]
    return DataLoader(TensorDataset(X, Y), batch_sampler=batches)


def some_at_random(optimizer):
    data = TensorDataset(X, Y)
    return DataLoader(data, batch_size=6, sampler=RandomSampler(data, num_samples=30))


def by_a_shard_sampler(optimizer):
    data = TensorDataset(X, Y)
    return DataLoader(data, batch_size=6, sampler=nt.ShardSampler(data, optimizer=optimizer))


class Stream(IterableDataset):
    def __init__(self):
        self.x, self.y = X, Y

    def __iter__(self):
        return zip(self.x, self.y, strict=True)


def a_stream(optimizer):
    return DataLoader(Stream(), batch_size=6)


def batches_made_here(optimizer):
    return [(X[:6], Y[:6])] * 2


class Unseen(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return X[index], Y[index]


def what_cannot_be_seen(optimizer):
    return DataLoader(Unseen(), batch_size=6)


def unequal_kinds(optimizer):
    return in_order(optimizer) if optimizer.share[0] == 0 else batches_made_here(optimizer)


RIGHT = [a_share, a_subset, a_random_split, by_a_sampler_of_its_own, by_batches_of_its_own, some_at_random]
UNKNOWN = [by_a_shard_sampler, a_stream, batches_made_here, what_cannot_be_seen, unequal_kinds]


@pytest.mark.parametrize("given", [*RIGHT, *UNKNOWN])
def test_data_that_are_shared_or_unknown_are_not(given):
    assert said(given) == []


@pytest.mark.parametrize("size", [1, 2])
def test_one_worker_has_all_data(size):
    assert said(in_order, size=size) == []
