"""A synchronous training of Keras; each rank prints how many samples it was trained with, and the centre."""

import hashlib

import keras
import numpy as np

import nnlo_keras

SAMPLES = 240


class Count(keras.layers.Layer):
    """Counts the samples that it was trained with."""

    def build(self, shape):
        self.samples = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.samples.assign_add(keras.ops.shape(inputs)[0])
        return inputs


keras.utils.set_random_seed(1)
inputs = np.random.default_rng(1).normal(size=(SAMPLES, 3)).astype("f4")
count = Count()
hidden = keras.layers.Dense(8, activation="tanh")
model = keras.Sequential([keras.Input((3,)), count, hidden, keras.layers.Dense(1)])
model.compile(optimizer=nnlo_keras.Synchronous(keras.optimizers.Adam(0.01)), loss="mse", jit_compile=False)
data = nnlo_keras.shard(inputs, inputs[:, :1])
model.fit(*data, batch_size=10, epochs=3, verbose=0, shuffle=False, callbacks=[nnlo_keras.Distribute()])
bits = b"".join(variable.numpy().tobytes() for variable in model.trainable_variables)
print(f"\nsamples {int(count.samples)} {hashlib.sha256(bits).hexdigest()}", flush=True)
