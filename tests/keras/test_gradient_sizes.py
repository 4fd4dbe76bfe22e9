"""`Report(gradients=N)` in Keras: how large the values of the gradients are that ranks send."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.commands.report._run_reader import read_run  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
X = np.linspace(-1, 2, 40 * 3, dtype="f4").reshape(-1, 3)
Y = (X @ [[1e-3], [0.1], [10.0]]).astype("f4")


def train(folder, world=None, every=2, algorithm=nk.Downpour, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    model.compile(algorithm(keras.optimizers.SGD(1e-3), **options), "mse")
    begin = [np.array(keras.ops.convert_to_numpy(one)) for one in model.weights]
    callbacks = [nk.Distribute(world=world), nk.Report(folder, gradients=every)]
    x, y = nk.shard(X, Y, world=world)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return begin, x, y


def told(folder, rank):
    lines = map(json.loads, (folder / f"ranks/facts.rank{rank}.jsonl").read_text().splitlines())
    return [line for line in lines if line["what"] == "gradients"]


def counts(values):
    exponents = np.frexp(np.abs(values[values != 0]))[1].tolist()
    return {str(one): exponents.count(one) for one in sorted(set(exponents))}


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")
    with MemoryCluster(2) as found:
        yield found


@pytest.mark.parametrize("every", [1, 2])
def test_the_gradients_that_a_worker_sends_are_told_by_layer(tmp_path, cluster, every):
    _, ((kernel, bias), x, y) = cluster.run(lambda world: train(tmp_path / "run", world, every=every))
    assert not told(tmp_path / "run", 0), "a server makes none"
    lines = told(tmp_path / "run", 1)
    assert [line["step"] for line in lines] == list(range(0, 20, every))
    off = x[:4] @ kernel + bias - y[:4]
    slope = 2 / 4 * (x[:4] * off).sum(0)
    (name_of_kernel, name_of_bias) = lines[0]["layers"]
    assert "kernel" in name_of_kernel
    assert "bias" in name_of_bias
    assert lines[0]["layers"][name_of_kernel] == {"zeros": 0, "counts": counts(slope)}
    assert lines[0]["layers"][name_of_bias] == {"zeros": 0, "counts": counts(np.array([off.mean() * 2]))}
    step, layers = read_run(tmp_path / "run").ranks[1].gradients
    assert step == lines[-1]["step"]
    assert [*layers] == [name_of_kernel, name_of_bias]


def test_the_sum_of_several_batches_is_one_gradient(tmp_path, cluster):
    cluster.run(lambda world: train(tmp_path / "run", world, every=1, algorithm=nk.Synchronous))
    assert [line["step"] for line in told(tmp_path / "run", 1)] == list(range(20))


def test_who_sends_none_is_told_so(tmp_path, cluster):
    with pytest.warns(RuntimeWarning, match=r"Report\(gradients=2\) .* but a process alone sends none"):
        train(tmp_path / "alone")
    with pytest.warns(RuntimeWarning, match="but EASGD sends none"):
        cluster.run(lambda world: train(tmp_path / "local", world, algorithm=nk.EASGD))
    assert not told(tmp_path / "alone", 0)
    assert not told(tmp_path / "local", 1)


def test_it_is_no_number(tmp_path):
    with pytest.raises(ConfigurationError, match="gradients=-1"):
        nk.Report(tmp_path, gradients=-1)
