"""Regret of samplers: distance from the best value after 50 and 100 trials, median over seeds.

python benchmarks/tune_regret.py                 all samplers, all functions, 1 and 8 trials under way
python benchmarks/tune_regret.py --samplers evolutionary --blocks 8 --seeds 20

Running trials have log-normal durations and end in that order, as in blocks; no real time passes.

Figures of 20 seeds, after 50 / 100 trials. "bayesian" is Optuna's Gaussian process, parameter by parameter:
"gp" gave the same bits with each of three seeds.

    under way                 Branin             Hartmann6          mixed
    1  evolutionary           0.21 / 0.018       0.84 / 0.27        0.25 / 0.043
    1  NSGA-II, population 10 0.91 / 0.28        1.4 / 0.72         0.30 / 0.18
    1  NSGA-II, population 20 0.77 / 0.15        1.7 / 1.0          0.54 / 0.32
    1  NSGA-II, population 50 0.75 / 0.43        1.6 / 1.3          0.69 / 0.52
    1  plain steady-state     0.48 / 0.28        1.8 / 1.1          0.58 / 0.21
    1  bayesian               3.9e-05 / 1.7e-05  0.0046 / 0.00036   0.00011 / 1.8e-05
    1  TPE                    0.11 / 0.019       0.33 / 0.094       0.14 / 0.10
    1  random                 0.75 / 0.38        1.6 / 1.2          0.69 / 0.50
    8  evolutionary           0.36 / 0.036       1.3 / 0.44         0.27 / 0.077
    8  NSGA-II, population 10 0.87 / 0.12        1.5 / 1.1          0.54 / 0.32
    8  NSGA-II, population 20 0.72 / 0.27        2.0 / 1.2          0.58 / 0.28
    8  NSGA-II, population 50 0.80 / 0.56        1.4 / 1.2          0.69 / 0.48
    8  plain steady-state     0.64 / 0.59        1.6 / 0.88         0.58 / 0.28
    8  bayesian               0.0011 / 2.3e-05   0.27 / 0.060       0.077 / 4.9e-05
    8  TPE                    0.17 / 0.037       0.77 / 0.29        0.24 / 0.18
    8  random                 0.80 / 0.38        1.4 / 1.2          0.69 / 0.55
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import json
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler

from nnlo_common.search.samplers._engines import engine
from nnlo_common.search.samplers._evolutionary import EvolutionarySampler

AT = (50, 100)


def branin(trial: optuna.Trial) -> float:
    x, y = trial.suggest_float("x", -5, 10), trial.suggest_float("y", 0, 15)
    bowl = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6) ** 2
    return bowl + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10 - 0.39788735772973816


_A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)


def hartmann6(trial: optuna.Trial) -> float:
    x = np.array([trial.suggest_float(f"x{index}", 0, 1) for index in range(6)])
    return 3.322368011391339 - float(np.array([1.0, 1.2, 3.0, 3.2]) @ np.exp(-(_A * (x - _P) ** 2).sum(1)))


def mixed(trial: optuna.Trial) -> float:
    """Integers, choices and floats, two of them logarithmic, with the optimum far from the centre."""
    lr = math.log10(trial.suggest_float("lr", 1e-5, 1e-1, log=True))
    layers, units = trial.suggest_int("layers", 1, 8), trial.suggest_int("units", 8, 512, log=True)
    dropout = trial.suggest_float("dropout", 0, 0.6)
    optimizer = trial.suggest_categorical("optimizer", ["sgd", "adam", "rmsprop"])
    activation = trial.suggest_categorical("activation", ["relu", "tanh", "gelu", "elu"])
    best = {"sgd": -1.6, "adam": -3.9, "rmsprop": -3.4}[optimizer]
    off = {"sgd": 0.3, "adam": 0.0, "rmsprop": 0.15}[optimizer]
    off += {"relu": 0.1, "tanh": 0.4, "gelu": 0.0, "elu": 0.2}[activation]
    shape = 0.05 * (layers - 2) ** 2 + 0.3 * math.log2(units / 400) ** 2 + 4 * (dropout - 0.12) ** 2
    return 0.35 * (lr - best) ** 2 + off + shape - 4.05e-7


FUNCTIONS = {"Branin": branin, "Hartmann6": hartmann6, "mixed": mixed}


class Plain(EvolutionarySampler):
    """A plain steady-state genetic algorithm: a larger population, each parameter from one of two parents."""

    def __init__(self, seed: int) -> None:
        super().__init__(population=20, startup=20, seed=seed)

    def _number(self, known: list[float], parents: object) -> float:  # noqa: ARG002
        if self._random.random() < 0.1:
            return float(self._random.random())
        return known[int(self._random.integers(len(known)))]


def _named(name: str) -> Callable[[int, int], BaseSampler]:
    return lambda seed, n_trials: engine(name, seed, n_trials, optuna.create_study())


SAMPLERS: dict[str, Callable[[int, int], BaseSampler]] = {
    "evolutionary": _named("evolutionary"),
    "NSGA-II, 10": lambda seed, _: NSGAIISampler(seed=seed, population_size=10),
    "NSGA-II, 20": lambda seed, _: NSGAIISampler(seed=seed, population_size=20),
    "NSGA-II, 50": lambda seed, _: NSGAIISampler(seed=seed, population_size=50),
    "plain steady state": lambda seed, _: Plain(seed),
    "random": lambda seed, _: RandomSampler(seed=seed),
    "bayesian": _named("bayesian"),
    "TPE": lambda seed, _: TPESampler(seed=seed),
    "GP": _named("gp"),
}


def best_values(sampler: str, function: str, blocks: int, seed: int) -> list[float]:
    """Return the best value after each of `AT` trials, with so many trials always running."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    study = optuna.create_study(sampler=SAMPLERS[sampler](seed, max(AT)))
    durations, count = np.random.default_rng(seed), itertools.count()
    under_way: list[tuple[float, int, optuna.Trial, float]] = []
    now_s, best, found = 0.0, math.inf, []
    for ended in range(1, max(AT) + 1):
        while len(under_way) < blocks:
            trial = study.ask()
            value = FUNCTIONS[function](trial)
            heapq.heappush(under_way, (now_s + durations.lognormal(0, 0.5), next(count), trial, value))
        now_s, _, trial, value = heapq.heappop(under_way)
        study.tell(trial, value)
        best = min(best, value)
        found += [best] if ended in AT else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--functions", nargs="+", default=list(FUNCTIONS), choices=list(FUNCTIONS))
    parser.add_argument("--blocks", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write every value there")
    options = parser.parse_args()
    everything = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for blocks in options.blocks:
            for sampler in options.samplers:
                cells = []
                for function in options.functions:
                    one = functools.partial(best_values, sampler, function, blocks)
                    runs = list(pool.map(one, range(options.seeds)))
                    everything[f"{blocks} {sampler} {function}"] = runs
                    cells.append(" / ".join(f"{value:.2g}" for value in np.median(runs, 0)))
                print(f"| {blocks} | {sampler} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
