"""The physics examples run, alone and on three ranks; those with Fashion-MNIST are in test_readme.py."""

from __future__ import annotations

import functools
import os
import re

import numpy as np
import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import EXAMPLES

pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")

import toy_jets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TINY = ["--particles", "6", "--epochs", "2"]
KERAS = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch"), "TF_CPP_MIN_LOG_LEVEL": "3"}
with_torch = pytest.mark.framework("torch")
with_keras = pytest.mark.framework("keras")
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Few jets, where the real ones would lie."""
    path = tmp_path_factory.mktemp("jets")
    toy_jets.provide(path / "train", 400, files=3, seed=1)
    toy_jets.provide(path / "val", 200, files=2, seed=2)
    return path


def printed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(ranks, script, *arguments, env=None):
    """What an example prints."""
    if ranks == 1:
        return printed(alone(EXAMPLES / script, *arguments, timeout_s=250, env=env))
    return printed(mpiexec(ranks, EXAMPLES / script, *arguments, timeout_s=250, env=env))


def accuracies(told):
    return [float(value) for value in re.findall(r"^epoch .*accuracy ([0-9.]+)", told, re.MULTILINE)]


@with_torch
def test_jedi_net_is_the_one_of_its_definition():
    import torch
    from jet_networks import JEDINet

    torch.manual_seed(2)
    network, x = JEDINet(), torch.randn(3, 5, 16)
    assert sum(parameter.numel() for parameter in network.parameters()) == 33_821
    weight = torch.cat([network.receiver.weight, network.sender.weight], dim=1)
    found = []
    for receiver in range(5):
        effect = [
            network.relation(
                torch.cat([x[:, receiver], x[:, sender]], dim=1) @ weight.T + network.receiver.bias
            )
            for sender in range(5)
            if sender != receiver
        ]
        found.append(network.particle(torch.cat([x[:, receiver], sum(effect) / 5], dim=1)))
    torch.testing.assert_close(network(x), network.jet(sum(found) / 5), rtol=1e-4, atol=1e-5)


@with_torch
@with_keras
# Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_jedi_net_in_keras_is_the_one_in_torch():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import torch
    from jedi_keras import jedi_net
    from jet_networks import JEDINet

    network, same = JEDINet(), jedi_net(particles=5)
    given = [parameter.detach().numpy().T for parameter in network.parameters()]
    same.set_weights(given)
    x = torch.randn(3, 5, 16)
    expected = network(x).detach().numpy()
    found = keras.ops.convert_to_numpy(same(x.numpy()))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@with_torch
@pytest.mark.mpi
@pytest.mark.parametrize(
    "algorithm", ["downpour", *(pytest.param(name, marks=extended) for name in ("easgd", "localsgd"))]
)
def test_jedi_net_trains_with_torch_on_three_ranks(folder, algorithm):
    told = started(3, "jedi_torch.py", "--data", str(folder), "--algorithm", algorithm, *TINY)
    assert len(accuracies(told)) == 2
    assert re.search(r"^samples +800$", told, re.MULTILINE)


@with_torch
@extended
def test_alone_jedi_net_is_its_serial_twin(folder):
    one, twin = (
        accuracies(started(1, script, "--data", str(folder), *TINY))
        for script in ("jedi_torch.py", "jedi_torch_serial.py")
    )
    assert one == twin
    assert len(one) == 2


@with_torch
@extended
def test_without_a_folder_jets_are_made(tmp_path):
    told = started(1, "jedi_torch_serial.py", "--jets", "60", *TINY, env={"TMPDIR": str(tmp_path)})
    assert len(accuracies(told)) == 2
    assert len(list(tmp_path.glob("toy_jets_*/60/*/*.h5"))) == 6


@with_keras
@pytest.mark.mpi
@extended
@pytest.mark.parametrize("script", ["jedi_keras.py", "tagger_keras.py"])
def test_the_taggers_train_with_keras_on_three_ranks(folder, script):
    told = started(3, script, "--data", str(folder), *TINY, env=KERAS)
    assert len(re.findall(r"val_accuracy: [0-9.]+", told)) == 2
    assert len(re.findall(r"^downpour, .*: accuracy [0-9.]+", told, re.MULTILINE)) == 1


@with_keras
@extended
@pytest.mark.parametrize("script", ["jedi_keras.py", "tagger_keras.py"])
def test_alone_a_wrapped_tagger_is_a_plain_one(folder, script):
    wrapped, plain = (
        re.findall(
            r"accuracy: [0-9.]+ - loss: [0-9.]+",
            started(1, script, "--data", str(folder), *TINY, "--algorithm", algorithm, env=KERAS),
        )
        for algorithm in ("downpour", "none")
    )
    assert wrapped == plain
    assert len(plain) >= 2


def improved(told):
    """How far a GAN is from true showers, before and after."""
    before, after = (  # each said once
        {name: float(value) for name, value in re.findall(r"(along|across|response) ([0-9.]+)", line)}
        for line in re.findall(r"^(?:before|after).*$", told, re.MULTILINE)
    )
    assert set(before) == set(after) == {"along", "across", "response"}
    return [after[name] < before[name] / 2 for name in before]


@with_keras
@extended
@pytest.mark.skipif(KERAS["KERAS_BACKEND"] == "jax", reason="on JAX fit keeps the state of one optimizer")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.mpi)])
def test_the_gan_comes_nearer_to_true_showers(ranks):
    assert all(improved(started(ranks, "gan_keras.py", env=KERAS)))


@with_keras
@extended
@pytest.mark.skipif(KERAS["KERAS_BACKEND"] == "jax", reason="on JAX fit keeps the state of one optimizer")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.mpi)])
def test_a_search_over_the_gan_finds_the_least_distance(ranks):
    options = ["--trials", "3", "--epochs", "1", "--showers", "100"]
    start = alone if ranks == 1 else functools.partial(mpiexec, ranks)
    done = start(EXAMPLES / "optimise_gan.py", *options, timeout_s=250, env=KERAS)
    assert done.returncode == 0, done.stderr
    values = [float(value) for value in re.findall(r"finished with values: \[([0-9.]+)\]", done.stderr)]
    (best,) = re.findall(r"Best is trial [0-2] with value: ([0-9.]+)", done.stderr)
    assert len(set(values)) == 3
    assert float(best) == min(values)


@extended
@with_keras
@pytest.mark.mpi
def test_the_search_with_keras_tuner_goes_on_with_what_is_in_its_directory(tmp_path):
    options = ["--epochs", "1", "--oracle", "random", "--directory", str(tmp_path)]
    assert "Showing 3 best trials" in started(5, "optimise_keras.py", "--trials", "2", *options, env=KERAS)
    told = started(5, "optimise_keras.py", "--trials", "3", *options, env=KERAS)
    assert "Reloading Tuner" in told
    assert told.count("Search: Running Trial") == 1
