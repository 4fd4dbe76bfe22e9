"""nnlo_keras in one process, on the back end that KERAS_BACKEND names: wrappers in an ordinary fit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError, Downpour  # noqa: E402
from nnlo_common.algorithms import option  # noqa: E402
from tests.helpers import keras_cases as cases  # noqa: E402
from tests.helpers.keras_cases import equal  # noqa: E402
from tests.helpers.misspelt_options import MISSPELT, assert_answered, assert_subclass_has_options_of_its_own  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

WRAPPERS = [nk.Downpour, nk.Synchronous, nk.EASGD, nk.GEM, nk.AGN, nk.DynSGD, nk.LocalSGD, nk.DiLoCo]


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.5)


def fit(model, epochs=2, callbacks=()):
    x, y = cases.data()
    model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return cases.weights(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_alone_every_wrapper_is_the_plain_optimizer(wrapper):
    want = fit(cases.compiled(cases.dense(), momentum()))
    for callbacks in ([], [nk.Distribute()]):
        model = cases.compiled(cases.dense(), wrapper(momentum()))
        assert equal(fit(model, callbacks=callbacks), want)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_comes_back_from_its_configuration(wrapper):
    options = {} if wrapper in (nk.GEM, nk.Synchronous) else {"every": 7}
    optimizer = wrapper(momentum(), lag=1, servers=2, **options)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is wrapper
    assert again.get_config() == optimizer.get_config()
    assert again.algorithm == optimizer.algorithm
    assert again.ranks.servers == 2
    assert again.inner_optimizer.momentum == 0.5


def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    model = cases.compiled(cases.dense(), nk.Downpour(keras.optimizers.Adam(0.01), every=3))
    fit(model)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, nk.Downpour)
    assert again.optimizer.algorithm.n_push == 3
    assert int(again.optimizer.iterations) == 10
    assert equal(fit(again), fit(model))


def test_the_loss_scale_goes_around_the_wrapper():
    with pytest.raises(ConfigurationError, match="scaled twice"):
        nk.Downpour(keras.optimizers.LossScaleOptimizer(momentum()))
    want = fit(cases.compiled(cases.dense(), keras.optimizers.LossScaleOptimizer(momentum())))
    around = keras.optimizers.LossScaleOptimizer(nk.Downpour(momentum()))
    assert equal(fit(cases.compiled(cases.dense(), around), callbacks=[nk.Distribute()]), want)


def test_the_learning_rate_is_the_wrapped_optimizers():
    optimizer = nk.EASGD(momentum())
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5)
    with pytest.raises(TypeError):
        nk.EASGD(keras.optimizers.SGD(schedule)).learning_rate = 0.1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nk.Downpour(nk.EASGD(momentum())), "cannot wrap another wrapper, EASGD"),
        (lambda: nk.GEM(keras.optimizers.Adam()), "it got Adam"),
        (lambda: nk.GEM(keras.optimizers.SGD(0.1, nesterov=True)), "SGD with nesterov"),
        (lambda: nk.GEM(keras.optimizers.SGD(0.1, clipnorm=1.0)), "SGD with clipnorm"),
        (lambda: nk.Downpour(momentum(), every=0), "at least 1"),
    ],
)
def test_what_cannot_be_wrapped_is_named(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_callback_without_a_wrapper_is_told():
    with pytest.raises(ConfigurationError, match=r"Downpour\(SGD\(\.\.\.\)\)"):
        fit(cases.compiled(cases.dense(), momentum()), callbacks=[nk.Distribute()])


def test_a_callback_can_be_copied_and_shares_no_training():
    callback = nk.Distribute()
    other = copy.deepcopy(callback)
    assert type(other) is nk.Distribute
    assert other is not callback
    assert other.role == "alone"


def world(rank, size=3):
    return SimpleNamespace(rank=rank, size=size)


class Batches(keras.utils.PyDataset):
    """The numbers up to five."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.array([index])


def test_alone_a_share_is_everything():
    x, y = np.arange(4), np.arange(4)
    assert nk.shard(x) is x
    assert nk.shard(x, y) == (x, y)


def test_shares_of_arrays_hold_every_sample_once():
    x = np.arange(7)
    server, *workers = (nk.shard(x, -x, world=world(rank)) for rank in range(3))
    assert [part.tolist() for part in server] == [[0], [0]]
    assert [part[0].tolist() for part in workers] == [[0, 2, 4, 6], [1, 3, 5]]
    assert all((part[1] == -part[0]).all() for part in workers)


def test_shares_of_structures_have_their_form_and_copy_nothing():
    x, y = {"a": np.arange(7), "b": [np.arange(14).reshape(7, 2)]}, (np.arange(7), None)
    part, targets = nk.shard(x, y, world=world(2))
    assert part["a"].tolist() == targets[0].tolist() == [1, 3, 5]
    assert part["b"][0].shape == (3, 2)
    assert targets[1] is None
    assert np.shares_memory(part["a"], x["a"])
    with pytest.raises(ConfigurationError, match=r"\[7, 7, 6\] samples"):
        nk.shard(x, np.arange(6), world=world(1))


def test_shares_of_torch_data():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.arange(7)
    assert nk.shard(x, world=world(2)).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    shares = [[int(one[0]) for one in nk.shard(TensorDataset(x), world=world(rank))] for rank in range(3)]
    assert shares == [[0], [0, 2, 4, 6], [1, 3, 5]]
    with pytest.raises(ConfigurationError, match="divide the data set that it loads"):
        nk.shard(DataLoader(TensorDataset(x)), world=world(1))


def test_shares_of_batches_are_fetched_as_the_whole_is():
    assert nk.shard(Batches(), world=world(1)).workers == Batches().workers == 1


def test_shares_of_batches_hold_every_batch_once():
    server, *workers = (nk.shard(Batches(), world=world(rank)) for rank in range(3))
    assert server.num_batches == 1
    assert [[int(part[i][0]) for i in range(part.num_batches)] for part in workers] == [[0, 2, 4], [1, 3]]


def test_shares_of_a_tensorflow_data_set_hold_every_element_once():
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.range(5)
    shares = [[int(one) for one in nk.shard(data, world=world(rank))] for rank in range(3)]
    assert shares == [[0], [0, 2, 4], [1, 3]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((np.arange(4), np.arange(5)), r"\[4, 5\] samples"),
        ((np.arange(1),), "1 samples among 2 workers"),
        ((iter([1]),), "cannot divide a list_iterator"),
    ],
)
def test_what_cannot_be_divided_is_named(data, words):
    with pytest.raises(ConfigurationError, match=words):
        nk.shard(*data, world=world(1))


@pytest.mark.slow
def test_a_single_process_needs_no_mpi4py():
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import keras, numpy as np, nnlo_keras as nk\n"
        "m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "m.compile(nk.EASGD(keras.optimizers.SGD(0.1)), 'mse')\n"
        "m.fit(*nk.shard(np.ones((4, 2)), np.ones((4, 1))), verbose=0, callbacks=[nk.Distribute()])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=90).returncode == 0


def test_a_warm_start_and_a_callback_that_waits_for_all_at_the_start_are_refused_together():
    distribute = nk.Distribute()
    distribute._rank_callbacks = [nk.WarmUp(1), nk.Broadcast()]
    distribute._refuse_to_wait_at_start(nk.Downpour(momentum()).algorithm)
    with pytest.raises(ConfigurationError, match=r"Broadcast\(\) needs all ranks .* warm_start=3 lets one"):
        distribute._refuse_to_wait_at_start(nk.Downpour(momentum(), warm_start=3).algorithm)


@MISSPELT
def test_a_misspelt_option_is_answered_with_the_nearest(wrong, advice):
    assert_answered(nk.EASGD, momentum(), wrong, advice)


def test_a_subclass_of_a_wrapper_may_have_options_of_its_own():
    assert_subclass_has_options_of_its_own(nk.EASGD, momentum())


@dataclass(frozen=True, kw_only=True)
class Careful(Downpour):
    """An algorithm of a user's own."""

    care: float = option(0.5, "how careful", least=0, below=1)


def test_an_algorithm_of_ones_own_has_a_wrapper_that_is_saved():
    wrapper = nk.wrapper(Careful)
    optimizer = wrapper(momentum(), care=0.25, every=3, local=keras.optimizers.Adam(0.5))
    assert optimizer.algorithm == Careful(care=0.25, n_push=3, n_fetch=3, schedule="aligned")
    saved = keras.saving.serialize_keras_object(optimizer)
    assert saved["registered_name"] == "nnlo>Careful"
    again = keras.saving.deserialize_keras_object(saved)
    assert isinstance(again, wrapper)
    assert again.algorithm == optimizer.algorithm
    assert float(again.local_optimizer.learning_rate) == 0.5
    assert nk.wrapper(Downpour) is nk.Downpour
