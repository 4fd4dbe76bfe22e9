"""A small training of Keras that notes which samples each worker has trained on; someone may be killed."""

import os
import sys
import time
from pathlib import Path

import h5py
import keras
import numpy as np
from mpi4py import MPI

import nnlo_keras
from tests.chaos import moments
from tests.helpers.counts import Count

folder, algorithm, (servers, spares, heir) = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:])
EPOCHS, SAMPLES = 3, 1200
rank = MPI.COMM_WORLD.Get_rank()
moments.prepare(folder, rank)  # before nnlo registers what it does at the end
moments.write_where_it_hangs(folder, rank)


def note(numbers):
    """Write down which samples a step is made with."""
    used.write(f"{time.monotonic()} {' '.join(map(str, numbers.tolist()))}\n")
    used.flush()


if keras.backend.backend() == "tensorflow":
    import tensorflow

    def note_at_each_step(numbers):
        """The graph of a step is made once, and calls this whenever it runs."""
        tensorflow.numpy_function(note, [numbers], [])
else:
    note_at_each_step = note


class NotedCount(Count):
    """Notes each step, too."""

    def call(self, inputs, training=False):
        if training:
            note_at_each_step(keras.ops.cast(inputs[:, -1], "int32"))
        return super().call(inputs, training=training)


class Pace(keras.callbacks.Callback):
    """Lets the training last long enough to be struck."""

    def on_train_begin(self, logs=None):
        (folder / f"pid{rank}").write_text(str(os.getpid()))

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)


used = (folder / f"used{rank}").open("a")
if not (folder / "data.h5").exists():
    inputs = np.random.default_rng(1).normal(size=(SAMPLES, 4)).astype(np.float32)
    inputs[:, -1] = np.arange(SAMPLES)
    with h5py.File(folder / f"data{rank}", "w") as file:
        file["x"], file["y"] = inputs, inputs[:, :1]
    (folder / f"data{rank}").rename(folder / "data.h5")
keras.utils.set_random_seed(1)
count = NotedCount(SAMPLES)
model = keras.Sequential([keras.Input((4,)), count, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
plain = keras.optimizers.SGD(1e-3, momentum=0.9 if algorithm == "GEM" else 0.0)
ranks = {"servers": servers, "spares": spares}
optimizer = getattr(nnlo_keras, algorithm)(plain, heir=bool(heir), **ranks)
model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
data = nnlo_keras.H5Sequence(
    folder / "data.h5", features="x", labels="y", batch_size=10, assignment="dynamic", **ranks
)
distribute = nnlo_keras.Distribute()
checkpoint = nnlo_keras.Checkpoint(folder / "run", minutes=0.1 / 60)
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Pace(), distribute, checkpoint])
np.save(folder / f"times{rank}", np.asarray(count.times.value))
distribute.say(f"finished: {distribute.report.lost}")
