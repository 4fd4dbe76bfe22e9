"""LARS and LARC around Keras optimizers, against the core's in NumPy, alone and at the centre."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import LARS as CoreLARS  # noqa: E402
from nnlo_common import SGD, ConfigurationError  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

KINDS = {"LARS": (nk.LARS, False), "LARC": (nk.LARC, True)}
SHAPES = [(5, 4), (4,), (4,), (4, 2), (2,)]


def variables():
    draws = np.random.default_rng(0)
    return [keras.Variable(draws.normal(size=shape).astype("f4")) for shape in SHAPES]


def gradients(step):
    """Gradients of very different lengths."""
    draws = np.random.default_rng(step + 1)
    return [(draws.normal(size=shape) * 10.0 ** (at % 4 - 2)).astype("f4") for at, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_each_step_is_the_cores(kind, decay):
    make, clip = KINDS[kind]
    weights = variables()
    optimizer = make(keras.optimizers.SGD(0.4), trust=0.02, weight_decay=decay)
    expected = [keras.ops.convert_to_numpy(one).copy() for one in weights]
    core = [
        CoreLARS(0.4, weight_decay=decay, trust=0.02, clip=clip) if one.ndim > 1 else SGD(0.4)
        for one in expected
    ]
    for step in range(5):
        for one, gradient, own in zip(expected, gradients(step), core, strict=True):
            whole = gradient + decay * one if one.ndim == 1 else gradient
            own.step(one.reshape(-1), np.ascontiguousarray(whole.reshape(-1), "f4"))
        optimizer.apply([keras.ops.convert_to_tensor(one) for one in gradients(step)], weights)
    for one, variable in zip(expected, weights, strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), one, rtol=2e-5, atol=1e-6)
    assert int(optimizer.iterations) == 5


def test_a_step_of_lars_has_the_length_that_the_formula_says():
    for length in (1e-4, 1.0, 1e4):
        (x, *_), (gradient, *_) = variables(), gradients(0)
        before = keras.ops.convert_to_numpy(x).copy()
        optimizer = nk.LARS(keras.optimizers.SGD(0.5), trust=0.01, epsilon=0.0)
        optimizer.apply([keras.ops.convert_to_tensor(np.float32(length) * gradient)], [x])
        moved = np.linalg.norm(keras.ops.convert_to_numpy(x) - before)
        assert moved == pytest.approx(0.5 * 0.01 * np.linalg.norm(before), rel=1e-4)


def test_what_has_no_direction_is_left_to_the_optimizer():
    zero, still = keras.Variable(np.zeros((2, 2), "f4")), keras.Variable(np.ones((2, 2), "f4"))
    optimizer = nk.LARS(keras.optimizers.SGD(0.5), weight_decay=0.1)
    optimizer.apply([keras.ops.ones((2, 2)), keras.ops.zeros((2, 2))], [zero, still])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(zero), -0.5)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(still), 1)


def network():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
    return keras.Sequential(layers)


def data():
    draws = np.random.default_rng(4)
    return draws.normal(size=(24, 5)).astype("f4"), draws.normal(size=(24, 2)).astype("f4")


def losses_of(model, **options):
    fitted = model.fit(*data(), batch_size=8, shuffle=False, verbose=0, **options)
    return [float(loss) for loss in fitted.history["loss"]]


def test_fit_compile_and_save_know_it(tmp_path):
    model = network()
    model.compile(nk.LARS(keras.optimizers.SGD(0.05, momentum=0.9), trust=0.2), "mse")
    losses = losses_of(model, epochs=3)
    assert losses[-1] < losses[0]
    model.optimizer.learning_rate = 0.5
    assert float(keras.ops.convert_to_numpy(model.optimizer.inner_optimizer.learning_rate)) == 0.5
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras", custom_objects={"LARS": nk.LARS})
    assert again.optimizer.get_config() == model.optimizer.get_config()
    for one, other in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(v) for v in (one, other)))
    rest = [losses_of(one, epochs=1) for one in (model, again)]
    assert rest[0] == pytest.approx(rest[1])


def test_a_wrapper_alone_does_what_it_does():
    losses = []
    for wrap in (lambda one: one, nk.Synchronous, nk.LocalSGD):
        model = network()
        model.compile(wrap(nk.LARC(keras.optimizers.SGD(0.5), trust=0.02)), "mse")
        callbacks = [nk.Distribute()] if losses else []
        losses.append(losses_of(model, epochs=2, callbacks=callbacks))
    assert losses[1] == losses[2] == pytest.approx(losses[0])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nk.LARS(keras.optimizers.SGD(0.1), trust=0), "trust=0.* above 0"),
        (lambda: nk.LARC(keras.optimizers.SGD(0.1), epsilon=-1), r"LARC\(epsilon=-1\)"),
        (lambda: nk.LARS(keras.optimizers.AdamW(0.1)), "set weight_decay of LARS"),
        (lambda: nk.LARS(keras.optimizers.SGD(0.1, clipnorm=1.0)), "leave clipnorm out"),
        (lambda: nk.LARS(nk.Downpour(keras.optimizers.SGD(0.1))), "cannot wrap Downpour"),
        (lambda: nk.GEM(nk.LARS(keras.optimizers.SGD(0.1))), "needs a keras.optimizers.SGD"),
    ],
)
def test_what_makes_no_sense_is_refused(call, text):
    with pytest.raises(ConfigurationError, match=text):
        call()
