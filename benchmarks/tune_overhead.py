"""Cost of the coordinator of a search: how busy blocks are, and the rate of empty trials.

mpiexec -n 17 python benchmarks/tune_overhead.py            16 blocks that sleep for a second
mpiexec -n 3 python benchmarks/tune_overhead.py --rate      2 blocks that return at once
mpiexec -n 9 python benchmarks/tune_overhead.py --slow 1 --trials 40
                                                            8 blocks, a sampler that takes a second
mpiexec -n 17 python benchmarks/tune_overhead.py --slow 1 --search-ranks 8 --trials 160
                                                            the same on 8 search ranks

A block is busy while its trial sleeps; while it waits for parameters it is idle. On two cores with Open MPI,
16 blocks with `--trials 208` were busy 98 % of the time with "random", 97 % with "tpe" and "bayesian"; two
blocks completed 1,000 empty trials a second; 8 blocks whose sampler takes a second were busy 12 % without
search ranks, 50 % with 4, 98 % with 8.
"""

from __future__ import annotations

import argparse
import json
import time

import optuna

from nnlo_common.search import optimize
from nnlo_common.training._joining import launched

LEAST_BUSY = {"random": 0.97, "tpe": 0.97, "bayesian": 0.95}
LEAST_PER_S = 300
#: Least share of the possible rate with a slow sampler: one choice at a time on each choosing rank.
LEAST_OF_POSSIBLE = 0.9


class Slow(optuna.samplers.RandomSampler):
    """Chooses at random after a sleep, which needs no core."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seed=1)
        self._seconds = seconds

    def infer_relative_search_space(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,  # noqa: ARG002
    ) -> dict[str, optuna.distributions.BaseDistribution]:
        """Return the parameters common to all trials."""
        return optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))

    def sample_relative(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        search_space: dict[str, optuna.distributions.BaseDistribution],
    ) -> dict[str, float]:
        """Sleep, then choose."""
        time.sleep(self._seconds)
        return {
            name: self.sample_independent(study, trial, name, distribution)
            for name, distribution in search_space.items()
        }


def searched(
    sampler: str | optuna.samplers.BaseSampler, n_trials: int, sleep_s: float, search_ranks: int = 0
) -> float:
    """Return the time of a search, from the first start of an objective to the last end, on rank 0."""
    times: list[float] = []

    def objective(trial: optuna.Trial) -> float:
        times.append(time.time())
        total = sum(trial.suggest_float(f"x{index}", -1, 1) ** 2 for index in range(6))
        time.sleep(sleep_s)
        times.append(time.time())
        return total

    world = launched()
    assert world is not None, "start it with mpiexec"
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    optimize(study, objective, n_trials=n_trials, sampler=sampler, search_ranks=search_ranks)
    everyone = [json.loads(text) for text in world.gather_text(json.dumps(times))][1 + search_ranks :]
    return float(max(map(max, everyone)) - min(map(min, everyone)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", action="store_true", help="measure with trials that return at once")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--samplers", nargs="+", default=list(LEAST_BUSY))
    parser.add_argument(
        "--slow", type=float, metavar="S", help="measure with a sampler that takes S seconds for a choice"
    )
    parser.add_argument("--search-ranks", type=int, default=0)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    searched("bayesian", 40, 0.0)  # so that imports are not measured
    world = launched()
    assert world is not None
    searchers: int = options.search_ranks
    blocks, lines, poor = world.size - 1 - searchers, [], []
    if options.rate:
        rate = options.trials / searched("random", options.trials, 0.0)
        lines.append(f"random: {rate:.0f} trials/s, {blocks} blocks")
        poor += [lines[-1]] if rate < LEAST_PER_S else []
    elif options.slow:
        n_trials = options.trials // blocks * blocks
        seconds = searched(Slow(options.slow), n_trials, 1.0, searchers)
        busy, possible = n_trials / blocks / seconds, min(1, max(1, searchers) / options.slow / blocks)
        lines.append(
            f"{options.slow:g} s for a choice, {searchers} search ranks: {busy:.1%} busy, {blocks} blocks"
        )
        poor += [lines[-1]] if busy < LEAST_OF_POSSIBLE * possible else []
    else:
        # Whole rounds over all blocks, so that no block idles for lack of trials.
        n_trials = options.trials // blocks * blocks
        for sampler in options.samplers:
            seconds = searched(sampler, n_trials, 1.0, searchers)
            busy = n_trials / blocks / seconds
            lines.append(f"{sampler}: {busy:.1%} busy, {blocks} blocks, {n_trials} trials of 1 s")
            poor += [lines[-1]] if busy < LEAST_BUSY[sampler] else []
    if world.rank == world.size - 1:
        print("\n".join(lines))
        assert not poor, poor


main()
