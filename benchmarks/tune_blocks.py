"""Regret of real searches whose trials are short: blocks of ranks beside Optuna's own process with threads.

    mpiexec -n 5 python benchmarks/tune_blocks.py --seconds 0.3 1 4      4 blocks, chosen by "bayesian"
    python benchmarks/tune_blocks.py --seconds 4                         GPSampler with n_jobs=4

Trials sleep, so they need no cores; the sampler computes beside them, and does not keep up where trials are
shorter than its fits. Printed for each function: the median over seeds of the distance from the best value
after 40 trials of Branin and 80 of Hartmann6, and the share of the blocks' time in which no trial ran.

Of 10 seeds, on 2 cores, quiet (the trials of 4 s beside Optuna's own), median and idle share:

                          Branin           Hartmann6
    blocks, 0.3 s         0.011, 2.2 %     0.012, 3.3 %
    blocks, 1 s           0.015, 0.6 %     0.062, 1.0 %
    blocks, 4 s           0.011, 0.9 %     0.00081, 0.3 %
    GPSampler, 4 s        0.015, 3.7 %     0.12, 3.7 %

Hartmann6 has a second minimum, 0.12 above the best, in which half of the searches end or not by chance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import optuna
from tune_regret import branin, hartmann6

from nnlo_common.search import optimize
from nnlo_common.training._joining import launched

BLOCKS = 4
CASES: dict[str, tuple[Callable[[optuna.Trial], float], int]] = {
    "Branin": (branin, 40),
    "Hartmann6": (hartmann6, 80),
}


def searched(name: str, seconds: float, seed: int) -> tuple[float, float]:
    """Return the distance from the best value, and the share of the blocks' time without a trial."""
    function, trials = CASES[name]

    def objective(trial: optuna.Trial) -> float:
        value = function(trial)
        time.sleep(seconds)
        return value

    world = launched()
    study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=seed))
    if world is None or world.size == 1:
        study.optimize(objective, n_trials=trials, n_jobs=BLOCKS)
    else:
        optimize(study, objective, n_trials=trials, sampler="bayesian", seed=seed, world=world)
    started, ended = (
        [getattr(one, f"datetime_{end}") for one in study.trials] for end in ("start", "complete")
    )
    took_s = (max(ended) - min(started)).total_seconds()
    return study.best_value, 1 - trials * seconds / (BLOCKS * took_s)


def main() -> None:
    """Search with each seed, and print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", nargs="+", type=float, default=[0.3, 1.0, 4.0], help="of a trial")
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(10)])
    parser.add_argument("--json", type=Path, help="also write every value there")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    world, everything = launched(), {}
    for seconds in options.seconds:
        for name in options.functions:
            everything[f"{name}, {seconds} s"] = [searched(name, seconds, seed) for seed in options.seeds]
    if world is not None and world.rank:
        return
    for told, runs in everything.items():
        regrets, idle = zip(*runs, strict=True)
        each = " ".join(f"{one:.2g}" for one in sorted(regrets))
        print(
            f"{told}: {statistics.median(regrets):.2g} ({each}), {100 * statistics.median(idle):.1f} % idle"
        )
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
