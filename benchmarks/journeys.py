"""Print the modules of nnlo that something passes: a gradient, a checkpoint, an option, a parameter.

    python benchmarks/journeys.py torch                   one exchanged gradient, on a worker and its server
    python benchmarks/journeys.py keras                   the same in Keras
    python benchmarks/journeys.py checkpoint              one saved state, on a worker and its server
    mpiexec -n 2 python benchmarks/journeys.py every      --every of `nnlo train`
    mpiexec -n 2 python benchmarks/journeys.py parameter  a trial's parameter, from sampler to objective

Of a gradient and a checkpoint: every module with a function that runs meanwhile. Of a value: every module
with a function that is called with it; one that is handed an object with the value in it does not count.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
STEPS, WATCHED = 6, 3
EVERY, PARAMETER = 7919, 0.123456789


class Passed:
    """Notes the modules whose functions run while it is on, or those whose functions are called with a value.

    Args:
        value: to look for among the arguments; None: note all calls while it is on.
    """

    def __init__(self, value: float | None = None) -> None:
        self.on, self.value = value is not None, value
        self.by_thread: dict[str, dict[str, None]] = {}

    def note(self, frame, event, _) -> None:
        """Note the module of a call."""
        name = frame.f_code.co_filename
        if not self.on or event != "call" or "/nnlo_" not in name:
            return
        if self.value is None or any(self._has(one) for one in [*frame.f_locals.values()]):
            here = self.by_thread.setdefault(threading.current_thread().name, {})
            here.setdefault(name[name.rindex("/nnlo_") + 1 :])

    def _has(self, argument: object) -> bool:
        """Whether an argument is the value, or a plain table or list of values with it."""
        if isinstance(argument, dict):
            return any(type(one) is type(self.value) and one == self.value for one in [*argument.values()])
        if isinstance(argument, list | tuple):
            return any(type(one) is type(self.value) and one == self.value for one in [*argument])
        return type(argument) is type(self.value) and argument == self.value


def small_torch(world):
    """Return a model of PyTorch, its wrapped optimizer, and a loader of its samples."""
    import torch

    import nnlo_torch as nt

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    data = torch.utils.data.TensorDataset(torch.ones(STEPS, 3), torch.ones(STEPS, 1))
    sampler = nt.ShardSampler(data, optimizer=optimizer)
    return model, optimizer, torch.utils.data.DataLoader(data, sampler=sampler)


def gradient_torch(world, passed):
    """An exchanged gradient."""
    from torch.nn.functional import mse_loss

    model, optimizer, loader = small_torch(world)
    for number, (x, y) in enumerate(loader):
        mse_loss(model(x), y).backward()
        passed.on = number == WATCHED
        optimizer.step()
        passed.on = False
        optimizer.zero_grad()
    optimizer.close()


def gradient_keras(world, passed):
    """An exchanged gradient in Keras."""
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


def checkpoint_torch(world, passed, folder):
    """One checkpoint, at the end of an epoch."""
    from torch.nn.functional import mse_loss

    import nnlo_torch as nt

    model, optimizer, loader = small_torch(world)
    checkpoint = nt.Checkpoint(folder, optimizer)
    for epoch in checkpoint.epochs(2):
        passed.on = False
        for x, y in checkpoint.batches(loader):
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        passed.on = epoch == 0
    optimizer.close()


def every_of_train():
    """`nnlo train --every`."""
    from nnlo_common.commands._cli import main

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(
            "import torch\n\ndef get_model():\n    return torch.nn.Linear(3, 2)\n"
        )
        for name, rows in (("train", 24), ("val", 6)):
            np.savez(
                Path(folder, f"{name}.npz"), features=np.ones((rows, 3), "f4"), labels=np.zeros(rows, int)
            )
        os.chdir(folder)
        words = "--loss cross_entropy --epochs 1 --batch 3 --mode downpour --learning-rate 0.1"
        out = f"run{os.environ.get('OMPI_COMM_WORLD_RANK', '')}"
        words += f" --model net.py --train train.npz --val val.npz --every {EVERY} --run {out}"
        main(["train", *words.split()])


def parameter_of_a_trial():
    """A parameter of a trial."""
    import optuna

    import nnlo_torch as nt

    optuna.logging.disable_default_handler()
    study = optuna.create_study()
    study.enqueue_trial({"x": PARAMETER})
    nt.optimize(study, lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=2)


def main():
    """Run what was asked for, and print the modules."""
    sys.path[:0] = [str(ROOT)]
    what = sys.argv[1]
    values = {"every": (EVERY, every_of_train), "parameter": (PARAMETER, parameter_of_a_trial)}
    if what in values:
        value, program = values[what]
        passed = Passed(value)
        threading.setprofile(passed.note)
        sys.setprofile(passed.note)
        program()
        sys.setprofile(None)
    else:
        from nnlo_common.testing import MemoryCluster

        passed = Passed()
        threading.setprofile(passed.note)
        programs = {"torch": gradient_torch, "keras": gradient_keras}
        with MemoryCluster(2) as cluster, tempfile.TemporaryDirectory() as folder:
            if what == "checkpoint":
                cluster.run(lambda world: checkpoint_torch(world, passed, folder))
            else:
                cluster.run(lambda world: programs[what](world, passed))
    every = set()
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "")
    for thread, modules in sorted(passed.by_thread.items()):
        listed = [one for one in modules if not one.startswith("nnlo_common/testing/")]
        print(f"{f'rank {rank} ' if rank else ''}{thread}: {len(listed)} modules", *listed, sep="\n  ")
        every.update(listed)
    print(f"{len(every)} modules in all", flush=True)


if __name__ == "__main__":
    main()
