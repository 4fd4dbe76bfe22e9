"""Fit with every kind of data, on three ranks, and leave behind which samples each rank has seen."""

import json
import math
import sys
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk
from nnlo_common.cluster._connecting import connect
from tests.helpers.keras_cases import compiled, data, dense, weights

FOLDER = Path(sys.argv[1])
BACKEND = keras.backend.backend()
RANK = connect().rank
WORKER, WORKERS = RANK - 1, 2
SAMPLES, HELD_OUT, EPOCHS, BATCH = 47, 13, 2, 5
found = {}

#: The first number of a sample is its own.
X = np.stack([np.arange(SAMPLES), np.ones(SAMPLES), np.zeros(SAMPLES)], axis=1).astype("f4")
Y = X[:, :1] / SAMPLES


class Count(keras.layers.Layer):
    """Counts how often each sample comes by, in training and in validation."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(2 * SAMPLES,), dtype="int32", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, inputs, training=False):
        number = keras.ops.cast(inputs[:, 0], "int32") + (SAMPLES if training else 0)
        self.seen.assign_add(keras.ops.sum(keras.ops.one_hot(number, 2 * SAMPLES, dtype="int32"), axis=0))
        return inputs


def one_input():
    return keras.Sequential([keras.Input((3,)), Count(), keras.layers.Dense(1)])


def two_inputs():
    number, rest = keras.Input((1,), name="number"), keras.Input((2,), name="rest")
    both = Count()(keras.layers.concatenate([number, rest]))
    return keras.Model({"number": number, "rest": rest}, keras.layers.Dense(1)(both))


def two_in_a_list():
    number, rest = keras.Input((1,)), keras.Input((2,))
    both = Count()(keras.layers.concatenate([number, rest]))
    return keras.Model([number, rest], keras.layers.Dense(1)(both))


def fit(piece, model, x, y=None, **options):
    keras.utils.set_random_seed(RANK)
    # The numbers are large for weights, but nobody asks what is learnt.
    model.compile(nk.LocalSGD(keras.optimizers.SGD(1e-6), every=2), "mse")
    options = {"batch_size": BATCH} | options if y is not None else options
    model.fit(x, y, epochs=EPOCHS, verbose=0, callbacks=[nk.Distribute()], **options)
    (count,) = (layer for layer in model.layers if isinstance(layer, Count))
    validated, trained = np.split(keras.ops.convert_to_numpy(count.seen), 2)
    found[piece] = {"trained": trained.tolist(), "validated": validated.tolist()}


class Batches(keras.utils.PyDataset):
    """Batches of some samples; the last one is smaller."""

    def __init__(self, x, y, **options):
        super().__init__(**options)
        self.x, self.y = x, y

    def __len__(self):
        return math.ceil(len(self.x) / BATCH)

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


def arrays():
    fit("arrays", one_input(), *nk.shard(X, Y))
    x, y, weight = nk.shard(X, Y, np.ones(SAMPLES, "f4"))
    fit("weights", one_input(), x, y, sample_weight=weight)
    fit("dictionary", two_inputs(), *nk.shard({"number": X[:, :1], "rest": X[:, 1:]}, Y))
    fit("list", two_in_a_list(), *nk.shard([X[:, :1], X[:, 1:]], Y))
    tensor = keras.ops.convert_to_tensor
    fit("tensors", one_input(), *nk.shard(tensor(X), tensor(Y)))


def batches():
    fit("PyDataset", one_input(), nk.shard(Batches(X, Y)))
    # Keras's threads have fetched ahead when it asks for the first batch, to build the model, and what they
    # have fetched comes first in the first epoch: exact only in the same order.
    threads = nk.shard(Batches(X, Y, workers=2, max_queue_size=4))
    fit("PyDataset, threads", one_input(), threads, shuffle=False)
    x, y = nk.shard(X, Y)
    steps = math.ceil(len(x) / BATCH)

    def generator():
        while True:
            yield from (Batches(x, y)[index] for index in range(steps))

    fit("generator", one_input(), generator(), steps_per_epoch=steps)


def validation():
    held_out = X[:HELD_OUT], Y[:HELD_OUT]
    mine = nk.shard(X, Y)
    fit("validated on arrays", one_input(), *mine, validation_data=held_out)
    fit("validated on a PyDataset", one_input(), *mine, validation_data=Batches(*held_out))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        elements = tf.data.Dataset.from_tensor_slices(held_out).batch(BATCH)
        fit("validated on a tf.data.Dataset", one_input(), *mine, validation_data=elements)
    # Without shard() everybody has everything: the first 37, and the last ten to validate.
    fit("split", one_input(), X, Y, validation_split=10 / SAMPLES)


def hdf5():
    import h5py

    # Each rank has the same files; the second has no samples.
    folder = FOLDER / f"files{RANK}"
    folder.mkdir()
    for name, start, stop in [("a", 0, 20), ("b", 20, 20), ("c", 20, SAMPLES), ("held_out", 0, HELD_OUT)]:
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["x"], file["y"] = X[start:stop], Y[start:stop]
            file["inputs/1"], file["inputs/2"] = X[start:stop, :1], X[start:stop, 1:]
    options = {"labels": "y", "batch_size": BATCH, "block": 3, "window": 2}
    files = folder / "?.h5"
    fit("H5Sequence", one_input(), nk.H5Sequence(files, features="x", **options))
    leased = nk.H5Sequence(files, features="x", assignment="dynamic", **(options | {"window": 1}))
    fit("leased H5Sequence", one_input(), leased)
    leased = nk.H5Sequence(files, features="x", assignment="dynamic", **(options | {"window": SAMPLES}))
    fit("H5Sequence of one lease", one_input(), leased)
    fit("H5Sequence of groups", two_in_a_list(), nk.H5Sequence(files, features="inputs", **options))
    held_out = nk.H5Sequence(folder / "held_out.h5", features="x", shard=False, **options)
    fit("validated on an H5Sequence", one_input(), *nk.shard(X, Y), validation_data=held_out)


def tf_data():
    import tensorflow as tf

    elements = nk.shard(tf.data.Dataset.from_tensor_slices((X, Y)))
    fit("tf.data.Dataset", one_input(), elements.shuffle(SAMPLES).batch(BATCH))
    fit("endless tf.data.Dataset", one_input(), elements.repeat().batch(4), steps_per_epoch=4)


def torch_data():
    import torch
    from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    samples = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    fit("DataLoader", one_input(), DataLoader(nk.shard(samples), BATCH, shuffle=True))
    mine = range(1) if WORKER < 0 else range(WORKER, SAMPLES, WORKERS)
    fit("own sampler", one_input(), DataLoader(samples, BATCH, sampler=SubsetRandomSampler(mine)))
    spread = DistributedSampler(samples, WORKERS, max(WORKER, 0), drop_last=True, shuffle=False)
    fit("DistributedSampler", one_input(), DataLoader(samples, BATCH, sampler=spread))


def synchronous():
    """Two workers with batches of B are one process with batches of 2 B."""
    x, y = data()
    options = {"epochs": 3, "shuffle": False, "verbose": 0}

    def adam():
        return keras.optimizers.Adam(0.01)

    plain = compiled(dense(), adam())
    plain.fit(x, y, batch_size=8, **options)
    model = compiled(dense(), nk.Synchronous(adam()))
    model.fit(*nk.shard(x, y), batch_size=4, callbacks=[nk.Distribute()], **options)
    far = max(np.abs(a - b).max() for a, b in zip(weights(model), weights(plain), strict=True))
    moved = max(np.abs(a - b).max() for a, b in zip(weights(dense()), weights(plain), strict=True))
    found["synchronous"] = {"far": float(far), "moved": float(moved)}


pieces = [arrays, batches, validation, synchronous, hdf5]
pieces += {"tensorflow": [tf_data], "torch": [torch_data]}.get(BACKEND, [])
for piece in pieces:
    piece()
    print(RANK, piece.__name__, file=sys.stderr, flush=True)
(FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))
