"""Searches with Keras over two blocks of two ranks: nk.optimize and MPITuner. On 5 ranks."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import keras
import keras_tuner
import numpy as np
import optuna

import nnlo_keras as nk
from nnlo_common.training._joining import launched

optuna.logging.set_verbosity(optuna.logging.WARNING)
X = np.random.default_rng(0).standard_normal((96, 3)).astype("f4")
Y = X.sum(1, keepdims=True)
HELD_OUT = {"validation_data": (X[:16], Y[:16])}


class Fault(keras.callbacks.Callback):
    """Fails on the worker of a block, in the middle of an epoch."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def on_train_batch_end(self, batch, logs=None):
        if self.when and batch == 2 and launched().rank == 1:
            raise ValueError("in the middle")


class KerasPruningCallback(keras.callbacks.Callback):
    """Stands for the one of Optuna's integration, which need not be installed; it asks on every rank."""

    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        assert launched().rank == 0, "a worker's metrics are not the centre's"
        self.trial.report(float(logs["loss"]), step=epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def network(rate, width=4):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(rate), loss="mse")
    return model


def objective(trial):
    keras.utils.set_random_seed(trial.seed)
    model = network(trial.suggest_float("rate", 1e-4, 1e-1, log=True))
    wrap = nk.Downpour if trial.number % 2 else nk.EASGD
    model.optimizer = wrap(model.optimizer, **({} if wrap is nk.Downpour else {"every": 2, "beta": 0.9}))
    pruning = nk.Pruning(trial) if trial.number % 3 else KerasPruningCallback(trial)
    callbacks = [pruning, Fault(trial.number == 2), nk.Distribute()]
    rate = 1e30 if trial.number == 3 else None
    if rate:
        model.optimizer.learning_rate = rate
    history = model.fit(
        *nk.shard(X, Y), batch_size=8, epochs=2, verbose=0, callbacks=callbacks, **HELD_OUT
    ).history
    return history.get("val_loss", [0.0])[-1]


def told(what, text):
    """Once, where all ranks say the same."""
    lines = launched().gather_text(text)
    assert len(set(lines)) == 1, lines
    if launched().rank == 0:
        print(f"{what}: {text}", flush=True)


def study():
    pruner = optuna.pruners.ThresholdPruner(upper=1.0, n_warmup_steps=0)
    made = nk.optimize(
        optuna.create_study(pruner=pruner), objective, n_trials=8, block_size=2, sampler="random"
    )
    told("study", " ".join(trial.state.name for trial in made.trials))


class Faulty(keras_tuner.HyperModel):
    def build(self, hp):
        return network(hp.Float("rate", 1e-3, 1e-1, sampling="log"), hp.Choice("width", [2, 3, 4]))

    def fit(self, hp, model, *args, callbacks, **options):
        with hp.conditional_scope("width", [3]):
            hp.Boolean("late")
        fault = Fault(hp.get("width") == 2)
        history = model.fit(*args, callbacks=[*callbacks, fault], **options)
        return {"val_loss": min(history.history["val_loss"])}


ORACLES = {
    "grid": lambda: keras_tuner.oracles.GridSearchOracle("val_loss", max_trials=6),
    "hyperband": lambda: keras_tuner.oracles.HyperbandOracle("val_loss", max_epochs=4, factor=2, seed=1),
    "evolutionary": lambda: "evolutionary",
}


def tuner(kind, block_size=2, folds=1, **layout):
    """A search, and the models of the best trial on all ranks."""
    folder = launched().gather_text(tempfile.mkdtemp() if launched().rank == 0 else "")[0]
    oracle = ORACLES[kind]()
    own = {"objective": "val_loss", "max_trials": 6, "seed": 0} if isinstance(oracle, str) else {}
    found = nk.MPITuner(
        Faulty() if kind == "grid" else lambda hp: Faulty().build(hp),
        oracle,
        block_size=block_size,
        folds=folds,
        distribute=lambda optimizer: nk.Downpour(optimizer, **layout),
        directory=folder,
        project_name="search",
        **own,
    )
    stopping = keras.callbacks.EarlyStopping(patience=3)
    held_out = HELD_OUT if folds == 1 else {}
    found.search(X, Y, batch_size=8, epochs=2, callbacks=[stopping], verbose=0, **held_out)
    (best,) = found.oracle.get_best_trials()
    (model,) = found.get_best_models()
    loss = model.evaluate(*HELD_OUT["validation_data"], verbose=0)
    if folds == 1 and kind != "grid":
        assert np.isclose(loss, best.score), (loss, best.score)
    trials = found.oracle.trials.values()
    assert all("in the middle" in one.message for one in trials if one.status == "FAILED")
    assert (Path(folder) / "search" / "oracle.json").exists()
    states, metrics = sorted({one.status for one in trials}), sorted(best.metrics.metrics)
    told(f"{kind}, {folds} folds", f"{len(trials)} trials, {states}, {metrics}, {loss:.5f}")


for name in sys.argv[1:]:
    if name == "study":
        study()
    elif name == "folds":
        tuner("evolutionary", 4, 2)
        tuner("evolutionary", 4, 3)
    elif name == "grouped":
        tuner("grid", servers=0)
        tuner("evolutionary", 4, servers=0)
        tuner("hyperband", 4, 1, group_size=3)
    else:
        tuner(name)
