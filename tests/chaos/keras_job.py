"""A small training of Keras that notes how many batches each worker has made; someone may be killed."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
from mpi4py import MPI

import nnlo_keras

folder, algorithm, servers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
EPOCHS, SAMPLES = 3, 1200

rank = MPI.COMM_WORLD.Get_rank()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
plain = keras.optimizers.SGD(1e-3, momentum=0.9 if algorithm == "GEM" else 0.0)
model.compile(optimizer=getattr(nnlo_keras, algorithm)(plain, servers=servers), loss="mse")
inputs = np.random.default_rng(1).normal(size=(SAMPLES, 3)).astype(np.float32)
shard = nnlo_keras.shard(inputs, inputs[:, :1], servers=servers)


class Note(keras.callbacks.Callback):
    """Writes down each batch."""

    def on_train_begin(self, logs=None):
        (folder / f"pid{rank}").write_text(str(os.getpid()))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        with (folder / f"used{rank}").open("a") as used:
            used.write(f"{self.epoch} {batch}\n")
        time.sleep(0.01)


distribute = nnlo_keras.Distribute()
model.fit(*shard, batch_size=10, epochs=EPOCHS, verbose=0, callbacks=[Note(), distribute])
if distribute.role == "server 0":
    print(f"finished: {distribute.report.lost}", flush=True)
