"""A step weighs the samples of its own batches, though accelerate's loader takes one more ahead."""

from __future__ import annotations

import pytest
from accelerate.data_loader import prepare_data_loader

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
