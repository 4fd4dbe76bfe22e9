"""A search by Optuna for a network of torch, with pruning; it ends early by callbacks."""

from __future__ import annotations

import optuna
import torch
from optuna.terminator import StaticErrorEvaluator, Terminator, TerminatorCallback
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.common import WRAPPED, blobs, finish, first

if WRAPPED:
    import nnlo_torch as nt

DATA, (INPUTS, LABELS) = TensorDataset(*blobs()), blobs(seed=1)


def network(trial: optuna.Trial) -> torch.nn.Sequential:
    parts, width = [], 8
    for number in range(trial.suggest_int("layers", 1, 2)):
        wide = trial.suggest_int(f"width {number}", 8, 32)
        share = trial.suggest_float(f"dropout {number}", 0.0, 0.4)
        parts += [torch.nn.Linear(width, wide), torch.nn.ReLU(), torch.nn.Dropout(share)]
        width = wide
    return torch.nn.Sequential(*parts, torch.nn.Linear(width, 4))


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(trial.number)
    model = network(trial)
    kind = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=rate)
    if WRAPPED:
        optimizer = nt.Downpour(optimizer)
        loader = DataLoader(DATA, batch_size=32, sampler=nt.ShardSampler(DATA))
    else:
        loader = DataLoader(DATA, batch_size=32, shuffle=True)
    for epoch in range(4):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = float((model(INPUTS).argmax(1) == LABELS).float().mean())
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    complete = optuna.trial.TrialState.COMPLETE
    callbacks = [
        optuna.study.MaxTrialsCallback(10, states=(complete,)),
        TerminatorCallback(Terminator(error_evaluator=StaticErrorEvaluator(0.001), min_n_trials=8)),
    ]
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=3),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    if WRAPPED:
        nt.optimize(study, objective, n_trials=24, block_size=2, callbacks=callbacks)
    else:
        study.optimize(objective, n_trials=24, callbacks=callbacks)
    ended = len(study.get_trials(states=(complete,)))
    pruned = len(study.get_trials(states=(optuna.trial.TrialState.PRUNED,)))
    finish(first(), accuracy=study.best_value, complete=ended, pruned=pruned)


if __name__ == "__main__":
    main()
