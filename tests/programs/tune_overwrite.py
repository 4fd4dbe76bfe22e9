"""Searches one after another in one directory, each begun by all ranks at once; they train nothing."""

from __future__ import annotations

import sys

import keras_tuner

import nnlo_keras as nk
from nnlo_common.training._joining import launched


class Formula(nk.MPITuner):
    """Its trials are a formula."""

    def run_trial(self, trial, *args, **options):
        return {"loss": trial.hyperparameters.Float("x", -1, 1) ** 2}


def build(hp):
    hp.Float("x", -1, 1)
    return


folder, times = sys.argv[1], int(sys.argv[2])
world = launched()
for _ in range(times):
    world.gather_text("")  # all are here
    oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=4, seed=1)
    tuner = Formula(build, oracle, directory=folder, project_name="p", overwrite=True)
    tuner.search(verbose=0)
    ended = [trial.status for trial in tuner.oracle.trials.values()]
    assert ended == ["COMPLETED"] * 4, ended
    if world.rank == 0:
        print("searched", flush=True)
