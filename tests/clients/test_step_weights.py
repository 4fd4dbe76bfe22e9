"""A step weighs the samples of its own batches, though accelerate and Lightning take one more ahead."""

from __future__ import annotations

import pytest
from accelerate.data_loader import prepare_data_loader
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

import nnlo_torch as nt
from nnlo_torch._foreign_loops import EpochBatches
from tests.helpers.threads import on_ranks
from tests.programs import torch_weights as cases

#: accelerate takes no sampler over from a loader whose batch_size is None.
LOADERS = sorted(cases.LOADERS.keys() - {"unbatched"})


@pytest.mark.parametrize("loop", cases.LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("name", LOADERS)
def test_a_step_weighs_the_samples_that_the_loop_has_got(name, loop):
    make, options = cases.LOADERS[name]

    def program(world):
        def prepared(optimizer, assignment):
            return prepare_data_loader(
                make(optimizer, assignment, **options), num_processes=1, process_index=0, put_on_device=False
            )

        return cases.compared(prepared, loop, world=world)

    _, (weights, expected) = on_ranks(2, program)
    assert weights == expected
    assert len(weights) >= 3


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # Lightning 2.6 with torch 2.13
@pytest.mark.parametrize("loop", [cases.every_batch, cases.twice], ids=lambda loop: loop.__name__)
def test_a_step_of_lightning_over_an_iterable_weighs_its_batch(loop):
    class Fetched:
        """The batches of each loop as Lightning's Trainer takes them."""

        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            fetcher = _PrefetchDataFetcher()
            fetcher.setup(CombinedLoader(self.batches))
            return (batch for batch, *_ in fetcher)

    def program(world):
        def make(optimizer, assignment):
            data = nt.ShardIterable([*range(cases.SIZE)], optimizer=optimizer)
            return Fetched(EpochBatches(optimizer, DataLoader(data, batch_size=cases.BATCH)))

        return cases.compared(make, loop, world=world)

    _, (weights, expected) = on_ranks(2, program)
    assert weights == expected
    assert len(set(weights)) == 2
