"""A search by Optuna for a network of Keras, whose trials a callback prunes by the metric of each epoch."""

from __future__ import annotations

import keras
import optuna

from tests.clients.common import WRAPPED, blobs, finish, first

if WRAPPED:
    import nnlo_keras as nk

(X, Y), HELD_OUT = ([part.numpy() for part in blobs(seed=seed)] for seed in (0, 1))


class KerasPruningCallback(keras.callbacks.Callback):
    """Stands for the one of Optuna's integration, which need not be installed."""

    def __init__(self, trial, monitor):
        super().__init__()
        self.trial, self.monitor = trial, monitor

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(float(logs[self.monitor]), step=epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"epoch {epoch}")


def objective(trial: optuna.Trial) -> float:
    keras.utils.set_random_seed(trial.number)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(trial.suggest_int("width", 4, 32, log=True), activation="relu"),
            keras.layers.Dropout(trial.suggest_float("dropout", 0.0, 0.4)),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    train, optimizer = (X, Y), keras.optimizers.Adam(trial.suggest_float("rate", 1e-4, 1e-1, log=True))
    callbacks = [KerasPruningCallback(trial, "val_accuracy")]
    if WRAPPED:
        train, optimizer = nk.shard(X, Y), nk.Downpour(optimizer)
        callbacks.append(nk.Distribute())
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(*train, batch_size=32, epochs=4, validation_data=HELD_OUT, callbacks=callbacks, verbose=0)
    return model.evaluate(*HELD_OUT, verbose=0)[1]


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=3),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    if WRAPPED:
        nk.optimize(study, objective, n_trials=12, block_size=2)
    else:
        study.optimize(objective, n_trials=12)
    pruned = len(study.get_trials(states=(optuna.trial.TrialState.PRUNED,)))
    finish(first(), accuracy=study.best_value, pruned=pruned)


if __name__ == "__main__":
    main()
