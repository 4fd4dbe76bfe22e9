"""Train a GAN on toy calorimeter showers with Keras: two networks, two wrapped optimizers.

KERAS_BACKEND=torch python examples/gan_keras.py                          # one process
KERAS_BACKEND=torch mpiexec -n 3 python examples/gan_keras.py             # 1 server, 2 workers: Downpour
KERAS_BACKEND=tensorflow mpiexec -n 3 python examples/gan_keras.py --algorithm easgd

It prints the distance between generated and true showers before and after: the share of energy in the wrong
layer and at the wrong radius, and the error of the energy itself. JAX is not supported: its `fit` keeps the
state of one optimizer only. --algorithm none trains without wrappers, for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import keras
import numpy as np
from keras import layers, ops
from toy_calo import CELLS, LAYERS, differences, make_showers

import nnlo_keras as nk

WRAPPERS = {
    "downpour": nk.Downpour,
    "synchronous": nk.Synchronous,
    "easgd": lambda optimizer: nk.EASGD(optimizer, every=4),
    "none": lambda optimizer: optimizer,
}
NOISE = 16
MIDDLE_GEV = 50.0
if keras.backend.backend() == "torch":
    import torch

    stepping = torch.no_grad

    def gradients(loss_of, variables):
        loss = loss_of()
        return loss.detach(), torch.autograd.grad(loss, [variable.value for variable in variables])
else:
    import tensorflow as tf

    stepping = contextlib.nullcontext

    def gradients(loss_of, variables):
        with tf.GradientTape() as tape:
            loss = loss_of()
        return loss, tape.gradient(loss, [variable.value for variable in variables])


def generator():
    """Map noise and an energy to a shower: its shape, times the visible share of the energy."""
    noise, energy = keras.Input((NOISE,)), keras.Input((1,))
    x = ops.concatenate([noise, ops.log(energy / MIDDLE_GEV)], axis=1)
    for _ in range(2):
        x = layers.Dense(96, activation="leaky_relu")(x)
    seen = 1 + 0.3 * layers.Dense(1, activation="tanh", bias_initializer="ones")(x)
    cells = layers.Dense(LAYERS * CELLS * CELLS, activation="softmax")(x) * seen
    return keras.Model([noise, energy], ops.reshape(cells, (-1, LAYERS, CELLS, CELLS)))


def discriminator():
    """Score how real a shower looks, by its cells, layers, profile and energy, all blurred a little.

    Without the blur it would only learn that true showers have empty cells and generated ones do not.
    """
    cells, energy = keras.Input((LAYERS, CELLS, CELLS)), keras.Input((1,))
    views = [cells, ops.sum(cells, axis=(2, 3)), ops.sum(cells, axis=1)]
    views = [layers.GaussianNoise(0.2)(10 * layers.Flatten()(view)) for view in views]
    seen = layers.GaussianNoise(0.2)(10 * ops.sum(cells, axis=(1, 2, 3))[:, None] - 10)
    x = ops.concatenate([*views, seen, ops.log(energy / MIDDLE_GEV)], axis=1)
    for _ in range(2):
        x = layers.Dense(96, activation="leaky_relu")(x)
    return keras.Model([cells, energy], layers.Dense(1)(x))


class GAN(keras.Model):
    """Generator and discriminator, each with its own optimizer."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()
        self.seeds = keras.random.SeedGenerator(5)
        self.built = True  # on torch Keras requires it of a model without call()

    def compile(self, g_optimizer, d_optimizer):
        """Build each optimizer with the variables it trains."""
        super().compile()
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer
        g_optimizer.build(self.generator.trainable_variables)
        d_optimizer.build(self.discriminator.trainable_variables)

    def train_step(self, data):
        """Train both on one batch."""
        cells, energy = data
        noise = keras.random.normal((ops.shape(cells)[0], NOISE), seed=self.seeds)

        def judge():
            made = self.discriminator([self.generator([noise, energy]), energy], training=True)
            true = self.discriminator([cells, energy], training=True)
            return ops.mean(ops.softplus(made) + ops.softplus(-true))

        def deceive():
            made = self.discriminator([self.generator([noise, energy]), energy], training=True)
            return ops.mean(ops.softplus(-made))

        # Take both gradients before either step: the result is then the same with steps here or on a server.
        d_loss, d_gradients = gradients(judge, self.discriminator.trainable_variables)
        g_loss, g_gradients = gradients(deceive, self.generator.trainable_variables)
        with stepping():
            self.d_optimizer.apply(d_gradients, self.discriminator.trainable_variables)
            self.g_optimizer.apply(g_gradients, self.generator.trainable_variables)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def showers(self, energy):
        """Return generated showers of the given energies."""
        noise = np.random.default_rng(7).standard_normal((len(energy), NOISE)).astype("f4")
        with stepping():
            return ops.convert_to_numpy(self.generator([noise, energy]))


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=WRAPPERS, default="downpour")
    parser.add_argument("--showers", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=15)
    if keras.backend.backend() == "jax":
        parser.error("KERAS_BACKEND=jax: two optimizers need torch or tensorflow")
    return parser.parse_args()


def main():
    chosen = options()
    cells, energy = make_showers(chosen.showers, seed=1)
    true, at = make_showers(2000, seed=2)

    keras.utils.set_random_seed(1)
    gan, wrap = GAN(), WRAPPERS[chosen.algorithm]
    gan.compile(*(wrap(keras.optimizers.Adam(rate, beta_1=0.5)) for rate in (1e-3, 1e-3)))

    def measured():
        found = differences(gan.showers(at), true)
        return "  ".join(f"{name} {value:.4f}" for name, value in found.items())

    before = measured()
    distribute = nk.Distribute()
    start = time.perf_counter()
    callbacks = [] if chosen.algorithm == "none" else [distribute]
    gan.fit(*nk.shard(cells, energy), batch_size=50, epochs=chosen.epochs, callbacks=callbacks, verbose=2)
    seconds = time.perf_counter() - start
    distribute.say(f"before: {before}\nafter {seconds:.1f} s of {chosen.algorithm}: {measured()}")


if __name__ == "__main__":
    main()
