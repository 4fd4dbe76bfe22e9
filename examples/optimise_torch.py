"""Search for the best learning rate and network of Fashion-MNIST, over blocks of ranks.

python examples/optimise_torch.py                    # one trial after another
mpiexec -n 5 python examples/optimise_torch.py       # 1 coordinator, 2 blocks of 1 server and 1 worker
mpiexec -n 7 python examples/optimise_torch.py --block-size 3 --sampler evolutionary
"""

from __future__ import annotations

import argparse

import fashion_data
import optuna
import torch
from torch.utils.data import DataLoader, TensorDataset

import nnlo_torch as nt


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--block-size", type=int, default=2)
    options.add_argument("--trials", type=int, default=12)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--sampler", default="bayesian")
    options.add_argument("--journal", help="rerun the same command to resume the search from this file")
    chosen = options.parse_args()
    data = fashion_data.load(None)
    train = TensorDataset(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))
    test = TensorDataset(torch.from_numpy(data.x_test), torch.from_numpy(data.y_test))

    def objective(trial):
        torch.manual_seed(trial.seed)
        rate = trial.suggest_float("learning rate", 1e-3, 0.5, log=True)
        width = trial.suggest_int("width", 8, 128, log=True)
        inputs = data.x_train[0].size
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(inputs, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
        )
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=rate))
        train_loader = DataLoader(train, batch_size=25, sampler=nt.ShardSampler(train))
        test_loader = DataLoader(test, batch_size=500, sampler=nt.ShardSampler(test, evaluation=True))
        for epoch in range(chosen.epochs):
            for x, y in train_loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            scores = optimizer.evaluate(
                lambda batch: {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()},
                test_loader,
            )
            trial.report(scores["accuracy"], epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return scores["accuracy"]

    nt.optimize(
        optuna.create_study(direction="maximize"),
        objective,
        n_trials=chosen.trials,
        block_size=chosen.block_size,
        sampler=chosen.sampler,
        journal=chosen.journal,
    )


if __name__ == "__main__":
    main()
