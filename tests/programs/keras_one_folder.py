"""Train Keras for some epochs, in one process or on several ranks; leave checkpoints and weights behind."""

import json
import sys

import keras
import numpy as np

import nnlo_keras as nk


def train(folder, epochs, wrapper, samples=20, **options):
    """Return the weights, and the epochs of the history."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(7, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    makes, extra = keras.optimizers.Adam, {}
    if wrapper in ("EASGD", "GEM"):
        makes, extra = keras.optimizers.SGD, {"momentum": 0.9}
    model.compile(getattr(nk, wrapper)(makes(0.01, **extra), **options), "mse")
    x = np.linspace(-1, 1, 5 * samples, dtype="f4").reshape(samples, 5)
    ranks = {name: options[name] for name in ("servers", "group_size") if name in options}
    callbacks = [nk.Distribute(), nk.Checkpoint(folder), keras.callbacks.EarlyStopping("loss", patience=50)]
    history = model.fit(
        *nk.shard(x, x[:, :3] ** 2, **ranks),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    weights = [np.ravel(keras.ops.convert_to_numpy(one)) for one in model.weights]
    return np.concatenate(weights), history.epoch


if __name__ == "__main__":
    folder, epochs, wrapper, options, result = sys.argv[1:]
    weights, begun = train(folder, int(epochs), wrapper, **json.loads(options))
    from nnlo_common.cluster._connecting import connect

    world = connect()
    rank = 0 if world is None else world.rank
    np.savez(f"{result}-{rank}.npz", weights=weights, begun=begun)
