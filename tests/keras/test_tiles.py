"""`nnlo_keras.infer_tiles` and `nnlo tile` with Keras: equal to the whole image and the whole volume."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common.commands._cli import main

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
nk = pytest.importorskip("nnlo_keras")
pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def net(dims, classes=3):
    """A small U-Net."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    conv, up, pool = (
        getattr(layers, f"{name}{dims}D{end}")
        for name, end in (("Conv", ""), ("Conv", "Transpose"), ("MaxPooling", ""))
    )
    x = keras.Input((*[None] * dims, 1))
    first = conv(4, 3, padding="same", activation="relu")(x)
    inner = conv(8, 3, padding="same", activation="relu")(pool(2)(first))
    both = layers.Concatenate()([first, up(4, 2, strides=2)(inner)])
    return keras.Model(x, conv(classes, 3, padding="same")(both))


def volume(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("f4")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "tile"), [((50, 36), 24), ((20, 22, 30), 20)])
def test_tiles_give_what_the_whole_gives(shape, tile):
    model, data = net(len(shape)), volume(*shape)
    whole = np.moveaxis(model.predict(data[None, ..., None], verbose=0)[0], -1, 0)
    found = nk.infer_tiles(model, data, tile=tile)
    np.testing.assert_allclose(found.outputs, whole, atol=1e-5)
    assert found.margin == (5,) * len(shape)
    assert found.tiles > 1


@pytest.mark.extended
@pytest.mark.slow
def test_a_large_volume_is_what_the_whole_gives(tmp_path):
    # JAX's convolution would take more memory than there is for the larger one as a whole.
    shape, tile = ((160, 128, 128), 40) if keras.backend.backend() == "jax" else ((512, 256, 256), 100)
    data, model = volume(*shape), net(3, classes=2)
    found = nk.infer_tiles(model, data, tmp_path / "y.npy", tile=tile)
    assert found.tiles > 50
    whole = np.moveaxis(
        np.asarray(keras.ops.convert_to_numpy(model.predict_on_batch(data[None, ..., None])))[0], -1, 0
    )
    np.testing.assert_allclose(np.load(tmp_path / "y.npy", mmap_mode="r"), whole, atol=1e-5)


@pytest.mark.slow
def test_the_command_writes_what_the_whole_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, data = net(2), volume(50, 36)
    model.save("net.keras")
    np.save("v.npy", data)
    words = ["tile", "net.keras", "--data", "v.npy", "--tile", "24", "--out", "y.npy", "--reduce", "argmax"]
    assert main([*words, "--plan"]) == 0
    assert main(words) == 0
    whole = model.predict(data[None, ..., None], verbose=0)[0].argmax(-1)
    assert (np.load("y.npy") == whole).mean() > 0.999
