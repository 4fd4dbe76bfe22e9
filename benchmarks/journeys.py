"""Print the modules of nnlo that one exchanged gradient passes, on a worker and on its server.

python benchmarks/journeys.py torch
python benchmarks/journeys.py keras
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
STEPS, WATCHED = 6, 3


class Passed:
    """Notes the modules whose functions run, by thread, while it is on."""

    def __init__(self):
        self.on, self.by_thread = False, {}

    def note(self, frame, *_):
        """Note the module of a call."""
        name = frame.f_code.co_filename
        if self.on and "/nnlo_" in name:
            here = self.by_thread.setdefault(threading.current_thread().name, {})
            here.setdefault(name[name.index("/nnlo_") + 1 :])


def torch_program(world, passed):
    import torch

    import nnlo_torch as nt

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    data = torch.utils.data.TensorDataset(torch.ones(STEPS, 3), torch.ones(STEPS, 1))
    sampler = nt.ShardSampler(data, optimizer=optimizer)
    for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, sampler=sampler)):
        torch.nn.functional.mse_loss(model(x), y).backward()
        passed.on = number == WATCHED
        optimizer.step()
        passed.on = False
        optimizer.zero_grad()
    optimizer.close()


def keras_program(world, passed):
    import keras

    import nnlo_keras as nk
    from nnlo_common.training._joining import within

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002 - as of Keras
            passed.on = batch == WATCHED and world.rank == 1

    with within(world):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer=nk.Downpour(keras.optimizers.SGD(0.1)), loss="mse")
        x, y = nk.shard(np.ones((STEPS, 3), "f4"), np.ones((STEPS, 1), "f4"), world=world)
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[nk.Distribute(world=world), Watch()])


def main():
    sys.path[:0] = [str(ROOT)]
    from nnlo_common.testing import MemoryCluster

    passed = Passed()
    program = {"torch": torch_program, "keras": keras_program}[sys.argv[1]]
    threading.setprofile(passed.note)
    with MemoryCluster(2) as cluster:
        cluster.run(lambda world: program(world, passed))
    every = set()
    for thread, modules in sorted(passed.by_thread.items()):
        listed = [one for one in modules if not one.startswith("nnlo_common/testing/")]
        print(f"{thread}: {len(listed)} modules", *listed, sep="\n  ")
        every.update(listed)
    print(f"{len(every)} modules in all")


if __name__ == "__main__":
    main()
