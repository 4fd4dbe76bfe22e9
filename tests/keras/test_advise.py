"""`nnlo_keras.advise`: what the probe sees of a compiled model, and that it leaves it as it was."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from nnlo_common.simulation import _advice  # noqa: E402
from nnlo_keras._advise import KerasProbed  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fewer_layouts(monkeypatch):
    """Leave out the largest numbers of ranks, which take seconds."""
    monkeypatch.setattr(_advice, "WORKERS", (1, 2, 4))
    monkeypatch.setattr(_advice, "RANKS", (2, 4))


def data(size=160):
    draws = np.random.default_rng(0)
    x = draws.normal(size=(size, 6)).astype("f4")
    return x, x[:, :2] + 0.1 * draws.normal(size=(size, 2)).astype("f4")


def network(optimizer=None, loss="mse"):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(1e-3) if optimizer is None else optimizer, loss)
    return model


class Batches(keras.utils.PyDataset):
    """Batches of 16 samples."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        x, y = data()
        return x[16 * index : 16 * index + 16], y[16 * index : 16 * index + 16]


@pytest.mark.parametrize("arrays", [True, False], ids=["arrays", "dataset"])
def test_the_model_is_as_before(arrays, tmp_path):
    model = network(nk.Steady(keras.optimizers.Adam(1e-3)))
    before = model.get_weights()
    given = (*data(),) if arrays else (Batches(),)
    options = {"batch_size": 16} if arrays else {}
    advice = nk.advise(model, *given, **options, seconds=1, folder=tmp_path / "a")
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    facts = advice.facts
    assert (facts.batch, facts.samples, facts.parameters, facts.slots) == (16, 160, 90, 2)
    assert not model.optimizer.inner_optimizer.built
    assert (tmp_path / "a" / "advice.html").stat().st_size > 1000
    model.fit(*data(), verbose=0)  # it trains as if nothing had been


def test_its_gradients_are_those_of_finite_differences():
    model = network()
    one = KerasProbed(model, model.loss, model.optimizer, *data(), batch_size=32)
    batch = one.read(32)
    x, y = map(keras.ops.convert_to_tensor, batch)
    found = one.gradient(batch)
    again = one.gradient(batch)
    np.testing.assert_allclose(found, again, rtol=1e-5, atol=1e-7)  # nothing of the last one is left
    variable = model.trainable_variables[0]
    kernel = keras.ops.convert_to_numpy(variable).copy()

    def loss(values):
        variable.assign(values)
        output = model(x, training=True)
        return float(keras.ops.convert_to_numpy(keras.ops.mean(keras.ops.square(output - y))))

    for place in (0, 7, 20):
        step = np.zeros(kernel.size, "f4")
        step[place] = 1e-2
        step = step.reshape(kernel.shape)
        slope = (loss(kernel + step) - loss(kernel - step)) / 2e-2
        assert found[place] == pytest.approx(slope, abs=2e-3)


def test_a_planted_underflow_is_named():
    def tiny(labels, output):
        return 1e-9 * keras.ops.mean(keras.ops.square(labels - output), axis=-1)

    advice = nk.advise(network(loss=tiny), *data(), batch_size=16, seconds=1)
    assert advice.flushed > 0.5
    assert advice.loss_scale is not None
    assert f"a loss scale of {advice.loss_scale:.0f}" in advice.section("float16")[0]


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(2)]), (*data(),), "compile it before advise"),
        (network, (Batches(), None, 16), "batch_size=16 is for arrays"),
        (network, (data()[0],), "arrays x and y, or a PyDataset"),
        (network, (data(2)[0], data(2)[1]), "there are 2 samples"),
        (lambda: network(keras.optimizers.SGD(1e30)), (*data(),), "not finite|the loss is"),
    ],
)
def test_what_cannot_be_tried_is_refused_and_nothing_is_written(make, given, text, tmp_path):
    x, y, *batch = (*given, None)[:3] if len(given) < 3 else given
    with np.errstate(all="ignore"), pytest.raises(ConfigurationError, match=text):
        nk.advise(make(), x, y, batch_size=batch[0] if batch else None, seconds=1, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_model_without_inputs_is_refused():
    class Own(keras.Model):
        def call(self, x):
            return x

    model = Own()
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match="no inputs that Keras knows"):
        nk.advise(model, *data())
