"""Models that are no chain of layers under one optimizer, and training steps of their own."""

import contextlib

import keras
import numpy as np

BACKEND = keras.backend.backend()
NOISE = 3
MIDDLE = np.array([1.5, -1.0], "f4")

_Dense = keras.layers.Dense


def points(count=240):
    """What the generator is to imitate."""
    draw = np.random.default_rng(4)
    return MIDDLE + 0.3 * draw.standard_normal((count, 2)).astype("f4")


def gradients(loss_of, variables):
    """A loss and its gradients."""
    if BACKEND == "torch":
        import torch

        loss = loss_of()
        return loss.detach(), torch.autograd.grad(loss, [variable.value for variable in variables])
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of()
    return loss, tape.gradient(loss, [variable.value for variable in variables])


def stepping():
    """Within it optimizers may change variables."""
    if BACKEND == "torch":
        import torch

        return torch.no_grad()
    return contextlib.nullcontext()


def judged(logits, real):
    """The loss of a discriminator that should have found them all real, or all generated."""
    return keras.ops.mean(keras.ops.softplus(-logits if real else logits))


class GAN(keras.Model):
    """Two models and two optimizers, and no call().

    Args:
        simultaneous: both gradients are taken before anything is stepped.
        patience: the generator is trained in every so many-th batch only.
    """

    def __init__(self, *, simultaneous=False, patience=1):
        keras.utils.set_random_seed(1)
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((2,)), _Dense(8, activation="tanh"), _Dense(1)], name="discriminator"
        )
        layers = [_Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU(), _Dense(2)]
        self.generator = keras.Sequential([keras.Input((NOISE,)), *layers], name="generator")
        self.seeds = keras.random.SeedGenerator(5)
        self.simultaneous, self.patience = simultaneous, patience
        self.batches = keras.Variable(0, dtype="int32", trainable=False, name="batches")
        self.built = True

    def compile(self, d_optimizer, g_optimizer, *, build=True, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        if build:
            d_optimizer.build(self.discriminator.trainable_variables)
            g_optimizer.build(self.generator.trainable_variables)

    def noise(self, like):
        return keras.random.normal((keras.ops.shape(like)[0], NOISE), seed=self.seeds)

    def discriminate(self, x):
        def loss():
            made = self.generator(self.noise(x), training=False)
            return judged(self.discriminator(x), True) + judged(self.discriminator(made), False)

        return gradients(loss, self.discriminator.trainable_variables)

    def generate(self, x):
        noise = self.noise(x)

        def loss():
            return judged(self.discriminator(self.generator(noise, training=True)), True)

        return gradients(loss, self.generator.trainable_variables)

    def step_discriminator(self, grads):
        with stepping():
            self.d_optimizer.apply(grads, self.discriminator.trainable_variables)

    def step_generator(self, grads):
        with stepping():
            self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_variables, strict=True))

    def train_step(self, x):
        x = x[0] if isinstance(x, tuple | list) else x
        d_loss, d_grads = self.discriminate(x)
        if self.simultaneous:
            g_loss, g_grads = self.generate(x)
            self.step_discriminator(d_grads)
            self.step_generator(g_grads)
            return {"d_loss": d_loss, "g_loss": g_loss}
        self.step_discriminator(d_grads)
        if self.patience == 1:
            g_loss, g_grads = self.generate(x)
            self.step_generator(g_grads)
            return {"d_loss": d_loss, "g_loss": g_loss}
        self.batches.assign_add(1)

        def step():
            self.step_generator(self.generate(x)[1])
            return keras.ops.zeros(())

        now = keras.ops.equal(self.batches.value % self.patience, 0)
        keras.ops.cond(now, step, lambda: keras.ops.zeros(()))
        return {"d_loss": d_loss}

    def miss(self):
        """How far the middle of what is generated is from the middle of the points."""
        noise = np.random.default_rng(6).standard_normal((100, NOISE)).astype("f4")
        made = keras.ops.convert_to_numpy(self.generator(noise, training=False))
        return float(np.linalg.norm(made.mean(axis=0) - MIDDLE))


class Pair(keras.Model):
    """Two regressions that have nothing to do with each other, trained in one step."""

    def __init__(self):
        keras.utils.set_random_seed(1)
        super().__init__()
        self.first = keras.Sequential([keras.Input((2,)), _Dense(7, activation="tanh"), _Dense(1)])
        self.second = keras.Sequential([keras.Input((2,)), _Dense(5, activation="tanh"), _Dense(2)])
        self.built = True

    def compile(self, optimizers):
        super().compile()
        self.optimizers = optimizers
        for optimizer, model in zip(optimizers, (self.first, self.second), strict=True):
            optimizer.build(model.trainable_variables)

    def train_step(self, data):
        x, y = data
        losses = {}
        for name, model, optimizer in zip("ab", (self.first, self.second), self.optimizers, strict=True):

            def loss(model=model):
                return keras.ops.mean(keras.ops.square(model(x) - y))

            losses[name], grads = gradients(loss, model.trainable_variables)
            with stepping():
                optimizer.apply(grads, model.trainable_variables)
        return losses


class Averaging(keras.Model):
    """One optimizer, not the model's own, and an average of its weights that no optimizer trains."""

    def __init__(self):
        keras.utils.set_random_seed(1)
        super().__init__()
        self.network = keras.Sequential([keras.Input((2,)), _Dense(6, activation="tanh"), _Dense(1)])
        self.average = keras.models.clone_model(self.network)
        self.average.set_weights(self.network.get_weights())
        self.built = True

    def compile(self, own):
        super().compile()
        self.own = own
        own.build(self.network.trainable_variables)

    def train_step(self, data):
        x, y = data

        def loss():
            return keras.ops.mean(keras.ops.square(self.network(x) - y))

        error, grads = gradients(loss, self.network.trainable_variables)
        with stepping():
            self.own.apply(grads, self.network.trainable_variables)
            for mean, weight in zip(self.average.weights, self.network.weights, strict=True):
                mean.assign(0.9 * mean.value + 0.1 * weight.value)
        return {"error": error}

    def miss(self, network, x, y):
        """How wrong a network is."""
        return float(np.mean((keras.ops.convert_to_numpy(network(x)) - y) ** 2))


class Subclassed(keras.Model):
    """A call() and layers that are not built before it."""

    def __init__(self):
        keras.utils.set_random_seed(1)
        super().__init__()
        self.inner = keras.Sequential(
            [_Dense(6, activation="tanh"), keras.layers.BatchNormalization(momentum=0.5)]
        )
        self.out = _Dense(1)

    def call(self, x, training=False):
        return self.out(self.inner(x, training=training))


def many():
    """Three inputs, two outputs, a layer and a model that are used twice."""
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((2,), name=name) for name in ("one", "two", "three")]
    shared = _Dense(4, activation="tanh", name="shared")
    nested = keras.Sequential([keras.Input((4,)), _Dense(3, activation="tanh"), _Dense(3)])
    left, right = nested(shared(inputs[0])), nested(shared(inputs[1]))
    both = keras.layers.concatenate([left, right, inputs[2]])
    return keras.Model(inputs, [_Dense(1, name="sum")(both), _Dense(2, name="pair")(both)])


def weights(model):
    """Everything but the states of seed generators, and counters."""
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights if "float" in variable.dtype]
