"""Compare the weights of steps with what the loop itself counts, for loaders of every kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import BatchSampler, DataLoader

import nnlo_torch as nt

SIZE, BATCH = 23, 4


class Samples(torch.utils.data.Dataset):
    """Numbers, one by one or as a batch that was sampled as a list."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.as_tensor(index)


class Endless(BatchSampler):
    """A batch sampler of a user's, with batches of another size each time."""

    def __init__(self, sampler):
        super().__init__(sampler, 1, drop_last=False)

    def __iter__(self):
        batch, size = [], 1
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch, size = [], size % 3 + 1
        if batch:
            yield batch


def sampled(optimizer, assignment, **options):
    sampler = nt.ShardSampler(Samples(), optimizer=optimizer, assignment=assignment, unit=2)
    return DataLoader(Samples(), **{"batch_size": BATCH, "sampler": sampler, **options})


def dealt_batches(optimizer, assignment, **options):
    inner = BatchSampler(torch.utils.data.SequentialSampler(Samples()), BATCH, drop_last=False)
    sampler = nt.ShardSampler(inner, optimizer=optimizer, assignment=assignment, unit=1)
    return DataLoader(Samples(), batch_sampler=sampler, **options)


def unbatched(optimizer, assignment, **options):
    inner = BatchSampler(torch.utils.data.SequentialSampler(Samples()), BATCH, drop_last=False)
    sampler = nt.ShardSampler(inner, optimizer=optimizer, assignment=assignment, unit=1)
    return DataLoader(Samples(), batch_size=None, sampler=sampler, **options)


def own_batches(optimizer, assignment, **options):
    sampler = nt.ShardSampler(Samples(), optimizer=optimizer, assignment=assignment, unit=2)
    return DataLoader(Samples(), batch_sampler=Endless(sampler), **options)


def dropping_batches(optimizer, assignment, **options):
    sampler = nt.ShardSampler(Samples(), optimizer=optimizer, assignment=assignment, unit=2)
    return DataLoader(Samples(), batch_sampler=BatchSampler(sampler, BATCH, drop_last=True), **options)


#: Loaders, and what they are given besides.
LOADERS = {
    "samples": (sampled, {}),
    "drop_last": (sampled, {"drop_last": True}),
    "one by one": (sampled, {"batch_size": 1}),
    "dealt batches": (dealt_batches, {}),
    "unbatched": (unbatched, {}),
    "own batches": (own_batches, {}),
    "dropping batches": (dropping_batches, {}),
}
#: With processes only.
PROCESSES = {
    "persistent": (sampled, {"persistent_workers": True}),
    "persistent, drop_last": (sampled, {"persistent_workers": True, "drop_last": True}),
    "one ahead": (sampled, {"prefetch_factor": 1}),
    "all ahead": (sampled, {"prefetch_factor": 5, "persistent_workers": True}),
    "in any order": (sampled, {"in_order": False, "batch_size": 3}),
}


def every_batch(batches, note, step):
    for batch in batches:
        note(batch)
        step()


def every_second(batches, note, step):
    """Of an odd number of batches the last counts with the next epoch's first."""
    for number, batch in enumerate(batches):
        note(batch)
        if number % 2:
            step()


def rest_after(batches, note, step):
    """What is left of the epoch is a step after the loop."""
    count = 0
    for batch in batches:
        note(batch)
        count += 1
        if count == 2:
            step()
            count = 0
    if count:
        step()


def broken(batches, note, step):
    """The loop is left while the loader is ahead of it, after a batch that is stepped with after it."""
    for number, batch in enumerate(batches):
        note(batch)
        if number == 1:
            break
        step()
    step()


def broken_late(batches, note, step):
    """The sampler has been used up when the loop is left."""
    for number, batch in enumerate(batches):
        note(batch)
        step()
        if number == 3:
            break


def twice(batches, note, step):
    """A second step with the same batch, as in a GAN, weighs what the first did."""
    for batch in batches:
        note(batch)
        step()
        step()


LOOPS = [every_batch, every_second, rest_after, broken, broken_late, twice]


def noted_weights(optimizer):
    """The weights that steps are given from now on; what the others see of them is not changed."""
    weights, team = [], optimizer._team
    inner = team.step

    def step(weight, change_gradient):
        weights.append(weight)
        return inner(weight, change_gradient)

    team.step = step
    return weights


def compared(make, loop, *, world=None, assignment="static", through_epoch=False, **options):
    """The weights of all steps of three epochs, and the samples that the loop itself has counted."""
    model = torch.nn.Linear(2, 1)
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=world)
    loader = make(optimizer, assignment, **options)
    weights, expected, count, last = noted_weights(optimizer), [], 0, 1

    def note(batch):
        nonlocal count
        count += len(batch) if batch.ndim else 1

    def step():
        nonlocal count, last
        last, count = count or last, 0
        expected.append(last)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for _ in range(3):
        loop(
            optimizer.epoch(loader) if through_epoch else loader,
            note,
            lambda: None if optimizer.serves else step(),
        )
    serves = optimizer.serves
    optimizer.close()
    return None if serves else (weights, expected)


if __name__ == "__main__":
    found = {}
    for name, (make, options) in {**LOADERS, **PROCESSES}.items():
        for loop in LOOPS:
            found[f"{name}, {loop.__name__}"] = compared(make, loop, num_workers=2, **options)
    if any(found.values()):
        Path(sys.argv[1]).write_text(json.dumps(found))
