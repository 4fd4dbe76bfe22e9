"""Train in groups of ranks in Keras; each rank leaves its weights and its history behind."""

import sys
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk

SIZE, BATCH, EPOCHS = 53, 4, 2


def data():
    """All samples."""
    draw = np.random.default_rng(3)
    return draw.standard_normal((SIZE, 5)).astype("f4"), draw.standard_normal((SIZE, 3)).astype("f4")


def model_of():
    """The model, with the same weights everywhere."""
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    draw = np.random.default_rng(4)
    model.set_weights([0.5 * draw.standard_normal(one.shape).astype("f4") for one in model.weights])
    return model


def train(optimizer, given, batch_size, callbacks=()):
    """Train; the weights at the end, and the history."""
    model = model_of()
    model.compile(optimizer, "mse")
    history = model.fit(
        *given,
        batch_size=batch_size,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=data(),
        callbacks=[*callbacks],
        verbose=0,
    )
    return np.concatenate([one.ravel() for one in model.get_weights()]), history.history


if __name__ == "__main__":
    folder, servers, group_size, *names = sys.argv[1:]
    ranks = {"servers": int(servers), "group_size": int(group_size)}
    for name in names:  # of a wrapper, and perhaps of the way to add up gradients
        wrapper, _, all_reduce = name.partition("-")
        distribute, ways = nk.Distribute(), []

        def note(epoch, logs, distribute=distribute, ways=ways):
            group = distribute.team.member.group
            ways.append("none" if group is None else group.reducer.name)

        noting = keras.callbacks.LambdaCallback(on_epoch_begin=note)
        optimizer = getattr(nk, wrapper)(
            keras.optimizers.Adam(0.01), **ranks, all_reduce=all_reduce or "auto"
        )
        vector, history = train(optimizer, nk.shard(*data(), **ranks), BATCH, [distribute, noting])
        role = distribute.role.replace(" ", "-").replace(",", "")
        np.savez(Path(folder) / f"{name}.{role}.npz", vector=vector, way=ways[0], **history)
