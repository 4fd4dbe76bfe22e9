"""Train with frozen weights; write the statistics after each epoch as the first server has them.

The name of a kind of training, and a folder, are the arguments.
"""

import sys
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk

EPOCHS, BATCHES, SIZE = 3, 7, 8
KINDS = ("fit", "executions", "eager", "twice", "alternating", "again")


def batches():
    """Samples in batches of the same samples, in another order each."""
    draw = np.random.default_rng(2)
    same = draw.standard_normal((SIZE, 3)).astype("f4")
    return [draw.permutation(same) for _ in range(BATCHES)]


def norm(name, **options):
    return keras.layers.BatchNormalization(name=name, **options)


def layers_of(x):
    x = norm("usual")(x)
    x = norm("quick", momentum=0.9)(x)
    shared = norm("shared", momentum=0.95)
    x = shared(x) - 2 * shared(x * 3)
    resting = norm("resting")
    resting.trainable = False
    x = resting(keras.layers.Reshape((3, 1))(x))
    x = keras.layers.TimeDistributed(norm("timed", momentum=0.97))(x)
    return keras.layers.Dense(1)(keras.layers.Flatten()(x))


class Twice(keras.Model):
    """Calls its layers twice in each batch."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        again = self(x, training=training)
        return super().compute_loss(x, y, y_pred + again, sample_weight, training=training)


class Alternating(keras.Model):
    """Calls its layers once more in every other batch, as the batches are counted."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.count = keras.Variable(0, dtype="int32", trainable=False, name="count")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        self.count.assign(self.count + 1)
        more = keras.ops.equal(self.count % 2, 0)
        return loss + keras.ops.cond(more, lambda: keras.ops.mean(self(x, training=training)), lambda: 0.0)


def model_of(kind):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    made = {"twice": Twice, "alternating": Alternating}.get(kind, keras.Model)
    return made(inputs, layers_of(inputs))


class See(keras.callbacks.Callback):
    """Notes the statistics after each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        pairs = [(one.path, np.array(keras.ops.convert_to_numpy(one))) for one in self.model.weights]
        self.seen.append({path: value for path, value in pairs if "moving" in path})


def train(kind, *, world=None, plain=False):
    """The role of this rank, and the statistics after each epoch."""
    x = batches()
    model, see, distribute = model_of(kind), See(), nk.Distribute(world=world)
    # In threads the optimizer is built before its ranks are known; gradients could not be added up.
    threads = world is not None and not world.own_process
    wrapper = keras.optimizers.SGD(0.0)
    if not plain:
        wrapper = nk.LocalSGD(wrapper, every=1) if threads else nk.Synchronous(wrapper)
    options = {"steps_per_execution": 2} if kind == "executions" else {}
    model.compile(wrapper, "mse", run_eagerly=kind == "eager", **options)
    rank, workers = (0, 1) if plain or world is None else (world.rank - 1, world.size - 1)
    mine = np.concatenate(x[rank::workers] if rank >= 0 else x[:1])
    for epochs in (1, EPOCHS - 1) if kind == "again" else (EPOCHS,):
        model.fit(
            mine,
            np.zeros((len(mine), 1), "f4"),
            batch_size=SIZE,
            shuffle=False,
            epochs=epochs,
            callbacks=[see] if plain else [distribute, see],
            verbose=0,
        )
    assert all("call" not in vars(layer) for layer in model._flatten_layers())
    return "alone" if plain else distribute.role, see.seen


if __name__ == "__main__":
    from nnlo_common.training._joining import launched

    world = launched()
    for kind in sys.argv[2].split(","):
        role, seen = train(kind, world=world, plain=world is None)
        if role in ("alone", "server 0"):
            found = {f"{epoch} {path}": each[path] for epoch, each in enumerate(seen) for path in each}
            np.savez(Path(sys.argv[1], f"{kind}.npz"), **found)
