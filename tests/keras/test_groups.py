"""Groups in Keras: k ranks with batches of b make the steps of one rank with batches of k b."""

from __future__ import annotations

import json
import os
import warnings
from itertools import pairwise

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.data import share  # noqa: E402
from nnlo_common.testing import InjectedFault, MemoryCluster  # noqa: E402
from tests.helpers import keras_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402
from tests.programs import keras_gan  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.sampled(2),
]

o, k = keras.optimizers, keras.callbacks
BACKEND = keras.backend.backend()
SIZE, BATCH, EPOCHS = 53, 4, 2  # neither 2 nor 3 ranks divide the samples, nor do batches divide a share
X = np.random.default_rng(2).standard_normal((SIZE, 5)).astype("f4")
Y = np.arange(SIZE) % 3
CLOSE = {"rtol": 1e-4, "atol": 2e-6}

OPTIMIZERS = {
    "sgd": lambda: o.SGD(0.1),
    "momentum": lambda: o.SGD(0.05, momentum=0.9),
    "adam": lambda: o.Adam(0.01),
}
#: What each wrapper is given here.
WRAPPERS = {
    "Downpour": {},
    "Synchronous": {},
    "EASGD": {"every": 2},
    "EAMSGD": {"every": 2, "beta": 0.5},
    "GEM": {},
    "AGN": {"every": 2},
    "DynSGD": {"every": 2},
    "LocalSGD": {"every": 2},
    "DiLoCo": {"every": 2},
}


@pytest.fixture(autouse=True)
def _launched(monkeypatch):
    """Let optimizers that `fit` builds early know that there are several ranks, as under a launcher."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")


def wrapped(name="Synchronous", make=None, **options):
    plain = make() if make else OPTIMIZERS["momentum" if name == "GEM" else "sgd"]()
    if name == "EAMSGD":
        plain = o.SGD(0.05, momentum=0.9, nesterov=True)
    return getattr(nk, name)(plain, **options)


def flat(model):
    return np.concatenate([np.ravel(one) for one in cases.weights(model)])


def start_of(model=cases.dense):
    return model().get_weights()


def trained(model, optimizer, data, callbacks=(), **options):
    """Train a model from the start; the model, with its history."""
    model = cases.compiled(model, optimizer)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0} | options
    model.fit(*data, callbacks=list(callbacks), **options)
    return model


def train(world, start, optimizer, callbacks=(), model=cases.dense, **options):
    """Train one rank on its share; its weights, its history, and its part."""
    net = model()
    net.set_weights(start)
    options = {"data": None} | options
    data = options.pop("data") or nk.shard(
        X, Y, servers=optimizer.ranks.servers, group_size=optimizer.ranks.group_size, world=world
    )
    distribute = nk.Distribute(world=world)
    trained(net, optimizer, data, [distribute, *callbacks], **options)
    return flat(net), net.history.history, distribute


def large(start, optimizer, ranks, world=None, **options):
    """The same with one rank in place of a group, and batches as large as those of all its ranks."""
    data = (X[:1], Y[:1]) if world is not None and world.rank == 0 else (X, Y)
    net = cases.dense()
    net.set_weights(start)
    callbacks = [] if world is None else [nk.Distribute(world=world)]
    return flat(trained(net, optimizer, data, callbacks, batch_size=ranks * BATCH, **options))


# --- the steps -------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_a_server_a_group_is_one_process_with_the_large_batch(optimizer, ranks):
    start, make = start_of(), OPTIMIZERS[optimizer]
    found = on_ranks(ranks, lambda world: train(world, start, wrapped(make=make, servers=0)))
    expected = large(start, make(), ranks)
    assert not np.allclose(expected, np.concatenate([np.ravel(one) for one in start]), **CLOSE)
    for vector, _, _ in found:
        assert np.allclose(vector, expected, **CLOSE)
        assert np.array_equal(vector, found[0][0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_group_is_one_rank_with_the_large_batch(name):
    start, options = start_of(), WRAPPERS[name]
    found = on_ranks(3, lambda world: train(world, start, wrapped(name, group_size=2, **options)))
    expected = on_ranks(2, lambda world: large(start, wrapped(name, **options), 2, world))
    assert not np.allclose(expected[1], np.concatenate([np.ravel(one) for one in start]), **CLOSE)
    for rank in range(3):
        assert np.allclose(found[rank][0], expected[min(rank, 1)], **CLOSE)
    assert np.array_equal(found[1][0], found[2][0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Downpour", {"lag": 1}),
        ("Downpour", {"every": 3, "local": 0.05}),
        ("EASGD", {"every": 2, "lag": 1}),
        ("EASGD", {"every": 2, "order": "paper"}),
    ],
)
def test_so_it_is_with_other_options(name, options):
    start = start_of()
    found = on_ranks(3, lambda world: train(world, start, wrapped(name, group_size=2, **options)))
    expected = on_ranks(2, lambda world: large(start, wrapped(name, **options), 2, world))
    assert np.allclose(found[1][0], expected[1], **CLOSE)
    assert np.array_equal(found[1][0], found[2][0])


def test_a_local_optimizer_steps_with_the_mean_without_the_scale_of_the_loss():
    start = start_of()

    def make(**options):
        plain = o.SGD(0.1, loss_scale_factor=64.0)
        return nk.Downpour(plain, every=3, local=o.SGD(0.05, momentum=0.5), **options)

    found = on_ranks(3, lambda world: train(world, start, make(group_size=2)))
    expected = on_ranks(2, lambda world: large(start, make(), 2, world))
    assert np.allclose(found[1][0], expected[1], **CLOSE)
    assert np.array_equal(found[1][0], found[2][0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "servers"), [("Synchronous", 0), ("Downpour", 1), ("EASGD", 1)])
def test_a_batch_that_overflows_on_one_rank_is_dropped_by_all(name, servers):
    """As in a process alone, whose large batch has the sample; all scales stay equal."""
    start, options = start_of(), WRAPPERS[name]
    x = X.copy()
    x[[9, 38]] = np.inf  # in the middle of growing, and on another rank

    def ended(optimizer, data, callbacks=(), **fitted):
        scaled = o.LossScaleOptimizer(optimizer, initial_scale=4.0, dynamic_growth_steps=3)
        model = cases.dense()
        model.set_weights(start)
        trained(model, scaled, data, callbacks, **fitted)
        # On TensorFlow a server makes no step, and so no scale.
        scale = (float(scaled.dynamic_scale), int(scaled.step_counter)) if scaled.built else None
        return flat(model), scale

    def program(world):
        layout = {"servers": servers, "group_size": 2}
        data = nk.shard(x, Y, world=world, **layout)
        return ended(wrapped(name, **layout, **options), data, [nk.Distribute(world=world)])

    def single(world):
        data = (x[:1], Y[:1]) if world.rank == 0 else (x, Y)
        return ended(wrapped(name, **options), data, [nk.Distribute(world=world)], batch_size=2 * BATCH)

    first, second = on_ranks(servers + 2, program)[servers:]
    if servers:
        _, expected = on_ranks(2, single)
    else:
        expected = ended(OPTIMIZERS["sgd"](), (x, Y), batch_size=2 * BATCH)
    assert np.array_equal(first[0], second[0])
    assert np.isfinite(first[0]).all()
    assert None is not first[1] == second[1] == expected[1]
    if name != "EASGD":  # whose exchanges, on a worker alone, count batches without a step, too
        assert np.allclose(first[0], expected[0], **CLOSE)


class Steps(k.Callback):
    """Notes the weights before each batch, that is after each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        if BACKEND == "jax":
            self.model.jax_state_sync()
        self.seen.append(flat(self.model))


@pytest.mark.parametrize(("size", "servers", "name"), [(2, 0, "Synchronous"), (5, 1, "EASGD")])
def test_members_are_equal_bit_for_bit_after_every_step(size, servers, name):
    start = start_of()

    def program(world):
        steps = Steps()
        train(world, start, wrapped(name, servers=servers, group_size=2, **WRAPPERS[name]), [steps])
        return steps.seen

    _, *rest = found = on_ranks(size, program)
    for first, second in [found] if not servers else [rest[:2], rest[2:]]:
        assert len(first) == len(second) >= 8
        assert all(map(np.array_equal, first, second))
        assert not any(map(np.array_equal, first, first[1:]))


def test_the_first_ranks_weights_are_the_start_without_a_server():
    start = start_of()

    def program(world):
        own = [one + world.rank for one in start]
        return train(world, own, wrapped(servers=0))[0]

    first, second = on_ranks(2, program)
    assert np.array_equal(first, second)
    assert np.allclose(first, large(start, o.SGD(0.1), 2), **CLOSE)


@pytest.mark.parametrize("servers", [0, 1])
def test_batches_of_unequal_sizes_count_by_their_samples(servers):
    start = start_of()
    rows = np.arange(48).reshape(6, 8)

    def part(world):
        if world.rank < servers:
            return slice(0, 1), 1
        columns = (slice(0, 3), slice(3, 8))[world.rank - servers]
        mine = np.ravel(rows[:, columns])
        return mine, len(mine) // 6

    def program(world):
        mine, batch = part(world)
        optimizer = wrapped("Synchronous", servers=servers, group_size=2)
        return train(world, start, optimizer, data=(X[mine], Y[mine]), batch_size=batch)[0]

    found = on_ranks(servers + 2, program)
    net = cases.dense()
    net.set_weights(start)
    expected = flat(trained(net, o.SGD(0.1), (X[:48], Y[:48]), batch_size=8))
    assert np.allclose(found[-1], expected, **CLOSE)
    assert np.array_equal(found[-1], found[-2])


def test_accumulation_averages_and_clipping_of_the_optimizer_are_those_of_the_large_batch():
    start = start_of()

    def make():
        return o.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1)

    def averaging():
        return o.SGD(0.1, use_ema=True, ema_momentum=0.8, clipnorm=0.05)

    for plain in (make, averaging):
        found = on_ranks(2, lambda world, plain=plain: train(world, start, wrapped(make=plain, servers=0)))
        assert np.array_equal(found[0][0], found[1][0])
        assert np.allclose(found[0][0], large(start, plain(), 2), **CLOSE)


class TwoBranches(keras.Model):
    """Uses one of two layers; the others get no gradient."""

    def __init__(self, used):
        super().__init__()
        self.parts = [keras.layers.Dense(3, use_bias=False) for _ in range(3)]
        self.used = used

    def build(self, shape):
        for one in self.parts:
            one.build(shape)

    def call(self, x):
        return sum(self.parts[index](x) for index in self.used) / len(self.used)


def test_variables_that_only_some_ranks_use_count_as_zero_there():
    def program(world):
        used = [0, 1] if world is None else [world.rank]
        keras.utils.set_random_seed(3)
        model = TwoBranches(used)
        model.build((None, 5))
        for one, value in zip(
            model.weights, np.linspace(-1, 1, 45, dtype="f4").reshape(3, 5, 3), strict=True
        ):
            one.assign(value)
        plain = o.AdamW(0.01, weight_decay=0.1)
        model.compile(plain if world is None else nk.Synchronous(plain, servers=0), lambda y, z: z)
        callbacks = [] if world is None else [nk.Distribute(world=world)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of missing gradients, nnlo of equal data
            model.fit(X[:16], X[:16, :3], batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        return cases.weights(model)

    # One process counts both branches by half; AdamW's decay leaves the unused one alone.
    expected = program(None)
    first, second = on_ranks(2, program)
    for one, other, want in zip(first, second, expected, strict=True):
        assert np.array_equal(one, other)
        assert np.allclose(one, want, **CLOSE)


# --- the data --------------------------------------------------------------------------------------------

LAYOUTS = [(5, 1, 2), (7, 1, 3), (3, 0, None), (4, 2, 2)]


def dealt_right(shares, size, count):
    """Each item once, and the first ranks of each group have at most one more than the others."""
    assert sorted(item for one in shares for item in one) == [*range(count)]
    for lead in range(0, len(shares), size):
        lengths = [len(one) for one in shares[lead : lead + size]]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1


class Batches(keras.utils.PyDataset):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return (np.full((2, 1), index),)


@pytest.mark.parametrize(("size", "servers", "group"), LAYOUTS)
def test_items_go_to_one_rank_each_and_ranks_of_a_group_get_equally_many(size, servers, group):
    def program(world):
        given = {"servers": servers, "group_size": group, "world": world}
        data = nk.shard(Batches(SIZE), **given)
        batches = [int(data[index][0][0, 0]) for index in range(len(data))]
        return nk.shard(np.arange(SIZE), **given).tolist(), batches

    found = on_ranks(size, program)
    for kind in range(2):
        assert all(found[rank][kind] == [0] for rank in range(servers))
        dealt_right([one[kind] for one in found[servers:]], group or size, SIZE)
    ranks = size - servers
    groups = ranks // (group or size)
    for worker in range(groups):  # together they have what one worker would have
        members = [found[servers + worker * (group or size) + one][0] for one in range(group or size)]
        assert sorted(item for one in members for item in one) == list(share(SIZE, worker, groups))


def test_a_tf_data_set_is_dealt_out_whether_its_end_is_known_or_not():
    tf = pytest.importorskip("tensorflow")
    known = tf.data.Dataset.range(SIZE)
    for data in (known, known.filter(lambda x: x >= 0)):

        def program(world, data=data):
            return [int(x) for x in nk.shard(data, group_size=2, world=world).as_numpy_iterator()]

        server, *shares = on_ranks(5, program)
        assert server == [0]
        if data is known:
            dealt_right(shares, 2, SIZE)
        else:  # the ranks of a group end together: fewer than two of each group's items are left out
            dealt = [item for one in shares for item in one]
            assert len(dealt) == len(set(dealt)) == SIZE - 1
            assert [*map(len, shares)] == [13] * 4


def test_a_torch_data_set_is_dealt_out():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(SIZE))

    def program(world):
        mine = nk.shard(data, servers=0, world=world)
        return [int(mine[index][0]) for index in range(len(mine))]

    dealt_right(on_ranks(3, program), 3, SIZE)


@pytest.mark.parametrize(("size", "servers", "group"), LAYOUTS)
def test_files_are_divided_among_the_ranks_of_groups(size, servers, group, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(SIZE)

    def program(world):
        options = {"servers": servers, "group_size": group, "world": world}
        data = nk.H5Sequence(str(tmp_path / "a.h5"), features="x", batch_size=4, **options)
        taken = [data[index][0].tolist() for index in range(len(data))]
        again = [data.repeats(index) for index in range(len(data))]
        data.close()
        return taken, again

    found = on_ranks(size, program)[servers:]
    own = [
        [item for batch, repeats in zip(*one, strict=True) if not repeats for item in batch] for one in found
    ]
    dealt_right(own, group or size, SIZE)
    for lead in range(0, len(found), group or size):
        assert len({len(batches) for batches, _ in found[lead : lead + (group or size)]}) == 1


# --- epochs, metrics, and callbacks ----------------------------------------------------------------------


def normalised():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization(momentum=0.8)]
    return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])


class Validations(k.Callback):
    """Counts the validations, and notes the metrics that callbacks see."""

    def __init__(self):
        super().__init__()
        self.begun, self.seen = 0, []

    def on_test_begin(self, logs=None):
        self.begun += 1

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(dict(logs))


def test_without_a_server_the_lead_validates_once_an_epoch_with_the_statistics_of_all():
    start = start_of(normalised)
    after = []

    class Keep(k.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if BACKEND == "jax":
                self.model.jax_state_sync()
            after.append(self.model.get_weights())

    def program(world):
        validations = Validations()
        callbacks = [validations, *([Keep()] if world.rank == 0 else [])]
        options = {"validation_data": (X[::2], Y[::2]), "epochs": 3}
        vector, history, _ = train(world, start, wrapped(servers=0), callbacks, normalised, **options)
        return vector, history, validations.begun, validations.seen

    first, second = on_ranks(2, program)
    assert np.array_equal(first[0], second[0])  # the running statistics, too
    assert first[1] == second[1]
    assert first[3] == second[3]
    assert (first[2], second[2]) == (3, 0)
    assert set(first[1]) == {"loss", "val_loss"}
    assert len(set(first[1]["val_loss"])) == 3
    # What was validated is what callbacks see: one model for all ranks.
    for weights, held in zip(after, first[1]["val_loss"], strict=True):
        model = cases.compiled(normalised(), "sgd")
        model.set_weights(weights)
        assert model.evaluate(X[::2], Y[::2], verbose=0) == pytest.approx(held, rel=1e-5)


def test_statistics_end_as_one_process_would_have_them_if_all_batches_are_alike():
    start = start_of(normalised)
    data = np.tile(X[:4], (6, 1)), np.tile(Y[:4], 6)

    def program(world):
        return train(world, start, wrapped(make=lambda: o.SGD(0.0), servers=0), model=normalised, data=data)[
            0
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all ranks have the same data
        first, second = on_ranks(2, program)
    net = normalised()
    net.set_weights(start)
    # Both ranks' updates count: 12 batches an epoch.
    twice = np.tile(X[:4], (12, 1)), np.tile(Y[:4], 12)
    expected = flat(trained(net, o.SGD(0.0), twice))
    assert np.array_equal(first, second)
    assert np.allclose(first, expected, **CLOSE)


@pytest.mark.parametrize(("size", "servers"), [(2, 0), (3, 1)])
def test_all_stop_together_and_get_the_best_weights(size, servers):
    start = start_of()

    def program(world):
        stopping = k.EarlyStopping("val_loss", patience=1, min_delta=10, restore_best_weights=True)
        optimizer = wrapped(servers=servers, group_size=2)
        options = {"validation_data": (X, Y), "epochs": 6}
        vector, history, _ = train(world, start, optimizer, [stopping], **options)
        return vector, len(history["loss"]), history

    found = on_ranks(size, program)
    assert found[0][1] == 2
    assert found[-1][1] == found[-2][1]  # with a server they may have begun the next epoch
    for vector, _, _ in found:
        assert np.array_equal(vector, found[0][0])
    model = cases.compiled(cases.dense(), "sgd")
    start_again = iter(np.split(found[0][0], np.cumsum([one.size for one in start])[:-1]))
    model.set_weights([next(start_again).reshape(one.shape) for one in start])
    best = found[0][2]["val_loss"][0]  # min_delta=10 lets no later epoch count as better
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(best, rel=1e-5)


class StopAt(k.Callback):
    """Stops the training on one rank, after a batch or an epoch."""

    def __init__(self, stops, when):
        super().__init__()
        self.stops, self.when, self.batches = stops, when, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.stops and self.when == "batch" and self.batches == 9:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if self.stops and self.when == "epoch" and epoch == 1:
            self.model.stop_training = True


@pytest.mark.sampled(5)
@pytest.mark.parametrize("when", ["batch", "epoch"])
@pytest.mark.parametrize(("size", "servers"), [(2, 0), (3, 1), (5, 1)])
def test_a_group_stops_together_if_a_callback_on_one_of_its_ranks_stops(size, servers, when):
    start = start_of()

    def program(world):
        stop = StopAt(world.rank == servers + 1, when)
        optimizer = wrapped("EASGD", servers=servers, group_size=2)
        vector, history, _ = train(world, start, optimizer, [stop], epochs=4)
        return vector, stop.batches, len(history["loss"])

    found = on_ranks(size, program)
    batches = 9 if when == "batch" else 2 * {2: 7, 3: 7, 5: 4}[size]
    for lead in range(servers, size, 2):
        expected = batches if lead == servers else 4 * 4  # the other group trains on
        assert found[lead][1] == found[lead + 1][1] == expected
        assert np.array_equal(found[lead][0], found[lead + 1][0])


class Rates(k.Callback):
    """Notes the learning rate of each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        if batch == 4:
            self.seen.append(round(rate, 6))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("size", "servers"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("callback", ["plateau", "schedule"])
def test_rates_that_callbacks_set_are_those_of_all_ranks(callback, size, servers):
    start = start_of()

    def program(world):
        sets = (
            k.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=10, cooldown=0)
            if callback == "plateau"
            else k.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
        )
        rates = Rates()
        optimizer = wrapped("Synchronous", servers=servers, group_size=2)
        options = {"validation_data": (X, Y), "epochs": 3}
        train(world, start, optimizer, [sets, rates], **options)
        return rates.seen

    *_, first, second = on_ranks(size, program)
    assert first == second == ([0.1, 0.1, 0.05] if callback == "plateau" else [0.1, 0.05, 0.025])


def test_a_rate_that_only_the_lead_sets_within_an_epoch_is_everyones():
    start = start_of()

    class Sets(k.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                self.model.optimizer.learning_rate = 0.02

    def program(world):
        callbacks = [Sets()] if world.rank == 0 else []
        vector, _, _ = train(world, start, wrapped(servers=0), callbacks, epochs=1)
        return vector

    first, second = on_ranks(2, program)
    assert np.array_equal(first, second)


@pytest.mark.parametrize(("size", "servers"), [(2, 0), (3, 1)])
def test_our_callbacks_work_in_groups(size, servers, tmp_path):
    start = start_of(normalised)

    def program(world):
        ours = [
            nk.Broadcast(),
            nk.MetricAverage(),
            nk.WarmUp(steps=3),
            nk.Report(tmp_path, timeline=True),
        ]
        options = {"validation_data": (X, Y)}
        optimizer = wrapped("Synchronous", servers=servers, group_size=2)
        vector, history, distribute = train(world, start, optimizer, ours, normalised, **options)
        return vector, history["loss"], distribute.report, distribute.role

    found = on_ranks(size, program)
    for vector, loss, report, role in found:
        assert np.array_equal(vector, found[0][0])
        assert loss == pytest.approx(found[0][1])
        if not role.startswith("server"):
            assert report.steps == report.samples == 14
    assert [role for *_, role in found][servers:] == ["worker 0" if servers else "lead", "worker 0, member 1"]
    for rank in range(size):
        lines = map(json.loads, (tmp_path / f"ranks/facts.rank{rank}.jsonl").read_text().splitlines())
        counts = [line["batches"] for line in lines if line["what"] == "epoch"]
        assert counts == ([7, 7] if rank >= servers else [14, 14])  # a server counts those of both ranks
        names = {
            event["name"] for event in json.loads((tmp_path / f"ranks/timeline.rank{rank}.json").read_text())
        }
        assert "the sum of the gradients" in names or "no message" in names


def test_files_are_written_by_the_lead_alone(tmp_path):
    start = start_of()

    def program(world):
        folder = tmp_path / f"rank{world.rank}"
        folder.mkdir()
        callbacks = [
            k.CSVLogger(folder / "log.csv"),
            k.ModelCheckpoint(folder / "model.weights.h5", save_weights_only=True),
        ]
        vector, _, distribute = train(world, start, wrapped(servers=0), callbacks)
        distribute.say(f"rank {world.rank}")
        return vector

    on_ranks(2, program)
    assert {path.name for path in (tmp_path / "rank0").iterdir()} == {"log.csv", "model.weights.h5"}
    assert not list((tmp_path / "rank1").iterdir())


# --- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("size", "servers", "name", "options"),
    [
        (2, 0, "Synchronous", {}),
        (2, 0, "Synchronous", {"all_reduce": "bfloat16"}),
        (3, 1, "Downpour", {"all_reduce": "bfloat16"}),
        (2, 0, "EASGD", {"every": 3}),
        (3, 1, "Synchronous", {}),
        (3, 1, "EASGD", {"every": 3}),
        (3, 1, "Downpour", {"every": 2}),
        (3, 1, "GEM", {}),
    ],
)
def test_a_training_that_is_resumed_ends_with_the_same_bits(size, servers, name, options, tmp_path):
    start = start_of(normalised)

    def run(folder, epochs):
        def program(world):
            make = None if name == "GEM" else OPTIMIZERS["adam"]
            optimizer = wrapped(name, make, servers=servers, group_size=2, **options)
            callbacks = [nk.Checkpoint(tmp_path / folder)]
            fitted = {"epochs": epochs, "validation_data": (X, Y)}
            vector, history, _ = train(world, start, optimizer, callbacks, normalised, **fitted)
            return vector, history

        return on_ranks(size, program)

    straight = run("straight", 4)
    assert not np.array_equal(run("stopped", 2)[0][0], straight[0][0])
    resumed = run("stopped", 4)
    for (vector, history), (want, whole) in zip(resumed, straight, strict=True):
        assert np.array_equal(vector, want)
        assert history == whole


def test_a_training_that_was_stopped_early_is_complete(tmp_path):
    start = start_of()

    def program(world):
        stop = StopAt(world.rank == 1, "epoch")
        train(world, start, wrapped(servers=0), [stop, nk.Checkpoint(tmp_path)], epochs=4)
        return stop.batches

    assert on_ranks(2, program) == [14, 14]
    assert on_ranks(2, program) == [0, 0]


def test_without_a_server_another_number_of_ranks_resumes_from_the_same_weights(tmp_path, capsys):
    start = start_of()

    def run(size, epochs):
        def program(world):
            optimizer = wrapped(make=OPTIMIZERS["adam"], servers=0)
            return train(world, start, optimizer, [nk.Checkpoint(tmp_path)], epochs=epochs)[0]

        return on_ranks(size, program)

    run(2, 1)
    found = run(3, 2)
    assert all(np.array_equal(one, found[0]) for one in found)
    assert "was saved with 2 ranks in groups of 2, but this run has 3 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(("point", "occurrence"), [("add up in group", 3), ("gather bytes in group", 3)])
def test_when_the_first_rank_dies_the_next_validates_stops_and_saves(tmp_path, capsys, point, occurrence):
    start = start_of()

    def program(world):
        stop = k.EarlyStopping("val_loss", patience=1, min_delta=1e9)  # two epochs after it has begun
        saved = k.ModelCheckpoint(f"{tmp_path}/{world.rank}-{{epoch}}.weights.h5", save_weights_only=True)
        callbacks, options = [stop, saved], {"validation_data": (X[:9], Y[:9]), "verbose": 2}
        net, history, part = train(world, start, wrapped(servers=0), callbacks, epochs=9, **options)
        return net, history, part.role, part.report.lost

    with MemoryCluster(3) as cluster:
        cluster.fail(0, point, occurrence)
        dead, first, second = cluster.run(program, 120)
    assert isinstance(dead, InjectedFault)
    assert np.array_equal(first[0], second[0])
    assert (first[2], second[2]) == ("lead", "worker 0, member 2")
    assert len(first[3]) == len(second[3]) == 1
    assert first[1]["loss"] == second[1]["loss"]
    assert first[1]["val_loss"] == second[1]["val_loss"]
    assert len(first[1]["loss"]) < 9
    assert {one.name[0] for one in tmp_path.iterdir()} <= {"0", "1"}
    assert any(one.name.startswith("1-") for one in tmp_path.iterdir())
    assert "val_loss" in capsys.readouterr().out


# --- what groups cannot have -----------------------------------------------------------------------------


class Clipped(k.Callback):
    """Changes weights after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        if BACKEND == "jax":
            self.model.jax_state_sync()
        weight = self.model.trainable_variables[0]
        weight.assign(keras.ops.clip(weight, -0.001, 0.001))


def refused(text, size=2, *, servers=0, **options):
    start = start_of()
    callbacks = options.pop("callbacks", list)
    with pytest.raises(ConfigurationError, match=text):
        on_ranks(size, lambda world: train(world, start, wrapped(servers=servers), callbacks(), **options))


def test_several_batches_an_execution_are_refused(monkeypatch):
    monkeypatch.setattr("nnlo_keras._exchanges.BatchSizes.per_execution", 4)
    refused("steps_per_execution=4, but the mean over the group is made after each batch")


def test_backups_of_keras_are_refused_without_a_server(tmp_path):
    refused(
        "BackupAndRestore was given with servers=0",
        callbacks=lambda: [k.BackupAndRestore(tmp_path / "backup")],
    )


def test_a_change_of_weights_after_the_gradient_is_refused():
    refused("was changed within the training step or by a callback", callbacks=lambda: [Clipped()])


def test_an_optimizer_that_is_applied_twice_in_a_batch_is_refused():
    start = start_of()

    def program(world):
        optimizer = wrapped(servers=0)
        apply = optimizer.apply

        def twice(*args):
            apply(*args)
            apply(*args)

        vars(optimizer)["apply"] = twice
        train(world, start, optimizer)

    with pytest.raises(ConfigurationError, match="applied more than once in a batch"):
        on_ranks(2, program)


@pytest.mark.parametrize("more", [1, 5, 8])
def test_a_rank_with_fewer_batches_repeats_some_without_weight(more):
    """Rank 1 has more samples: its last batches are those of a process alone."""
    start = start_of()

    def program(world):
        some = slice(0, 8) if world.rank == 0 else slice(8, 16 + more)
        return train(world, start, wrapped(servers=0), data=(X[some], Y[some]))

    rows = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16), *range(16, 16 + more)]
    net = cases.compiled(cases.dense(), wrapped().inner_optimizer)
    net.set_weights(start)
    ends = [0, 8, *range(16, 16 + more, 4), 16 + more]
    for _ in range(EPOCHS):
        for begin, end in pairwise(ends):
            net.train_on_batch(X[rows[begin:end]], Y[rows[begin:end]])
    for vector, _, _ in on_ranks(2, program):
        assert np.allclose(vector, flat(net), **CLOSE)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_ranks_with_different_unknown_numbers_of_batches_are_named():
    start = start_of()

    def program(world):
        def batches():
            for index in range(2 + world.rank):
                yield X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]

        return train(world, start, wrapped(servers=0), data=(batches(),), batch_size=None, epochs=1)

    text = r"rank 0 ends its epoch after 2 steps, but rank 1 ends a batch .* nnlo_keras\.shard"
    with pytest.raises(ConfigurationError, match=text):
        on_ranks(2, program)


def trained_pair(optimizers, world=None, batch_size=BATCH, **layout):
    """Train two models in one step, each with an optimizer; all weights."""
    x, y = X[:52, :2], X[:52, 2:3]
    model, draw = keras_gan.Pair(), np.random.default_rng(6)
    for one in model.weights:  # threads share Keras' seed
        one.assign(0.5 * draw.standard_normal(one.shape))
    if world is not None:
        x, y = nk.shard(x, y, world=world, **layout)
    model.compile(optimizers)
    callbacks = [] if world is None else [nk.Distribute(world=world)]
    model.fit(x, y, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return np.concatenate([np.ravel(one) for one in keras_gan.weights(model)])


@pytest.mark.sampled(2)
@pytest.mark.skipif(BACKEND == "jax", reason="fit() on JAX knows one optimizer")
@pytest.mark.parametrize(
    ("name", "options"),
    [("Synchronous", {"servers": 0}), ("Downpour", {"local": 0.05}), ("GEM", {}), ("EASGD", {"every": 2})],
)
def test_several_optimizers_step_as_with_the_large_batch(name, options):
    servers = options.get("servers", 1)
    layout = {"servers": servers, "group_size": 2}

    def pair(**given):
        momentum = 0.9 if name == "GEM" else 0.0
        return [getattr(nk, name)(o.SGD(rate, momentum=momentum), **given) for rate in (0.1, 0.03)]

    found = on_ranks(servers + 2, lambda w: trained_pair(pair(**{**options, **layout}), w, **layout))
    if servers:
        _, expected = on_ranks(2, lambda w: trained_pair(pair(**options), w, 2 * BATCH))
    else:
        expected = trained_pair([o.SGD(0.1), o.SGD(0.03)], batch_size=2 * BATCH)
    assert np.allclose(found[-1], expected, **CLOSE)
    assert np.array_equal(found[-1], found[-2])


@pytest.mark.skipif(BACKEND == "jax", reason="fit() on JAX knows one optimizer")
def test_several_optimizers_with_scales_are_refused():
    def program(world):
        trained_pair([o.LossScaleOptimizer(wrapped(servers=0)), wrapped(servers=0)], world, servers=0)

    with pytest.raises(ConfigurationError, match=r"2 wrapped optimizers with a LossScaleOptimizer"):
        on_ranks(2, program)


def test_a_wrapper_for_groups_is_saved_with_its_options():
    optimizer = wrapped("EASGD", group_size=2, servers=2)
    again = nk.EASGD.from_config(optimizer.get_config())
    assert (again.ranks.group_size, again.ranks.servers) == (2, 2)
    assert "group_size" not in wrapped("EASGD").get_config()
    for options in ({"group_size": 0}, {"group_size": 1.5}, {"servers": -1}):
        with pytest.raises(ConfigurationError, match="whole number"):
            wrapped("EASGD", **options)


def test_alone_a_wrapper_for_groups_is_the_plain_optimizer():
    start = start_of()
    found = []
    for make in (OPTIMIZERS["adam"], lambda: wrapped(make=OPTIMIZERS["adam"], servers=0)):
        net = cases.dense()
        net.set_weights(start)
        optimizer = make()
        callbacks = [nk.Distribute()] if isinstance(optimizer, nk.Wrapper) else []
        found.append(flat(trained(net, optimizer, (X, Y), callbacks)))
    assert np.array_equal(*found)


class ChangesWeight(k.Callback):
    """Changes a weight before the fourth batch."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            variable = self.model.trainable_variables[0]
            variable.assign(keras.ops.convert_to_numpy(variable) + 1)


@pytest.mark.parametrize("all_reduce", ["mpi", "shared"])
@pytest.mark.parametrize("servers", [0, 1])
def test_a_weight_changed_on_one_rank_is_named_when_the_epoch_ends(servers, all_reduce):
    start = start_of()

    def program(world):
        ranks = {"servers": servers, "group_size": 2, "all_reduce": all_reduce}
        optimizer = wrapped("EASGD", every=100, **ranks)
        train(world, start, optimizer, [ChangesWeight()] if world.rank == servers + 1 else [])

    text = f"parameters of rank {servers + 1} differ from those of rank {servers} of the same group"
    with pytest.raises(ConfigurationError, match=text):
        on_ranks(servers + 2, program)


@pytest.mark.parametrize("way", ["thread", "torch", "horovod", "shard"])
def test_ways_to_add_up_that_keras_cannot_have_are_refused_by_name(way):
    with pytest.raises(
        ConfigurationError, match=f"Synchronous: all_reduce='{way}' .*'auto'.*'mpi'.*'shared'"
    ):
        wrapped(servers=0, all_reduce=way)
    again = nk.Synchronous.from_config(wrapped(servers=0, all_reduce="mpi").get_config())
    assert again.ranks.all_reduce == "mpi"
