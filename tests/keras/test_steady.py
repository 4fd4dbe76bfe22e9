"""Steady in Keras' fit: progress ends epochs, a schedule follows it, and what it cannot have is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import nnlo_keras as nk  # noqa: E402
from nnlo_keras._stretches import OptionsByPlace  # noqa: E402
from nnlo_keras._variable_layout import layout_of  # noqa: E402
from nnlo_keras._weights import KerasCenterOptimizer, Weights  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

SIZE, BATCH, EPOCHS = 103, 10, 3


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Let optimizers that `fit` builds early know that there are several ranks, as under a launcher."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")


def samples():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SIZE, 4)).astype("float32")
    return x, (x.sum(1, keepdims=True) + 2 * draw.normal(size=(SIZE, 1))).astype("float32")


def model_of(optimizer):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.set_weights([np.array([[0.1], [-0.2], [0.3], [0.0]], "float32"), np.zeros(1, "float32")])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def plain(name):
    if name == "adam":
        return keras.optimizers.Adam(0.01)
    if name == "schedule":
        return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.01, 30), momentum=0.9)
    return keras.optimizers.SGD(0.01, momentum=0.9)


class Batches(keras.callbacks.Callback):
    """Counts the batches of each epoch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_begin(self, epoch, logs=None):
        self.found.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.found[-1] += 1


def trained(world, *, name="momentum", fit=None, **options):
    """Train on a rank; return its model, its batches in each epoch and its report."""
    distribute, batches = nk.Distribute(world=world), Batches()
    model = model_of(nk.Steady(plain(name), **options))
    shared = {key: options[key] for key in ("servers", "group_size") if key in options}
    x, y = nk.shard(*samples(), world=world, **shared)
    more = {"batch_size": BATCH} | (fit or {})
    model.fit(x, y, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[distribute, batches], **more)
    return model, batches.found, distribute.report


def on_ranks(size, **options):
    with MemoryCluster(size) as cluster:
        return cluster.run(lambda world: trained(world, **options), timeout_s=100)


@pytest.mark.parametrize("name", ["momentum", "adam", "schedule"])
def test_one_worker_is_the_plain_fit(name):
    alone = model_of(plain(name))
    alone.fit(*samples(), batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False)
    for model, batches, _ in on_ranks(2, name=name)[1:]:
        assert batches == [11] * EPOCHS
        for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {}),
        (4, {"name": "adam"}),
        (4, {"name": "schedule"}),
        (4, {"lag": 1}),
        (5, {"servers": 2}),
        (4, {"synchronous": True}),
    ],
)
def test_an_epoch_ends_when_its_progress_is_made(ranks, options):
    server, *workers = on_ranks(ranks, **options)
    assert server[2].progress >= EPOCHS * SIZE
    workers = workers[options.get("servers", 1) - 1 :]
    made = sum(sum(batches) for _, batches, _ in workers)
    assert made > EPOCHS * SIZE / BATCH * 1.1, "three workers are not worth three while gradients agree"
    # Each worker stops by what it last heard: no epoch goes on for more than a step of each after its end.
    assert server[2].progress < EPOCHS * (SIZE + 2 * len(workers) * BATCH)


def test_passes_of_fixed_number_are_one_pass_an_epoch():
    workers = on_ranks(4, passes="fixed")[1:]
    assert [batches for _, batches, _ in workers] == [[4] * EPOCHS] * 3


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(3, {"servers": 0}), (5, {"group_size": 2}), (5, {"group_size": 4, "name": "adam"})],
)
def test_the_ranks_of_a_group_end_an_epoch_together(ranks, options):
    """Of 103 samples the groups' ranks have unequal shares."""
    servers, size = options.get("servers", 1), options.get("group_size", ranks)
    found = on_ranks(ranks, **options)
    for lead in range(servers, ranks, size):
        group = found[lead : lead + size]
        assert len({tuple(batches) for _, batches, _ in group}) == 1
        for model, _, _ in group:
            np.testing.assert_array_equal(model.get_weights()[0], group[0][0].get_weights()[0])
    assert found[0][2].progress >= EPOCHS * SIZE
    made = sum(sum(batches) for _, batches, _ in found[servers:])
    assert made > EPOCHS * SIZE / BATCH * 1.1
    fixed = on_ranks(ranks, passes="fixed", **options)[servers:]
    assert sum(sum(batches) for _, batches, _ in fixed) < made


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (lambda: keras.optimizers.Adam(amsgrad=True), "amsgrad=True"),
        (lambda: keras.optimizers.SGD(use_ema=True), "use_ema=True"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        (lambda: keras.optimizers.Adam(loss_scale_factor=8.0), "loss_scale_factor=8.0"),
        (
            lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.CosineDecay(0.1, 9)),
            "RMSprop with a LearningRateSchedule",
        ),
    ],
)
def test_options_that_its_steps_do_not_have_are_refused_by_name(optimizer, problem):
    with pytest.raises(ConfigurationError, match="Steady cannot wrap") as refusal:
        nk.Steady(optimizer())
    assert problem in str(refusal.value)


def test_the_schedule_is_read_at_the_progress():
    optimizer = plain("schedule")
    model = model_of(optimizer)
    layout = layout_of(model.trainable_variables)
    options = OptionsByPlace(optimizer, model.trainable_variables, layout, slice(0, layout.size))
    for progress in (0.0, 7.9, 30.0):
        (one, *_) = options.read(None, progress)
        expected = 0.01 * (1 + np.cos(np.pi * int(progress) / 30)) / 2
        assert one.learning_rate == pytest.approx(expected, abs=1e-8)


def test_weight_decay_is_read_variable_by_variable():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
    model = model_of(optimizer)
    kernel, bias = model.trainable_variables
    optimizer.exclude_from_weight_decay([bias])
    optimizer.build([kernel, bias])
    layout = layout_of([kernel, bias])
    decays = {
        place: one.weight_decay
        for one in OptionsByPlace(optimizer, [kernel, bias], layout, slice(0, layout.size)).read(None, 0.0)
        for place in range(one.place.start, one.place.stop)
    }
    first, second = (segment.offset for segment in layout.segments)
    assert (decays[first], decays[second]) == (0.3, 0.0)


@pytest.mark.parametrize("most", [0.5, 0.0])  # Keras ignores 0
@pytest.mark.parametrize("option", ["clipvalue", "clipnorm", "global_clipnorm"])
def test_gradients_are_clipped_as_the_optimizer_clips_them(option, most):
    optimizer = keras.optimizers.SGD(1.0, **{option: most})
    model = model_of(optimizer)
    variables = model.trainable_variables
    gradients = [np.array([[1.5], [-0.2], [0.4], [-2.0]], "float32"), np.array([0.8], "float32")]
    before = model.get_weights()
    optimizer.apply_gradients(
        [(keras.ops.convert_to_tensor(g), variable) for g, variable in zip(gradients, variables, strict=True)]
    )
    expected = [old - new for old, new in zip(before, model.get_weights(), strict=True)]

    layout = layout_of(variables)
    flat = np.zeros(layout.size, "float32")
    for segment, gradient in zip(layout.segments, gradients, strict=True):
        flat[segment.place] = gradient.ravel()
    OptionsByPlace(optimizer, variables, layout, slice(0, layout.size)).clip(flat)
    for segment, one in zip(layout.segments, expected, strict=True):
        np.testing.assert_allclose(flat[segment.place], one.ravel(), rtol=1e-5, atol=1e-6)


def test_a_scaled_step_starts_where_a_retreat_has_put_the_centre():
    model = model_of(nk.Steady(keras.optimizers.RMSprop(0.1)))
    wrapper = model.optimizer
    wrapper.build(model.trainable_variables)
    weights = Weights(model, [wrapper])
    optimizer = KerasCenterOptimizer([wrapper], weights, slice(0, weights.layout.size))
    center = weights.parameters.vector
    begun, gradient = center.copy(), np.ones_like(center)
    for _ in range(3):
        optimizer.step_scaled(center, gradient, 1.0)
    np.copyto(center, begun)
    optimizer.step_scaled(center, gradient, 0.0)
    np.testing.assert_array_equal(center, begun)


class Rows(keras.utils.PyDataset):
    """The samples in batches, which count the passes that have begun and ended."""

    def __init__(self):
        super().__init__()
        self.begun = self.ended = 0
        self.x, self.y = samples()

    def __len__(self):
        return math.ceil(SIZE / BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


@pytest.mark.parametrize("kind", ["sequence", "file"])
def test_a_pass_that_is_left_early_is_ended(kind, tmp_path):
    """Keras refuses to begin a pass of a PyDataset while another is open."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = samples()

    def program(world):
        given = Rows()
        if kind == "sequence":
            data = nk.shard(given, world=world)
        else:
            options = {"features": "x", "labels": "y", "batch_size": BATCH, "shuffle": False}
            data = nk.H5Sequence(str(tmp_path / "a.h5"), world=world, **options)
        distribute, batches = nk.Distribute(world=world), Batches()
        model_of(nk.Steady(plain("momentum"))).fit(
            data, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[distribute, batches]
        )
        return given, batches.found, distribute.report

    with MemoryCluster(4) as cluster:
        server, *workers = cluster.run(program, timeout_s=100)
    # Without the size of all samples a worker takes three times its own, which are 40, 40 and 23.
    first, last = (SIZE, SIZE) if kind == "file" else (3 * 23, 3 * 40)
    assert server[2].progress >= (EPOCHS - 1) * first + last
    for given, batches, _ in workers:
        assert len(batches) == EPOCHS
        assert min(batches) > 0
        assert given.ended >= given.begun > EPOCHS or kind == "file"  # Keras may end one to build


def constrained(world, optimizer, **options):
    """Train a model whose kernel is pulled below zero, where it may not be; return its weights."""
    x, _ = samples()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_constraint="non_neg")])
    model.set_weights([np.ones((4, 1), "float32"), np.zeros(1, "float32")])
    model.compile(nk.Steady(optimizer, **options), "mse")
    shared = {key: options[key] for key in ("servers", "group_size") if key in options}
    x, y = nk.shard(x, -x.sum(1, keepdims=True), world=world, **shared)
    callbacks = [nk.Distribute(world=world)]
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=callbacks)
    return model.get_weights()


@pytest.mark.parametrize(
    ("ranks", "name", "options"),
    [
        (3, "SGD", {}),
        (3, "AdamW", {}),
        (3, "SGD", {"lag": 1}),
        (3, "SGD", {"synchronous": True}),
        (4, "Adam", {"servers": 2}),
        (3, "Adam", {"servers": 0}),
        (5, "SGD", {"group_size": 2}),
    ],
)
def test_constraints_hold_on_every_rank(ranks, name, options):
    with MemoryCluster(ranks) as cluster:
        make = getattr(keras.optimizers, name)
        found = cluster.run(lambda world: constrained(world, make(0.1), **options), timeout_s=100)
    for kernel, _ in found:
        assert kernel.min() >= 0
        assert kernel.max() < 0.9, "nothing has moved"


def test_a_schedule_cannot_scale_the_steps_of_constrained_variables():
    refusal = pytest.raises(
        ConfigurationError, match="kernel' has a constraint, so Steady scales the learning"
    )
    with refusal, MemoryCluster(3) as cluster:
        cluster.run(lambda world: constrained(world, plain("schedule")), timeout_s=100)


def test_one_worker_keeps_constraints_with_a_schedule():
    with MemoryCluster(2) as cluster:
        found = cluster.run(lambda world: constrained(world, plain("schedule")), timeout_s=100)
    assert min(kernel.min() for kernel, _ in found) >= 0
