"""Gradients that leave while Keras' backward pass makes the rest: the same training, bit for bit."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.plugin import Session  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
BACKEND = keras.backend.backend()
on_torch = pytest.mark.skipif(BACKEND != "torch", reason=f"about torch; KERAS_BACKEND is {BACKEND}")
SIZE, BATCH, EPOCHS = 23, 3, 2


@pytest.fixture(autouse=True)
def _all_is_worth_sending(monkeypatch):
    monkeypatch.setattr("nnlo_common.training._gradients_ahead._WORTH_SENDING", 1)
    monkeypatch.setattr("nnlo_common.training._gradients_ahead._WORTH_A_PART", 14)
    # Optimizers that `fit` builds early know that there are several ranks, as under a launcher.
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")


def samples():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SIZE, 3)).astype("float32")
    return x, (x.sum(1, keepdims=True) > 0).astype("float32")


class Model(keras.Model):
    """Variables that are trained, frozen, and used in some batches only."""

    batches = 0

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(7, activation="tanh")
        self.frozen = keras.layers.Dense(7, trainable=False)
        self.seldom = keras.layers.Dense(7)
        self.last = keras.layers.Dense(1, dtype="float32")

    def call(self, inputs, training=False):
        hidden = self.frozen(self.first(inputs))
        if training:
            self.batches += 1
        return self.last(hidden if self.batches % 4 == 2 else self.seldom(hidden))


class Halved(Model):
    """Its step changes gradients where the back end counts no change."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        gradients = [variable.value.grad for variable in self.trainable_variables]
        for one in gradients:
            if one is not None:
                one.data.mul_(0.5)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Twice(Model):
    """Its step adds up two backward passes."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        for _ in range(2):
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
        self.optimizer.apply(
            [variable.value.grad for variable in self.trainable_variables], self.trainable_variables
        )
        return {"loss": loss}


class Seldom(Model):
    """Its optimizer does not get each gradient, as under a LossScaleOptimizer one that is not finite."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        if self.batches % 3:
            gradients = [variable.value.grad for variable in self.trainable_variables]
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Afterwards(Model):
    """Its step adds to gradients that the optimizer has got."""

    steps = 1

    def train_step(self, data):
        found = super().train_step(data)
        self.compute_loss(data[0], data[1], self(data[0])).backward()
        if self.steps > 1:
            self.optimizer.apply([one.value.grad for one in self.trainable_variables])
        return found


class AndAgain(Afterwards):
    """The optimizer gets them once more."""

    steps = 2


class Apart(Model):
    """Its step makes gradients that autograd puts nowhere."""

    def train_step(self, data):
        import torch

        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        values = [variable.value for variable in self.trainable_variables]
        gradients = torch.autograd.grad(loss, values, allow_unused=True)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def scaled():
    return keras.optimizers.SGD(0.1, loss_scale_factor=8.0)


def train(make, wrapper, *, optimizer=sgd, workers=1, scale=None, **options):
    """Train on so many workers; return the weights of each rank, and how often what was sent."""
    servers = options.setdefault("servers", 1)

    def program(world):
        model = make()
        model(np.zeros((1, 3), "f4"))
        draw = np.random.default_rng(3)
        model.set_weights([draw.normal(size=one.shape).astype("f4") for one in model.get_weights()])
        wrapped = wrapper(optimizer(), **options)
        if scale:
            wrapped = keras.optimizers.LossScaleOptimizer(wrapped, initial_scale=scale)
        model.compile(wrapped, "binary_crossentropy")
        x, y = nk.shard(*samples(), world=world, servers=servers)
        callbacks = [nk.Distribute(world=world)]
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=callbacks)
        return np.concatenate([one.ravel() for one in model.get_weights()])

    with MemoryCluster(servers + workers) as cluster:
        results = cluster.run(program, 100)
        return results, dict(cluster.points._reached)


WRAPPERS = {
    "downpour": (nk.Downpour, {}),
    "several servers": (nk.Downpour, {"servers": 3}),
    "adam": (nk.Downpour, {"optimizer": lambda: keras.optimizers.Adam(0.01)}),
    "a scaled loss": (nk.Downpour, {"optimizer": scaled}),
    "agn": (nk.AGN, {"every": 1}),
    "steady": (nk.Steady, {}),
    "together": (nk.Synchronous, {"workers": 3}),
}


@on_torch
@pytest.mark.filterwarnings("ignore:overlap=True brings nothing here")
@pytest.mark.parametrize("make", [Model, Halved, Twice, Seldom, Apart])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.sampled(12)
def test_a_training_ends_with_the_same_bits(name, make):
    wrapper, options = WRAPPERS[name]
    expected, before = train(make, wrapper, **options)
    found, sent = train(make, wrapper, **options, overlap=True)
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    assert not any(what == "send AHEAD" for _, what in before)
    assert any(what == "send AHEAD" for _, what in sent) == (make is not Apart)
    assert any(what == "send WITHDRAWN" for _, what in sent) == (make in (Halved, Twice, Seldom))


@on_torch
def test_a_long_gradient_leaves_from_where_it_is_made(monkeypatch):
    seen = []
    leave = Session.send_ahead

    def noted(team, start, apart=()):
        seen.append([place.stop - place.start for place, _ in apart])
        leave(team, start, apart)

    monkeypatch.setattr(Session, "send_ahead", noted)
    train(Model, nk.Downpour, overlap=True)
    assert [49] in seen
    assert [21] in seen
    assert all(size >= 14 for sizes in seen for size in sizes)


@on_torch
def test_nothing_is_left_in_the_model():
    def program(world):
        model = Model()  # here, as Keras counts the names of layers in each thread
        model(np.zeros((1, 3), "f4"))
        model.compile(nk.Downpour(sgd(), overlap=True), "binary_crossentropy")
        x, y = nk.shard(*samples(), world=world)
        model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[nk.Distribute(world=world)])
        return model

    with MemoryCluster(2) as cluster:
        models = cluster.run(program, 100)
    for model in models:
        assert not any(one.value._post_accumulate_grad_hooks for one in model.trainable_variables)


@pytest.mark.skipif(BACKEND == "torch", reason="torch has it")
def test_other_back_ends_refuse_it_by_name():
    with pytest.raises(ConfigurationError, match=f"Downpour with overlap=True .* runs on {BACKEND}"):
        nk.Downpour(sgd(), overlap=True)


@on_torch
@pytest.mark.parametrize(
    ("wrapper", "options", "problem"),
    [
        (nk.Downpour, {"lag": 1}, "with lag=1, which hides"),
        (nk.Downpour, {"every": 2}, r"with Downpour\(every=2\): it does not send"),
        (nk.EASGD, {}, r"with EASGD\(.*\): it does not send"),
        (nk.Downpour, {"group_size": 2}, "in groups"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(wrapper, options, problem):
    with pytest.raises(ConfigurationError, match=f"overlap=True is not possible {problem}"):
        train(Model, wrapper, overlap=True, workers=2, **options)


@on_torch
@pytest.mark.parametrize("make", [Afterwards, AndAgain])
def test_a_gradient_that_changes_after_the_step_is_refused_by_name(make):
    with pytest.raises(ConfigurationError, match="kernel was changed after the optimizer got it"):
        train(make, nk.Downpour, overlap=True)


@on_torch
@pytest.mark.filterwarnings("ignore:overlap=True brings nothing here")
def test_a_step_that_overflows_moves_nothing():
    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="mixed_float16")])

    expected, _ = train(make, nk.Downpour, scale=1e30)
    found, _ = train(make, nk.Downpour, scale=1e30, overlap=True)
    assert np.isfinite(expected).all()
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()


@on_torch
def test_variables_that_are_copied_are_refused_by_name():
    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="bfloat16", name="short")])

    with pytest.raises(ConfigurationError, match="short/kernel is bfloat16 on cpu; leave overlap out"):
        train(make, nk.Downpour, overlap=True)
