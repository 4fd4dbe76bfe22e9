"""Models, data and optimizers for Keras trainings that are compared bit for bit."""

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


def words():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(12, 4), layers.Flatten(), _Dense(3)]
    )


def frozen():
    model = dense(_tanh, _tanh)
    model.layers[1].trainable = False
    return model


def _halve(epoch, rate):
    return rate / 2 if epoch else rate


def _sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


def _dropout():
    return keras.layers.Dropout(0.5, seed=7)


def _normal():
    return keras.layers.BatchNormalization()


_schedules = keras.optimizers.schedules
_o = keras.optimizers

#: name: (model, optimizer, callbacks)
CASES = {
    "sgd": (dense, _sgd, ()),
    "momentum": (dense, lambda: _sgd(momentum=0.9), ()),
    "nesterov": (dense, lambda: _sgd(momentum=0.9, nesterov=True), ()),
    "adam": (dense, lambda: _o.Adam(0.01), ()),
    "amsgrad": (dense, lambda: _o.Adam(0.01, amsgrad=True), ()),
    "adamw": (dense, lambda: _o.AdamW(0.01, weight_decay=0.1), ()),
    "rmsprop": (dense, lambda: _o.RMSprop(0.01, momentum=0.5), ()),
    "adagrad": (dense, lambda: _o.Adagrad(0.05), ()),
    "clipnorm": (dense, lambda: _sgd(clipnorm=0.1), ()),
    "global clipnorm": (dense, lambda: _sgd(global_clipnorm=0.1), ()),
    "accumulation": (dense, lambda: _o.Adam(0.01, gradient_accumulation_steps=3), ()),
    "averages": (dense, lambda: _sgd(use_ema=True, ema_momentum=0.8), ()),
    "overwriting averages": (
        dense,
        lambda: _sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4),
        (),
    ),
    "schedule": (dense, lambda: _o.SGD(_schedules.ExponentialDecay(0.2, 3, 0.5)), ()),
    "scheduler": (dense, _sgd, (lambda: keras.callbacks.LearningRateScheduler(_halve),)),
    "normal": (lambda: dense(_tanh, _normal), lambda: _o.Adam(0.01), ()),
    "dropout": (lambda: dense(_tanh, _dropout), _sgd, ()),
    "forked": (forked, lambda: _o.Adam(0.01), ()),
    # On TensorFlow plain Adam is given the gradient of an Embedding in slices, and squares those of the same
    # row before it adds them; at the centre it gets their sum, as on the other back ends.
    "words": (words, lambda: _sgd(momentum=0.9), ()),
    "frozen": (frozen, lambda: _o.AdamW(0.01), ()),
}


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
    model_of, make, extra = CASES[name]
    model = compiled(model_of(), wrap(make()))
    x, y = samples_for(model)
    keras.utils.set_random_seed(4)
    made = [one() for one in extra]
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=[*made, *callbacks])
    return model


def weights(model):
    """Everything but the states of seed generators."""
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights if "seed" not in variable.path]
