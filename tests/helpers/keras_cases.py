"""Models, data and optimizers for Keras trainings that are compared bit for bit."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

SAMPLES = 40

_Dense = keras.layers.Dense


def data():
    draw = np.random.default_rng(2)
    x = draw.standard_normal((SAMPLES, 5)).astype("f4")
    return x, draw.integers(0, 3, SAMPLES)


def _tanh():
    return _Dense(8, activation="tanh")


def dense(*makers):
    keras.utils.set_random_seed(1)
    middle = [make() for make in makers or [_tanh]]
    return keras.Sequential([keras.Input((5,)), *middle, _Dense(3)])


def forked():
    """Two inputs, two outputs, and a layer that is used twice."""
    keras.utils.set_random_seed(1)
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    shared = _Dense(4, activation="tanh")
    both = keras.layers.concatenate([shared(left), shared(right)])
    return keras.Model([left, right], [_Dense(3, name="kind")(both), _Dense(1, name="size")(both)])


def words(*makers):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    middle = [make() for make in makers or [layers.Flatten]]
    return keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(12, 4), *middle, _Dense(3)])


def sentences():
    """One layer of each kind that a text model may have."""
    layers = keras.layers
    return words(
        lambda: layers.Conv1D(6, 2, activation="tanh"),
        _normal,
        lambda: layers.LSTM(4, return_sequences=True),
        lambda: layers.GRU(4),
        _dropout,
    )


def frozen():
    model = dense(_tanh, _tanh)
    model.layers[1].trainable = False
    return model


def constrained():
    norm = keras.constraints.MaxNorm(0.5)
    return dense(lambda: _Dense(8, activation="tanh", kernel_constraint=norm, bias_constraint=norm))


def _halve(epoch, rate):
    return rate / 2 if epoch else rate


def _sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


def _adam(**options):
    return keras.optimizers.Adam(0.01, **options)


def _dropout():
    return keras.layers.Dropout(0.5, seed=7)


def _normal():
    return keras.layers.BatchNormalization()


def _without_decay_of_biases():
    optimizer = _o.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


_schedules = keras.optimizers.schedules
_o = keras.optimizers

#: Every optimizer that Keras has, by name, but for the base and those that hold others, which are refused.
OPTIMIZERS = {
    name: optimizer
    for name, optimizer in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(optimizer, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
}

#: Every schedule of the learning rate that Keras has, with options that matter within a few steps.
SCHEDULES = {
    "CosineDecay": lambda: _schedules.CosineDecay(0.05, 8, warmup_target=0.2, warmup_steps=3),
    "CosineDecayRestarts": lambda: _schedules.CosineDecayRestarts(0.2, 4),
    "ExponentialDecay": lambda: _schedules.ExponentialDecay(0.2, 3, 0.5),
    "InverseTimeDecay": lambda: _schedules.InverseTimeDecay(0.2, 3, 0.5, staircase=True),
    "PiecewiseConstantDecay": lambda: _schedules.PiecewiseConstantDecay([3, 7], [0.2, 0.1, 0.05]),
    "PolynomialDecay": lambda: _schedules.PolynomialDecay(0.2, 10, power=2.0),
}


@dataclass(frozen=True)
class Case:
    """A training: its model, its optimizer, and what `compile` and `fit` are given besides."""

    optimizer: Callable[[], Any] = _sgd
    model: Callable[[], Any] = dense
    callbacks: Sequence[Callable[[], Any]] = ()
    compile: Mapping[str, Any] = field(default_factory=dict)
    fit: Callable[[], Mapping[str, Any]] = dict
    policy: str = "float32"
    build_first: bool = False
    backends: Sequence[str] = ("torch", "tensorflow", "jax")


def _of_class(optimizer):
    # On TensorFlow plain `fit` builds its optimizer within the training step, where ScheduleFreeAdamW then
    # begins its average anew at each step. Our servers build theirs before.
    return Case(lambda: optimizer(0.01), build_first=optimizer.__name__ == "ScheduleFreeAdamW")


CASES = {
    **{name: _of_class(optimizer) for name, optimizer in OPTIMIZERS.items()},
    "momentum": Case(lambda: _sgd(momentum=0.9)),
    "clipnorm": Case(lambda: _sgd(clipnorm=0.1)),
    "global clipnorm": Case(lambda: _sgd(global_clipnorm=0.1)),
    "accumulation": Case(lambda: _adam(gradient_accumulation_steps=3)),
    "averages": Case(lambda: _sgd(use_ema=True, ema_momentum=0.8)),
    "schedule": Case(lambda: _o.SGD(SCHEDULES["ExponentialDecay"]())),
    "scheduler": Case(callbacks=(lambda: keras.callbacks.LearningRateScheduler(_halve),)),
    "normal": Case(_adam, lambda: dense(_tanh, _normal)),
    "dropout": Case(model=lambda: dense(_tanh, _dropout)),
    "forked": Case(_adam, forked),
    # On TensorFlow plain Adam is given the gradient of an Embedding in slices, and squares those of the same
    # row before it adds them; at the centre it gets their sum, as on the other back ends.
    "words": Case(lambda: _sgd(momentum=0.9), words),
    "frozen": Case(lambda: _o.AdamW(0.01), frozen),
    # The gradients of the first step are too large for 16 bits, so that nothing may move.
    "float16": Case(
        _adam, policy="mixed_float16", fit=lambda: {"sample_weight": np.full(SAMPLES, 1e3, "f4")}
    ),
    "weighed classes": Case(fit=lambda: {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
    "weighed samples": Case(fit=lambda: {"sample_weight": np.linspace(0, 2, SAMPLES, dtype="f4")}),
    "several steps at once": Case(_adam, compile={"steps_per_execution": 3}, backends=("tensorflow", "jax")),
}

#: What is compared in `make test-all` only.
MORE = {
    **{f"schedule {name}": Case(lambda make=make: _o.SGD(make())) for name, make in SCHEDULES.items()},
    "callable rate": Case(lambda: _o.SGD(lambda: 0.1)),
    "nesterov": Case(lambda: _sgd(momentum=0.9, nesterov=True)),
    "amsgrad": Case(lambda: _adam(amsgrad=True)),
    "centered": Case(lambda: _o.RMSprop(0.01, momentum=0.5, centered=True)),
    "decay": Case(lambda: _sgd(weight_decay=0.1)),
    "decay of some": Case(_without_decay_of_biases),
    "clipvalue": Case(lambda: _sgd(clipvalue=0.01)),
    "overwriting averages": Case(lambda: _sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)),
    "averages of Adam": Case(lambda: _adam(use_ema=True, ema_momentum=0.8)),
    "accumulation, clipped": Case(lambda: _adam(gradient_accumulation_steps=2, clipvalue=0.01)),
    "accumulation, averaged": Case(lambda: _sgd(gradient_accumulation_steps=2, use_ema=True)),
    "scaled loss": Case(lambda: _sgd(loss_scale_factor=64.0)),
    "constraints": Case(model=constrained),
    "bfloat16": Case(_adam, policy="mixed_bfloat16"),
    "float16, normal": Case(model=lambda: dense(_tanh, _normal), policy="mixed_float16"),
    "eagerly": Case(_adam, compile={"run_eagerly": True}),
    "compiled": Case(_adam, compile={"jit_compile": True}, backends=("tensorflow",)),
    "not compiled": Case(_adam, compile={"jit_compile": False}, backends=("jax",)),
    "several steps, compiled": Case(
        compile={"steps_per_execution": 3, "jit_compile": True}, backends=("tensorflow",)
    ),
    "sentences": Case(_sgd, sentences),
}


def cases(table):
    """The names of those cases that the back end can do."""
    return [name for name, case in table.items() if keras.backend.backend() in case.backends]


def step_by_step(name):
    """Whether Keras lets us see each batch of a case, so that nothing is sent but single gradients."""
    return "steps_per_execution" not in (CASES | MORE)[name].compile


def compiled(model, optimizer, **options):
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = {"kind": sparse, "size": "mse"} if len(model.outputs) == 2 else sparse
    model.compile(optimizer=optimizer, loss=loss, **options)
    return model


def samples_for(model):
    """The inputs and targets that suit one of the models."""
    x, y = data()
    if len(model.inputs) == 2:
        return [x, x[::-1].copy()], {"kind": y, "size": x[:, :1]}
    if "int" in model.inputs[0].dtype:
        return (np.abs(x) * 4).astype("i4") % 12, y
    return x, y


def train(name, wrap, callbacks=()):
    """Train one case; return the model."""
    return train_case((CASES | MORE)[name], wrap, callbacks)


def train_case(case, wrap, callbacks=()):
    keras.config.set_dtype_policy(case.policy)
    try:
        model = compiled(case.model(), wrap(case.optimizer()), **case.compile)
        if case.build_first:
            model.optimizer.build(model.trainable_variables)
        x, y = samples_for(model)
        keras.utils.set_random_seed(4)
        callbacks = [*(one() for one in case.callbacks), *callbacks]
        options = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False, **case.fit()}
        model.fit(x, y, callbacks=callbacks, **options)
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def weights(model):
    """Everything but the states of seed generators."""
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights if "seed" not in variable.path]


def same(one, other):
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
