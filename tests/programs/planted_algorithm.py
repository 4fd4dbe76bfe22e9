"""Trainings with an algorithm in one new file of a copy of nnlo, which is the nnlo that is imported."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import json
import runpy
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import torch

import nnlo_common
import nnlo_keras
import nnlo_torch
from nnlo_common.commands._cli import main
from nnlo_common.testing import MemoryCluster, train_virtually

COPY = Path(nnlo_common.__file__).parent.parent
FEATURES, LABELS = np.random.default_rng(1).standard_normal((12, 2)).astype("f4"), np.ones((12, 1), "f4")


def refusal(make):
    """Return what is said of a value that cannot be."""
    try:
        make()
    except nnlo_common.ConfigurationError as error:
        return str(error)
    raise AssertionError("it was taken")


def by_torch(zeal):
    """Return the weights after a training of two ranks, and of each rank its role."""

    def program(world):
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = nnlo_torch.Tiller(sgd, zeal=zeal, model=model, world=world)
        for index in optimizer.epoch(torch.arange(4)[:, None]):
            optimizer.zero_grad()
            loss = (model(torch.tensor(FEATURES)) - torch.tensor(LABELS)).square().mean() + 0 * index.sum()
            loss.backward()
            optimizer.step()
        optimizer.close()
        return model.weight.detach().numpy().copy()

    with MemoryCluster(2) as cluster:
        return cluster.run(program, 60)


def by_keras(zeal):
    """Return the weights after a training of two ranks."""

    def program(world):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.set_weights([np.full((2, 1), 0.1), np.zeros(1)])
        model.compile(nnlo_keras.Tiller(keras.optimizers.SGD(0.1), zeal=zeal), "mse")
        callbacks = [nnlo_keras.Distribute(world=world)]
        data = nnlo_keras.shard(FEATURES, LABELS, world=world)
        model.fit(*data, epochs=2, batch_size=4, shuffle=False, callbacks=callbacks, verbose=0)
        return model.get_weights()[0]

    with MemoryCluster(2) as cluster:
        return cluster.run(program, 60)


def examples(thing):
    """Return how many examples in its docstring run, and how many fail."""
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs={}):
        runner.run(test)
    return runner.tries, runner.failures


def command(*words):
    """Return what `nnlo train` prints, and its exit status."""
    said, status = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(["train", *words])
        except SystemExit as ended:
            status = ended.code
    return said.getvalue(), status


def by_command():
    """Train by `nnlo train --mode`, in the folder where this runs."""
    with h5py.File("a.h5", "w") as file:
        file["features"], file["labels"] = FEATURES, LABELS
    text = "import torch\ndef get_model():\n    return torch.nn.Linear(2, 1)\n"
    Path("net.py").write_text(text)
    asked = ["--model", "net.py", "--train", "a.h5", "--loss", "mse_loss", "--mode", "tiller"]
    said, status = command(*asked, "--zeal", "0.5", "--run", "done")
    assert status == 0, said
    assert "zeal = 0.5" in Path("done/config.toml").read_text()
    wrong, status = command(*asked, "--zeal", "3")
    assert status == 2
    return wrong


def look():
    """Return what a test asks for."""
    packages = (nnlo_common, nnlo_common.algorithms, nnlo_torch, nnlo_keras)
    virtual = train_virtually(
        nnlo_common.Tiller(zeal=0.5),
        lambda x, rank: x,
        [1.0],
        workers=1,
        steps=2,
        optimizer=nnlo_common.SGD(1.0),
    )
    torch_still, torch_moved = by_torch(0.0), by_torch(1.0)
    keras_still, keras_moved = by_keras(0.0), by_keras(1.0)
    generated = runpy.run_path(str(COPY / ".ci" / "generated.py"))["generated"]()
    wrappers = [(package, name) for package in (nnlo_torch, nnlo_keras) for name in ("Tiller", "DynSGD")]
    return {
        "at": str(COPY),
        "public": [("Tiller" in one.__all__, one.Tiller.__module__) for one in packages],
        "virtual": virtual.center.tolist(),
        "torch": [bool((torch_moved[rank] != torch_still[rank]).any()) for rank in (0, 1)],
        "keras": [bool((keras_moved[rank] != keras_still[rank]).any()) for rank in (0, 1)],
        "same": bool((torch_moved[0] == torch_moved[1]).all() and (keras_moved[0] == keras_moved[1]).all()),
        "refused": refusal(lambda: nnlo_common.Tiller(zeal=3)),
        "command": by_command(),
        "help": command("--help")[0],
        "signatures": [str(inspect.signature(getattr(one, name).__init__)) for one, name in wrappers],
        "examples": [examples(nnlo_torch.Tiller), examples(nnlo_keras.Tiller)],
        "docs": [nnlo_torch.Tiller.__doc__, nnlo_torch.Tiller.__init__.__doc__],
        "saved": keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(nnlo_keras.Tiller(keras.optimizers.SGD(0.1), zeal=0.25))
        ).get_config()["zeal"],
        "generated": generated,
    }


if __name__ == "__main__":
    nnlo_keras._wrapper.launched = lambda: "several ranks"  # as under a launcher, where optimizers are built
    Path(sys.argv[1]).write_text(json.dumps(look()))
