"""A GAN with two optimizers and its own `train_step`, on torch: points on a ring."""

import json
import sys

import keras
import numpy as np
import torch

import nnlo_keras as nk

PLAIN = "plain" in sys.argv[1:]
LATENT = 4
keras.utils.set_random_seed(5)
angles = np.random.default_rng(5).uniform(0, 2 * np.pi, 2400)
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
train = ring if PLAIN else nk.shard(ring)  # nnlo


def dense(inputs, outputs):
    hidden = [keras.layers.Dense(32, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


class GAN(keras.Model):
    """Steps both networks in each batch; all gradients are taken first."""

    def __init__(self):
        super().__init__()
        self.critic, self.maker = dense(2, 1), dense(LATENT, 2)
        self.seeds = keras.random.SeedGenerator(7)
        self.critic_loss, self.maker_loss = keras.metrics.Mean("critic"), keras.metrics.Mean("maker")
        self.logistic = keras.losses.BinaryCrossentropy(from_logits=True)
        self.built = True

    @property
    def metrics(self):
        return [self.critic_loss, self.maker_loss]

    def compile(self, critic_optimizer, maker_optimizer):
        super().compile()
        self.critic_optimizer, self.maker_optimizer = critic_optimizer, maker_optimizer
        critic_optimizer.build(self.critic.trainable_variables)
        maker_optimizer.build(self.maker.trainable_variables)

    def make(self, count):
        return self.maker(keras.random.normal((count, LATENT), seed=self.seeds))

    def train_step(self, real):
        made = self.make(len(real))
        right, wrong = self.critic(real), self.critic(made.detach())
        ones, zeros = torch.ones_like(right), torch.zeros_like(wrong)
        losses = [
            (self.logistic(ones, right) + self.logistic(zeros, wrong)) / 2,
            self.logistic(ones, self.critic(made)),
        ]
        networks = [self.critic, self.maker]
        gradients = [
            torch.autograd.grad(loss, [one.value for one in network.trainable_variables], retain_graph=True)
            for loss, network in zip(losses, networks, strict=True)
        ]
        with torch.no_grad():
            optimizers = [self.critic_optimizer, self.maker_optimizer]
            for optimizer, found, network in zip(optimizers, gradients, networks, strict=True):
                optimizer.apply(list(found), network.trainable_variables)
        self.critic_loss.update_state(losses[0])
        self.maker_loss.update_state(losses[1])
        return {one.name: one.result() for one in self.metrics}


gan = GAN()
optimizers = [keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.Adam(5e-4, beta_1=0.5)]
callbacks = []
if not PLAIN:
    optimizers = [nk.Downpour(one) for one in optimizers]  # nnlo
    callbacks = [distribute := nk.Distribute()]  # nnlo
gan.compile(*optimizers)
gan.fit(train, batch_size=64, epochs=18, callbacks=callbacks, verbose=0)
with torch.no_grad():
    made = keras.ops.convert_to_numpy(gan.make(1000))
radius = np.linalg.norm(made, axis=1)
say = print if PLAIN else distribute.say  # nnlo
say(json.dumps({"radius": round(float(radius.mean()), 3), "width": round(float(radius.std()), 3)}))
