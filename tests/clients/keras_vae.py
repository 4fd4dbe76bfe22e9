"""A variational autoencoder with its own `train_step`, on torch: curves that two numbers describe."""

import json
import sys

import keras
import numpy as np
import torch

import nnlo_keras as nk

PLAIN = "plain" in sys.argv[1:]
LATENT, LENGTH = 2, 16
keras.utils.set_random_seed(11)
draw = np.random.default_rng(11)
phases, speeds = draw.uniform(0, 2, (2, 1500, 1))
curves = np.sin(phases + speeds * np.linspace(0, 3, LENGTH)) + 0.05 * draw.standard_normal((1500, LENGTH))
train, test = curves[:1200].astype("float32"), curves[1200:].astype("float32")
train = train if PLAIN else nk.shard(train)  # nnlo


class VAE(keras.Model):
    """Encodes to a mean and a log variance, and decodes a draw."""

    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.encoder = keras.Sequential(
            [keras.Input((LENGTH,)), dense(32, activation="relu"), dense(2 * LATENT)]
        )
        self.decoder = keras.Sequential([keras.Input((LATENT,)), dense(32, activation="relu"), dense(LENGTH)])
        self.seeds = keras.random.SeedGenerator(13)
        self.total = keras.metrics.Mean("loss")
        self.built = True

    @property
    def metrics(self):
        return [self.total]

    def losses_of(self, x):
        mean, log_variance = keras.ops.split(self.encoder(x), 2, axis=1)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
        again = self.decoder(mean + keras.ops.exp(log_variance / 2) * noise)
        divergence = -0.5 * keras.ops.sum(1 + log_variance - mean**2 - keras.ops.exp(log_variance), axis=1)
        return keras.ops.mean(keras.ops.sum((x - again) ** 2, axis=1) + 0.05 * divergence)

    def train_step(self, x):
        self.zero_grad()
        loss = self.losses_of(x)
        loss.backward()
        with torch.no_grad():
            gradients = [one.value.grad for one in self.trainable_variables]
            self.optimizer.apply(gradients, self.trainable_variables)
        self.total.update_state(loss)
        return {"loss": self.total.result()}

    def test_step(self, x):
        self.total.update_state(self.losses_of(x))
        return {"loss": self.total.result()}


model = VAE()
optimizer = keras.optimizers.Adam(5e-3)
callbacks = []
if not PLAIN:
    optimizer = nk.Downpour(optimizer)  # nnlo
    callbacks = [distribute := nk.Distribute()]  # nnlo
model.compile(optimizer=optimizer)
model.fit(train, batch_size=32, epochs=10, validation_data=(test,), callbacks=callbacks, verbose=0)
found = model.evaluate(test, verbose=0, return_dict=True)
say = print if PLAIN else distribute.say  # nnlo
say(json.dumps({"loss": round(float(found["loss"]), 3)}))
