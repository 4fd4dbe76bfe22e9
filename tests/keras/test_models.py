"""Keras models with several optimizers, training steps of their own, or more than a chain of layers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import warnings

import numpy as np
import pytest

from nnlo_common.testing import MemoryCluster
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.shared_folders import written_once

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_keras._compat import EMA_SWAPPED  # noqa: E402
from nnlo_keras._model_optimizers import assign_variables, wrappers_in  # noqa: E402
from tests.keras.test_mpi_fit import WRAPPERS, on  # noqa: E402
from tests.programs import keras_gan  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def installed(backend, *marks):
    """A back end to run on, if it is there; on JAX a training step of one's own is another function."""
    missing = importlib.util.find_spec(backend) is None
    return pytest.param(
        backend, marks=[pytest.mark.skipif(missing, reason=f"{backend} is not installed"), *marks]
    )


MPI = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(400)]


def sgd(rate=0.1):
    return keras.optimizers.SGD(rate, momentum=0.5)


def gan(d_optimizer, g_optimizer, **options):
    model = keras_gan.GAN()
    model.compile(d_optimizer, g_optimizer, **options)
    return model


class OwnStep(keras.Sequential):
    """A training step of its own, which nobody calls here."""

    def __init__(self):
        super().__init__([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dense(1)])

    def train_step(self, data):
        raise NotImplementedError


# On JAX fit keeps the state of one optimizer only.
several = pytest.mark.skipif(keras.backend.backend() == "jax", reason="refused on JAX")


@several
def test_all_wrapped_optimizers_are_found_by_their_names():
    d_optimizer, g_optimizer = nk.EASGD(sgd()), nk.EASGD(sgd())
    assert wrappers_in(gan(d_optimizer, g_optimizer)) == {
        "d_optimizer": d_optimizer,
        "g_optimizer": g_optimizer,
    }
    in_a_list = keras_gan.Pair()
    in_a_list.compile([d_optimizer, g_optimizer])
    assert list(wrappers_in(in_a_list)) == ["optimizers[0]", "optimizers[1]"]


@several
def test_one_optimizer_under_two_names_is_one():
    model = OwnStep()
    model.inner, model.mine = sgd(), None
    model.mine = nk.Downpour(model.inner)
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(model.mine))
    assert wrappers_in(model) == {"mine": model.mine}


@several
def test_optimizers_of_other_variables_are_left_alone():
    model = OwnStep()
    model.compile(nk.Downpour(sgd()))
    model.of_an_input = sgd()
    with pytest.raises(ConfigurationError, match="optimizer is wrapped but of_an_input is not"):
        wrappers_in(model)
    model.of_an_input.build([keras.Variable([0.0])])
    assert list(wrappers_in(model)) == ["optimizer"]


@several
@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (
            lambda: (nk.Downpour(sgd()), sgd()),
            r"d_optimizer is wrapped but g_optimizer is not.*Downpour\(SGD",
        ),
        (
            lambda: (nk.Downpour(sgd()), nk.EASGD(sgd())),
            r"d_optimizer is Downpour.* but g_optimizer is EASGD",
        ),
        (lambda: (nk.EASGD(sgd(), every=2), nk.EASGD(sgd(), every=3)), r"every=2.* but .*every=3"),
        (lambda: (nk.Downpour(sgd(), every=2), nk.Downpour(sgd())), r"every=2.* but .*every=1"),
        (lambda: (nk.Downpour(sgd()), nk.Downpour(sgd(), servers=2)), r"servers=1.* but .*servers=2"),
        (
            lambda: (nk.GEM(sgd()), nk.GEM(keras.optimizers.SGD(0.1, momentum=0.9))),
            r"momentum=0\.5.* but .*0\.9",
        ),
    ],
)
def test_optimizers_that_are_not_wrapped_alike_are_named(pair, words):
    model = gan(*pair())
    with pytest.raises(ConfigurationError, match=words):
        model.fit(keras_gan.points(20), verbose=0, callbacks=[nk.Distribute()])


def test_a_plain_training_step_needs_the_models_own_optimizer_wrapped():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile()
    model.mine = nk.Downpour(sgd())
    with pytest.raises(ConfigurationError, match="mine is wrapped but optimizer is not"):
        wrappers_in(model)


@several
def test_the_models_own_optimizer_may_be_one_that_is_not_wrapped():
    model = OwnStep()
    model.compile(sgd())
    model.mine = nk.Downpour(sgd())
    with pytest.raises(ConfigurationError, match="mine is wrapped but optimizer is not"):
        wrappers_in(model)


@several
def test_an_optimizer_that_is_not_built_is_named():
    model = gan(nk.Downpour(sgd()), nk.Downpour(sgd()), build=False)
    model.d_optimizer.build(model.discriminator.trainable_variables)
    with pytest.raises(
        ConfigurationError, match=r"g_optimizer is not built.*self\.g_optimizer\.build\(self\."
    ):
        assign_variables(model, wrappers_in(model))


@several
def test_a_variable_of_two_optimizers_is_named():
    model = gan(nk.Downpour(sgd()), nk.Downpour(sgd()), build=False)
    model.d_optimizer.build(model.discriminator.trainable_variables)
    model.g_optimizer.build(model.trainable_variables)
    with pytest.raises(
        ConfigurationError, match=r"both d_optimizer and g_optimizer.*'discriminator/.*/kernel'"
    ):
        assign_variables(model, wrappers_in(model))


def test_on_jax_other_optimizers_than_the_models_are_refused(monkeypatch):
    model = gan(nk.Downpour(sgd()), nk.Downpour(sgd()))
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(
        ConfigurationError, match=r"only the state of model\.optimizer, but .* d_optimizer, g_optimizer"
    ):
        wrappers_in(model)


@several
@pytest.mark.parametrize("wrapper", [nk.Downpour, nk.EASGD])
def test_alone_the_wrappers_are_the_plain_optimizers(wrapper):
    ended = []
    for wrap, callbacks in ((lambda one: one, []), (wrapper, [nk.Distribute()])):
        model = gan(wrap(sgd()), wrap(keras.optimizers.Adam(0.01)), build=False)
        model.fit(keras_gan.points(40), batch_size=10, shuffle=False, verbose=0, callbacks=callbacks)
        ended.append(keras_gan.weights(model))
    assert all((a == b).all() for a, b in zip(*ended, strict=True))


# Under mpiexec.


def models_on(ranks, backend):
    """Return what runs keras_models.py into a folder."""

    def run(folder):
        done = mpiexec(ranks, PROGRAMS / "keras_models.py", str(folder), timeout_s=350, env=on(backend))
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module", params=[installed("torch"), installed("tensorflow", pytest.mark.extended)])
def trainings(request, tmp_path_factory):
    """What each piece of keras_models.py has left behind, by piece and rank."""
    folder = written_once(tmp_path_factory, f"models-3-{request.param}", models_on(3, request.param))
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]
    return {piece: [rank[piece] for rank in ranks] for piece in ranks[0]}


@pytest.fixture(scope="module", params=[installed("torch"), installed("tensorflow", pytest.mark.extended)])
def comparisons(request, tmp_path_factory):
    """How far Downpour is from the plain fit on a server and a worker, by training."""
    folder = written_once(tmp_path_factory, f"models-2-{request.param}", models_on(2, request.param))
    return request.param, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def check(ranks, factor):
    """All ranks have ended with the server's weights, and these are better than those of the start."""
    assert len({rank["weights"] for rank in ranks}) == 1
    assert all(rank["after"] == pytest.approx(ranks[0]["after"]) for rank in ranks)
    assert ranks[0]["after"] < factor * ranks[0]["before"]


@pytest.mark.extended
class TestOnThreeRanks:
    """The trainings of keras_models.py."""

    pytestmark = MPI

    @pytest.mark.parametrize("wrapper", WRAPPERS)
    def test_every_wrapper_trains_both_models_of_a_gan(self, trainings, wrapper):
        if wrapper not in trainings:
            assert wrapper not in ("Downpour", "EASGD", "GEM")
            assert "compiled" in trainings
            pytest.skip("run on torch")
        check(trainings[wrapper], 0.9)

    @pytest.mark.parametrize(
        "piece", ["two servers", "lag", "patience", "rates", "compiled", "steps per execution"]
    )
    def test_a_gan_trains_with(self, trainings, piece):
        if piece not in trainings:
            assert piece in ("compiled", "steps per execution")
            pytest.skip("only TensorFlow has it")
        check(trainings[piece], 0.95)

    def test_what_a_training_step_of_its_own_returns_is_in_the_history_of_the_server(self, trainings):
        server, *workers = (rank["history"] for rank in trainings["Downpour"])
        for name in ("d_loss", "g_loss"):
            # A worker may be an epoch ahead of the other, so the range is that of all epochs.
            seen = [value for worker in workers for value in worker[name]]
            assert len(server[name]) == 8
            assert all(min(seen) - 1e-6 <= mean <= max(seen) + 1e-6 for mean in server[name])
        assert set(server) == {"d_loss", "g_loss"}

    def test_the_center_steps_an_optimizer_only_where_it_was_called(self, trainings):
        server = trainings["patience"][0]
        assert server["steps"] == [192, 96]

    def test_each_optimizer_has_a_learning_rate_of_its_own(self, trainings):
        assert trainings["rates"][0]["rates"] == pytest.approx([0.05, 0.01])

    @pytest.mark.parametrize("wrapper", ["Downpour", "EASGD"])
    @pytest.mark.parametrize("model", ["average", "subclassed", "many"])
    def test_models_that_are_no_chain_of_layers_train(self, trainings, model, wrapper):
        check(trainings[f"{model}, {wrapper}"], 0.9)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("optimizers", ["momenta", "adam and decay", "clipped"])
@pytest.mark.parametrize("model", ["pair", "gan"])
def test_with_one_worker_two_optimizers_have_the_bits_of_the_plain_fit(comparisons, model, optimizers):
    backend, ranks = comparisons
    for rank in ranks:
        found = rank[f"{model}, {optimizers}"]
        assert found["moved"] > 1e-3
        assert found["apart"] <= (0 if backend == "torch" else 1e-6)


@pytest.mark.mpi
@pytest.mark.slow
def test_optimizers_that_are_not_built_end_the_job():
    done = mpiexec(3, PROGRAMS / "keras_misuse.py", "unbuilt optimizers", timeout_s=60, env=on("torch"))
    assert done.returncode != 0
    assert re.search(r"d_optimizer is not built.*self\.d_optimizer\.build", done.stderr), done.stderr


class Scale(keras.layers.Layer):
    """A number that is set to its gradient, as the scales of float8 are."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")
        self.scale.overwrite_with_gradient = True

    def call(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (lambda: keras.layers.Dense(1, kernel_constraint="non_neg"), "kernel' has a constraint"),
        (Scale, "scale' has overwrite_with_gradient"),
    ],
)
@pytest.mark.parametrize("name", ["GEM", "EAMSGD", "DiLoCo"])
def test_constraints_are_refused_where_another_momentum_moves_the_weights(name, layer, found, monkeypatch):
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")

    def program(world):
        model = keras.Sequential([keras.Input((1,)), layer()])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5, nesterov=name == "EAMSGD")
        model.compile(getattr(nk, name)(optimizer), "mse")
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[nk.Distribute(world=world)])

    with pytest.raises(ConfigurationError, match=f"{found}, but {name} moves"), MemoryCluster(2) as cluster:
        cluster.run(program, timeout_s=100)


class Least(keras.callbacks.Callback):
    """Notes the least weight of the first layer's kernel before each batch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_begin(self, batch, logs=None):
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        self.found.append(float(self.model.get_weights()[0].min()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AGN", {"every": 3}),
        ("AGN", {"every": 3, "lag": 1}),
        ("AGN", {"every": 3, "group_size": 2}),
        ("AGN", {"every": 3, "group_size": 2, "local_learning_rate": 0.1}),
        ("Downpour", {"every": 3, "local": 0.1}),
        ("LocalSGD", {"every": 3, "lag": 1}),
        ("EASGD", {"every": 3, "lag": 1}),
        ("EASGD", {"every": 3, "order": "paper"}),
        ("EASGD", {"every": 3, "order": "paper", "group_size": 2}),
    ],
)
def test_workers_compute_gradients_at_weights_that_keep_their_constraints(name, options, monkeypatch):
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")
    group = options.get("group_size", 1)

    def program(world):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_constraint="non_neg")])
        model.set_weights([np.ones((4, 1), "f4"), np.zeros(1, "f4")])
        model.compile(getattr(nk, name)(keras.optimizers.SGD(0.2), **options), "mse")
        x = np.random.default_rng(1).standard_normal((60, 4)).astype("f4")
        x, y = nk.shard(x, -x.sum(1, keepdims=True), world=world, group_size=group)
        callbacks = [nk.Distribute(world=world), least := Least()]
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        return least.found

    with MemoryCluster(1 + 2 * group) as cluster:
        _, *workers = cluster.run(program, timeout_s=100)
    for found in workers:
        assert 0 <= min(found) < 0.5


def overwritten(name, options):
    """Train a scale that is set to its gradient, which is 2; return it from every rank."""

    layout = {key: options[key] for key in options if key == "servers"}

    def program(world):
        model = keras.Sequential([keras.Input((1,)), Scale()])
        optimizer = getattr(nk, name)(keras.optimizers.SGD(0.1), **options)
        model.compile(optimizer, loss=lambda x, predicted: 2 * predicted / x)
        x = nk.shard(np.arange(1, 13, dtype="f4")[:, None], world=world, **layout)
        model.fit(x, x, batch_size=2, verbose=0, callbacks=[nk.Distribute(world=world)])
        return float(model.get_weights()[0])

    with MemoryCluster(3) as cluster:
        return cluster.run(program, timeout_s=100)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Downpour", {"every": 2}, "adds up gradients"),
        ("AGN", {"every": 2}, "adds up gradients"),
        ("Downpour", {"n_fetch": 2, "local": 0.1}, "local step"),
        ("Downpour", {"wire": "topk"}, "wire='topk'"),
        ("DynSGD", {}, "divides each gradient"),
        ("Steady", {}, "measures gradients"),
    ],
)
def test_what_would_not_be_overwritten_by_its_own_gradient_is_refused(name, options, reason, monkeypatch):
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")
    with pytest.raises(ConfigurationError, match=f"scale' has overwrite_with_gradient, but {name}.*{reason}"):
        overwritten(name, options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Downpour", {}),
        ("Downpour", {"n_fetch": 2}),
        ("Synchronous", {}),
        ("LocalSGD", {"every": 2}),
        ("Synchronous", {"servers": 0}),
    ],
)
def test_a_variable_is_overwritten_by_its_gradient_on_the_centre_and_on_workers(name, options, monkeypatch):
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")
    assert overwritten(name, options) == [2.0] * 3


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("EASGD", {}, "are of each worker's own weights"),
        ("LocalSGD", {}, "are of each worker's own weights"),
        ("Downpour", {"servers": 2}, "servers=2, but each server has only"),
    ],
)
def test_averages_that_are_not_of_the_centre_do_not_take_its_place(name, options, reason, monkeypatch):
    """The centre would be swapped with averages that no step has moved, which are zeros."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")

    def program(world):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, use_ema=True)
        model.compile(getattr(nk, name)(optimizer, **options), "mse")
        x = nk.shard(np.arange(1, 13, dtype="f4")[:, None], world=world, **options)
        callbacks = [nk.Distribute(world=world), keras.callbacks.SwapEMAWeights()]
        model.fit(x, x, batch_size=2, verbose=0, callbacks=callbacks)

    with pytest.raises(ConfigurationError, match=reason), MemoryCluster(4) as cluster:
        cluster.run(program, timeout_s=100)


@pytest.mark.parametrize("servers", [1, 0])
def test_averages_of_the_centre_are_swapped_where_it_is(servers, monkeypatch):
    """Without a server all ranks have the same; on a worker they are zeros, and TensorFlow reads them."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")

    def program(world):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.001, use_ema=True)
        model.compile(nk.Synchronous(optimizer, servers=servers), "mse")
        x = nk.shard(np.arange(1, 25, dtype="f4")[:, None], world=world, servers=servers)
        model.fit(x, x, batch_size=2, epochs=3, verbose=0, callbacks=[nk.Distribute(world=world), swap])
        return vars(swap)[EMA_SWAPPED], model.get_weights()

    with MemoryCluster(2 + servers) as cluster:
        found = cluster.run(program, timeout_s=100)
    assert [swapped for swapped, _ in found] == [True] + [not servers] * (1 + servers)
    for _, weights in found:
        assert all(map(np.array_equal, weights, found[0][1]))


@pytest.mark.parametrize("steps", [None, 3])
def test_a_server_does_not_look_for_the_end_of_its_data(steps, monkeypatch):
    """Its data is one sample, or of a length that nobody knows, of which TensorFlow and JAX find no end."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")

    def program(world):
        x = nk.shard(np.arange(1, 25, dtype="f4")[:, None], world=world)
        batches = ((x[at : at + 2], x[at : at + 2]) for at in range(0, len(x), 2))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(nk.Downpour(keras.optimizers.SGD(0.001)), "mse")
        given = (batches,) if steps is None else (x, x)
        epochs = 1 if steps is None else 2
        size = {} if steps is None else {"batch_size": 2, "steps_per_epoch": steps}
        callbacks = [nk.Distribute(world=world)]
        return model.fit(*given, epochs=epochs, verbose=0, callbacks=callbacks, **size).epoch

    with MemoryCluster(3) as cluster, warnings.catch_warnings():
        if steps is None:  # that the data has ended, of which Keras warns
            warnings.simplefilter("ignore")
        found = cluster.run(program, timeout_s=30)
    assert found == ([[0]] * 3 if steps is None else [[0, 1]] * 3)


@pytest.mark.parametrize("again", ["fit", "train_on_batch"])
@pytest.mark.parametrize("name", ["Downpour", "EASGD"])
def test_a_training_after_the_first_one_is_refused_without_a_callback(name, again, monkeypatch):
    """On workers it would add up gradients that nobody gets, and each rank would have a model of its own."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")

    def program(world):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(getattr(nk, name)(keras.optimizers.SGD(0.01)), "mse")
        x = nk.shard(np.arange(1, 13, dtype="f4")[:, None], world=world)
        for _ in range(2):
            model.fit(x, x, batch_size=2, verbose=0, callbacks=[nk.Distribute(world=world)])
        with pytest.raises(ConfigurationError, match=r"but no callback exchanges; add nnlo_keras.Distribute"):
            getattr(model, again)(x, x)

    with MemoryCluster(3) as cluster:
        cluster.run(program, timeout_s=100)
