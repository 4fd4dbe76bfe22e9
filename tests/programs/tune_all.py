"""Searches over two blocks of two ranks, or one and two search ranks: a torch training. On 5 ranks."""

from __future__ import annotations

import gc
import sys
import threading

import optuna
import psutil
import torch

import nnlo_torch as nt
from nnlo_common.training._joining import launched

optuna.logging.set_verbosity(optuna.logging.WARNING)
torch.set_num_threads(1)
X = torch.linspace(-1, 1, 64).reshape(-1, 1)
DATA = torch.utils.data.TensorDataset(X, 2 * X + 1)


class Fault(Exception):
    pass


def objective(trial, fail=lambda number, role, step: None, lag=0, size=1, **layout):
    torch.manual_seed(trial.seed)
    lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
    model = torch.nn.Linear(1, 1)
    model.padding = torch.nn.Parameter(torch.zeros(size))  # so that messages may be long
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=lr), lag=lag, **layout)
    loader = torch.utils.data.DataLoader(DATA, batch_size=8, sampler=nt.ShardSampler(DATA))
    for epoch in range(2):
        fail(trial.number, optimizer.role, -1)
        for step, (x, y) in enumerate(loader):
            fail(trial.number, optimizer.role, step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x) + model.padding[:1], y).backward()
            optimizer.step()
        with torch.no_grad():  # on the server the model is the centre; elsewhere the value does not count
            loss = torch.nn.functional.mse_loss(model(X), 2 * X + 1).item()
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


def told(study, what):
    """Once, in one line."""
    states = [trial.state.name for trial in study.trials]
    lines = launched().gather_text(
        f"{what}: {states}, {study.best_params}" if "COMPLETE" in states else f"{what}: {states}"
    )
    assert len(set(lines)) == 1, lines
    if launched().rank == 0:
        print(lines[0], flush=True)
    return states


def unpruned():
    return optuna.create_study(pruner=optuna.pruners.NopPruner())


def plain():
    study = nt.optimize(unpruned(), objective, n_trials=6, block_size=2, sampler="bayesian")
    assert told(study, "plain") == ["COMPLETE"] * 6
    assert study.best_value < 2  # untrained it is 2.3 and more


def faulty(role, size, lag, block_size=2, **layout):
    def fail(number, here, step):
        if number == 1 and here == role and step == (-1 if role == "server 0" else 2):
            raise Fault("in the middle")

    study = unpruned()
    nt.optimize(
        study,
        lambda trial: objective(trial, fail, lag, size, **layout),
        n_trials=3,
        block_size=block_size,
        sampler="random",
    )
    states = told(study, f"{role}, {size} numbers, lag {lag}")
    assert states == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "Fault: in the middle" in study.trials[1].user_attrs["nnlo:error"]


def faults():
    for role in ("server 0", "worker 0"):
        faulty(role, 1, 0)
        faulty(role, 200_000, 1)


def grouped():
    """A rank fails while the others of its group wait for it; long messages and exchanges under way."""
    for role, size in (("lead", 1), ("worker 0, member 1", 200_000)):
        faulty(role, size, 0, servers=0)
    if launched().size == 7:
        for role in ("server 0", "worker 0", "worker 0, member 1"):
            faulty(role, 200_000, 1, 3, group_size=2)


def many():
    """Nothing is left of a trial: no thread, no open file, no memory to speak of."""
    process = psutil.Process()

    def left():
        gc.collect()
        return threading.active_count(), process.num_fds()

    seen = []

    def watched(trial):
        seen.append(left())
        value = objective(trial, size=1000)
        if trial.number % 3 == 0:
            raise Fault
        return value

    nt.optimize(unpruned(), watched, n_trials=60, block_size=2, sampler="random")
    assert not seen or seen[-1] == seen[2], (seen[2], seen[-1])


def pruned():
    pruner = optuna.pruners.ThresholdPruner(upper=1.0)
    study = nt.optimize(
        optuna.create_study(pruner=pruner),
        objective,
        n_trials=8,
        block_size=2,
        sampler="qmc",
        target_objective=1e-9,
    )
    states = told(study, "pruned")
    assert set(states) == {"PRUNED", "COMPLETE"}


def lockstep():
    """Blocks of changing pace find the same."""

    def found(late):
        def unsteady(trial):
            if trial.number % 2 == late:
                threading.Event().wait(0.05)
            return objective(trial)

        study = nt.optimize(
            optuna.create_study(), unsteady, n_trials=4, block_size=2, sampler="tpe", lockstep=True
        )
        return [(trial.params, trial.values, trial.intermediate_values) for trial in study.trials]

    assert found(0) == found(1)


def searchers():
    study = nt.optimize(unpruned(), objective, n_trials=4, block_size=2, sampler="tpe", search_ranks=2)
    assert told(study, "searchers") == ["COMPLETE"] * 4


CASES = {
    "plain": plain,
    "faults": faults,
    "grouped": grouped,
    "many": many,
    "pruned": pruned,
    "lockstep": lockstep,
    "searchers": searchers,
}
for name in sys.argv[1:]:
    CASES[name]()
