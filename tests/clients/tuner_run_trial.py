"""A search with a tuner of its own, which tunes the size of batches, for a metric that is not of Keras."""

from __future__ import annotations

import keras
import keras_tuner
import numpy as np

from tests.clients.common import WRAPPED, blobs, finish, first

if WRAPPED:
    import nnlo_keras as nk
Base = nk.MPITuner if WRAPPED else keras_tuner.RandomSearch


def worst_class(model, x, y):
    """Return the share of the samples of a class that are recognized, of the class with the least."""
    chosen = model.predict(x, verbose=0).argmax(1)
    return min(float(np.mean(chosen[y == kind] == kind)) for kind in np.unique(y))


class LeastRecall(keras.callbacks.Callback):
    """Adds the metric to each epoch's."""

    def __init__(self, held_out):
        super().__init__()
        self.held_out = held_out

    def on_epoch_end(self, epoch, logs=None):
        logs["val_recall"] = worst_class(self.model, *self.held_out)


class BatchTuner(Base):
    """Chooses the size of the batches with the rest, and reports the last epoch's value, not the best."""

    def run_trial(self, trial, *args, **options):
        size = trial.hyperparameters.Int("batch", 16, 64, step=16)
        results = super().run_trial(trial, *args, batch_size=size, **options)
        return [{"val_recall": history.history["val_recall"][-1]} for history in results]


def build(hp):
    hidden = keras.layers.Dense(hp.Int("width", 8, 32, step=8), activation="relu")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(4, activation="softmax")])
    rate = hp.Float("rate", 1e-3, 1e-1, sampling="log")
    model.compile(keras.optimizers.RMSprop(rate), "sparse_categorical_crossentropy")
    return model


def main() -> None:
    (x, y), held_out = ([part.numpy() for part in blobs(seed=seed)] for seed in (0, 1))
    options = {"objective": keras_tuner.Objective("val_recall", "max"), "max_trials": 4, "seed": 3}
    options |= {"executions_per_trial": 2, "directory": "search", "project_name": "batch", "overwrite": True}
    if WRAPPED:
        tuner = BatchTuner(build, "random", block_size=2, distribute="downpour", **options)
    else:
        tuner = BatchTuner(build, **options)
    tuner.search(x, y, epochs=4, callbacks=[LeastRecall(held_out)], verbose=0)

    (best,) = tuner.oracle.get_best_trials()
    recall = worst_class(tuner.get_best_models()[0], *held_out)
    finish(first(), recall=recall, score=best.score, trials=len(tuner.oracle.trials))


if __name__ == "__main__":
    main()
