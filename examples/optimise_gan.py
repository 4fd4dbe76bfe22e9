"""Search for the learning rates of a GAN by a figure of merit, over blocks of ranks.

KERAS_BACKEND=torch python examples/optimise_gan.py                  # one trial after another
KERAS_BACKEND=torch mpiexec -n 3 python examples/optimise_gan.py     # 1 coordinator, 1 server, 1 worker
KERAS_BACKEND=torch mpiexec -n 7 python examples/optimise_gan.py --block-size 3 --trials 20

The losses of a GAN do not say how good its showers are, so a trial returns their distance from true ones: the
sum of what `gan_keras.py` prints. The network and the training are those of that example.
"""

from __future__ import annotations

import argparse

import keras
import optuna
from gan_keras import GAN
from toy_calo import differences, make_showers

import nnlo_keras as nk


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--block-size", type=int, default=2)
    options.add_argument("--trials", type=int, default=6)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--showers", type=int, default=800)
    options.add_argument("--journal", help="rerun the same command to resume the search from this file")
    chosen = options.parse_args()
    cells, energy = make_showers(chosen.showers, seed=1)
    true, at = make_showers(500, seed=2)

    def figure_of_merit(gan):
        return sum(differences(gan.showers(at), true).values())

    def objective(trial):
        keras.utils.set_random_seed(trial.seed)
        momentum = trial.suggest_float("beta_1", 0.0, 0.9)
        rates = (trial.suggest_float(f"{name} rate", 3e-4, 1e-2, log=True) for name in ("g", "d"))
        gan = GAN()
        gan.compile(*(nk.Downpour(keras.optimizers.Adam(rate, beta_1=momentum)) for rate in rates))
        callbacks = [nk.Distribute()]
        gan.fit(*nk.shard(cells, energy), batch_size=25, epochs=chosen.epochs, callbacks=callbacks, verbose=0)
        return figure_of_merit(gan)

    study = optuna.create_study(direction="minimize")
    nk.optimize(
        study, objective, n_trials=chosen.trials, block_size=chosen.block_size, journal=chosen.journal
    )


if __name__ == "__main__":
    main()
