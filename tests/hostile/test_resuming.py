"""Consistent checkpoints with states that no training has: each is named, and the one before is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.training.checkpoint import Entry, Manifest, Store, packed_tree, unpacked_tree
from nnlo_common.training.checkpoint._manifest import MANIFEST

os.environ.setdefault("KERAS_BACKEND", "torch")
torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras  # noqa: E402
import nnlo_torch  # noqa: E402
from nnlo_torch._checkpoint import packed, unpacked  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.framework("torch"),
    pytest.mark.framework("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

Change = Callable[[dict[str, Any], dict[str, Any]], object]


def with_torch(folder: Path, epochs: int = 3) -> np.ndarray:
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = nnlo_torch.Downpour(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    data = torch.arange(16.0).reshape(8, 2) / 8
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=nnlo_torch.ShardSampler(data))
    checkpoint = nnlo_torch.Checkpoint(folder, optimizer, keep=5)
    for _ in checkpoint.epochs(epochs):
        for x in checkpoint.batches(loader):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def with_keras(folder: Path, epochs: int = 3) -> np.ndarray:
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(nnlo_keras.Downpour(keras.optimizers.Adam(0.1)), "mse")
    x = np.arange(16.0, dtype="f4").reshape(8, 2) / 8
    model.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=epochs,
        callbacks=[nnlo_keras.Checkpoint(folder, keep=5)],
        verbose=0,
    )
    return np.concatenate([one.ravel() for one in model.get_weights()])


def planted(folder: Path, file: str, data: bytes, facts: Any) -> None:
    """Replace the state of a checkpoint, with correct checksums."""
    old = Manifest.read((folder / MANIFEST).read_bytes())
    (folder / file).write_bytes(data)
    new = Manifest(number=old.number, files={file: Entry.of(data)}, facts=facts, score=old.score)
    (folder / MANIFEST).write_bytes(new.written())


def change_newest(folder: Path, change: Change) -> None:
    """Change the tree and the facts of the newest checkpoint in place."""
    newest = Store(folder).newest()
    assert newest is not None
    (file,) = newest.manifest.files
    read, write = (unpacked, packed) if file.endswith(".pt") else (unpacked_tree, packed_tree)
    tree, facts = read(newest.read(file)), dict(newest.manifest.facts)
    change(tree, facts)
    planted(newest.folder, file, write(tree), facts)


def put(*path: Any, value: Any) -> Change:
    """Return a change that exchanges a part of the tree."""

    def change(tree: dict[str, Any], _: dict[str, Any]) -> None:
        part: Any = tree
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value

    return change


def facts(**values: Any) -> Change:
    """Return a change of the facts."""
    return lambda _, there: there.update(values)


def nan(*path: Any) -> Change:
    """Return a change that makes a weight NaN."""

    def change(tree: dict[str, Any], _: dict[str, Any]) -> None:
        array: Any = tree
        for name in path:
            array = array[name]
        array.reshape(-1)[0] = float("nan")

    return change


BOTH: dict[str, Change] = {
    "no facts of an epoch": facts(epoch=None),
    "a negative epoch": facts(epoch=-1),
    "a billion epochs": facts(epoch=10**9),
    "workers as text": facts(workers="0"),
    "no algorithm": facts(algorithm=None),
    "a data set of text": facts(data="x"),
    "samples before the first": facts(data={"samples": -1}),
    "columns of numbers": facts(data={"columns": [1]}),
    "a place beyond the random numbers": put("random", "numpy", 2, value=10**9),
    "random numbers of text": put("random", "python", value="123"),
    "nothing": lambda tree, _: tree.clear(),
    "a list for the random states": put("random", value=[1]),
}
OF_TORCH: dict[str, Change] = {
    **BOTH,
    "a position before the start": put("position", 0, value=-5),
    "a position far beyond the end": put("position", 0, value=10**9),
    "a batch far beyond the end": put("position", 1, value=10**9),
    "another position than in the manifest": put("position", 0, value=2),
    "half a position": put("position", value=[3]),
    "NaN weights": nan("modules", 0, "0.weight"),
    "weights of text": put("modules", 0, "0.weight", value="1"),
    "weights of another shape": put("modules", 0, "0.weight", value=torch.zeros(7)),
    "no modules": put("modules", value=None),
    "an optimizer without groups": put("optimizer", value={"state": {}, "param_groups": []}),
    "an optimizer of text": put("optimizer", value="Adam"),
    "counts of nothing": put("counts", value=[None, None, None]),
    "a sampler before the start": put("sampler", "taken", value=-3),
    "a sampler of text": put("sampler", value="sampler"),
    "a lease of text": put("sampler", "lease", value="abc"),
    "a lease before the start": put("sampler", "lease", value=[0, -1, 5]),
    "the generator of torch as text": put("random", "torch", value="x"),
}
OF_KERAS: dict[str, Change] = {
    **BOTH,
    "a position before the start": put("position", "batch", value=-5),
    "a batch far beyond the end": put("position", "batch", value=10**9),
    "an end of text": facts(stopped="3"),
    "half a position": put("position", value={"batch": 0}),
    "NaN weights": nan("variables", 0),
    "no weights": put("variables", value=None),
    "an optimizer of text": put("optimizers", value="Adam"),
    "rates of nothing": put("rates", value=None),
    "callbacks of nothing": put("callbacks", value=None),
    "a callback's method": put("callbacks", "seen", value=[{"on_epoch_end": None}]),
    "data of text": put("data", value="data"),
    "exchanges of nothing": put("distribute", value={}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Path, np.ndarray]]:
    """Return folders with three checkpoints, and the weights at the end."""
    folders = {train: tmp_path_factory.mktemp("run") for train in (with_torch, with_keras)}
    return {train: (folder, train(folder)) for train, folder in folders.items()}


def copied(folder: Path, into: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, into / "run"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("train", "change"),
    [
        *(pytest.param(with_torch, one, id=f"torch, {name}") for name, one in OF_TORCH.items()),
        *(pytest.param(with_keras, one, id=f"keras, {name}") for name, one in OF_KERAS.items()),
    ],
)
def test_the_checkpoint_before_is_resumed_from(
    tmp_path: Path, trained: dict[Any, tuple[Path, np.ndarray]], train: Any, change: Change
) -> None:
    folder, weights = copied(trained[train][0], tmp_path), trained[train][1]
    change_newest(folder, change)
    with pytest.warns(
        RuntimeWarning, match=r"checkpoint-000003 is damaged: .*; resuming from checkpoint-000002"
    ):
        again = train(folder)
    assert np.array_equal(again, weights)


@pytest.mark.parametrize("train", [with_torch, with_keras])
def test_bytes_that_are_no_state_are_passed_over(
    tmp_path: Path, trained: dict[Any, tuple[Path, np.ndarray]], train: Any
) -> None:
    folder, weights = copied(trained[train][0], tmp_path), trained[train][1]
    for number, data in (
        (3, b"\x80\x04."),
        (2, packed({"a": 1}) if train is with_torch else packed_tree({})),
    ):
        there = folder / f"checkpoint-{number:06d}"
        manifest = Manifest.read((there / MANIFEST).read_bytes())
        planted(there, *manifest.files, data, manifest.facts)
    with pytest.warns(RuntimeWarning, match="checkpoint-000003 is damaged.*checkpoint-000002 is damaged"):
        again = train(folder)
    assert np.array_equal(again, weights)


@pytest.mark.parametrize("train", [with_torch, with_keras])
def test_where_no_state_is_usable_all_are_named(
    tmp_path: Path, trained: dict[Any, tuple[Path, np.ndarray]], train: Any
) -> None:
    folder = copied(trained[train][0], tmp_path)
    for there in folder.glob("checkpoint-*"):
        manifest = Manifest.read((there / MANIFEST).read_bytes())
        planted(there, *manifest.files, packed_tree({}), {**manifest.facts, "epoch": None})
    with pytest.raises(ConfigurationError, match="all its checkpoints are damaged") as caught:
        train(folder)
    assert str(caught.value).count("epoch in its facts is None, not a count") == 3


@pytest.mark.parametrize("model", ["[" * 100_000, "[]", '{"segments": [{}]}', '{"size": 9}', 7, None])
def test_a_model_that_cannot_be_compared_is_another(
    tmp_path: Path, trained: dict[Any, tuple[Path, np.ndarray]], model: Any
) -> None:
    folder = copied(trained[with_torch][0], tmp_path)
    change_newest(folder, facts(model=model))
    with pytest.raises(ConfigurationError, match="the model is another one: it cannot be compared"):
        with_torch(folder)


def test_what_a_manifest_says_does_not_control_the_terminal(
    tmp_path: Path, trained: dict[Any, tuple[Path, np.ndarray]]
) -> None:
    folder = copied(trained[with_torch][0], tmp_path)
    change_newest(folder, facts(optimizer="\x1b[2J" + "x" * 5000))
    with pytest.raises(ConfigurationError, match=r"the optimizer is \?\[2Jx{996} there, but Adam here"):
        with_torch(folder)


def test_many_workers_in_the_facts_are_not_counted_one_by_one(
    tmp_path: Path, trained: dict[Any, tuple[Path, np.ndarray]]
) -> None:
    folder = copied(trained[with_torch][0], tmp_path)
    change_newest(folder, facts(workers=10**18))
    with pytest.warns(RuntimeWarning, match="workers in its facts is 1000000000000000000, not a count"):
        with_torch(folder)
