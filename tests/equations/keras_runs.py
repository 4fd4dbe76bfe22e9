"""The trainings with nnlo_keras, on the back end that KERAS_BACKEND names, in which ranks are threads."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

import nnlo_keras as nk
from nnlo_common.testing import MemoryCluster, MemoryWorld
from nnlo_common.training._joining import within
from tests.equations.compared import RATES, Case, Recording
from tests.equations.network import BATCH, SIZE, Array, Batch, cut, initial
from tests.equations.turns import Turns

__all__ = ["gradient", "run"]


class Seen(keras.metrics.Metric):
    """Keeps the weights that each gradient is taken at, within the compiled training step.

    No callback looks at them meanwhile, so that nnlo_keras takes the way that it takes where nobody looks.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(name="seen")
        self.rows = self.add_variable((rows, SIZE), initializer="zeros", name="rows")
        self.count = self.add_variable((), initializer="zeros", dtype="int32", name="count")

    def note(self, model: Any) -> None:
        flat = ops.concatenate(
            [ops.reshape(ops.stop_gradient(v.value), (-1,)) for v in model.trainable_variables]
        )
        here = ops.expand_dims(ops.equal(ops.arange(self.rows.shape[0]), self.count.value), 1)
        self.rows.assign(ops.where(here, flat, self.rows.value))
        self.count.assign(self.count.value + 1)

    def update_state(self, *args: Any, **options: Any) -> None:
        """Do nothing: the loss calls `note`, before the step."""

    def result(self) -> Any:
        return ops.zeros(())

    def reset_state(self) -> None:
        """Keep what was seen in earlier epochs."""

    def values(self) -> list[Array]:
        count = int(ops.convert_to_numpy(self.count.value))
        return list(np.array(ops.convert_to_numpy(self.rows.value), np.float64)[:count])


class Look(keras.callbacks.Callback):
    """Notes what the epochs of a server end with, and the layout of its vectors; comes after Distribute."""

    def __init__(self, distribute: nk.Distribute) -> None:
        super().__init__()
        self.distribute, self.layout, self.epochs = distribute, None, []

    def on_train_begin(self, logs: Any = None) -> None:
        self.layout = self.distribute.team.model.parameters.layout

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(weights_of(self.model))


class LookClosely(Look):
    """Also looks at the weights after each execution."""

    def __init__(self, distribute: nk.Distribute, after: list[Array]) -> None:
        super().__init__(distribute)
        self.after = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after.append(weights_of(self.model))


def weights_of(model: Any) -> Array:
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    values = [ops.convert_to_numpy(variable.value).ravel() for variable in model.trainable_variables]
    return np.concatenate(values).astype(np.float64)


def optimizer_of(name: str) -> Any:
    rate, momentum = RATES[name]
    if name == "adam":
        return keras.optimizers.Adam(rate)
    return keras.optimizers.SGD(rate, momentum=momentum, nesterov=name == "nesterov")


def network(optimizer: Any, *, rows: int, together: int = 1) -> tuple[Any, Seen]:
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(2)])
    model.set_weights(cut(initial()))
    seen = Seen(rows)

    def loss(y: Any, scores: Any) -> Any:
        seen.note(model)
        return keras.losses.sparse_categorical_crossentropy(y, scores, from_logits=True)

    # XLA would take seconds to compile each step with TensorFlow; JAX cannot do without.
    jit_compile = keras.backend.backend() == "jax"
    model.compile(optimizer, loss, metrics=[seen], steps_per_execution=together, jit_compile=jit_compile)
    return model, seen


def gradient(batch: Batch) -> Array:
    """Return the gradient at the initial weights, by a step of plain SGD with the rate 1."""
    model, seen = network(keras.optimizers.SGD(1.0), rows=2)
    model.fit(batch.x, batch.y, batch_size=len(batch), verbose=0)
    assert np.array_equal(seen.values()[0], initial())
    return initial() - weights_of(model)


def run(case: Case) -> Recording:
    """Train, and return what was seen."""
    turns = Turns(case.servers, case.workers, case.pattern, case.epochs)
    after: list[list[Array]] = [[] for _ in range(case.workers)]

    def program(world: MemoryWorld) -> tuple[Any, Look, Seen]:
        with turns.taken(world), within(world):  # as if a launcher had started it
            return train(case, world, after)

    with turns.watched(), MemoryCluster(case.servers + case.workers) as cluster:
        ranks = cluster.run(program, timeout_s=60)
    models, looks, seen = zip(*ranks, strict=True)
    return Recording(
        order=turns.order,
        seen=[one.values() for one in seen[case.servers :]],
        after=after if case.watched else [],
        commits=turns.centre(looks[0].layout),
        epochs=looks[0].epochs,
        final=[weights_of(model) for model in models],
    )


def train(case: Case, world: MemoryWorld, after: list[list[Array]]) -> tuple[Any, Look, Seen]:
    """Make one rank's part: an ordinary fit."""
    worker, options = world.rank - case.servers, dict(case.options)
    if case.wrapper == "Steady":
        options["passes"] = "fixed"  # as many steps as there are batches
    if isinstance(options.get("local"), str):
        options["local"] = optimizer_of(options["local"])
    wrapper = getattr(nk, case.wrapper)(optimizer_of(case.optimizer), servers=case.servers, **options)
    batches = case.data(max(worker, 0))
    model, seen = network(wrapper, rows=len(batches) * case.epochs + 1, together=case.together)
    distribute = nk.Distribute(world=world)
    close = case.watched and worker >= 0
    look = LookClosely(distribute, after[worker]) if close else Look(distribute)
    model.fit(
        np.concatenate([batch.x for batch in batches]),
        np.concatenate([batch.y for batch in batches]),
        batch_size=BATCH,
        epochs=case.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[distribute, look],
    )
    return model, look, seen
