"""Search over all ranks of a job: a coordinator, and blocks of ranks that train its trials."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from nnlo_common.base._arguments import function_given, whole_number
from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._signals import EXIT_CODE
from nnlo_common.cluster.transport._endpoint import DivisibleWorld
from nnlo_common.search._partition import agree
from nnlo_common.training._joining import launched

if TYPE_CHECKING:
    import optuna

    from nnlo_common.search.block._block import Objective
    from nnlo_common.search.coordinator._study_trials import StudyCallback

__all__ = ["optimize"]


def optimize(
    study: optuna.Study,
    objective: Objective,
    *,
    n_trials: int,
    block_size: int = 1,
    search_ranks: int = 0,
    spares: int = 0,
    folds: int = 1,
    sampler: str | optuna.samplers.BaseSampler | None = None,
    seed: int = 0,
    lockstep: bool = False,
    elastic: bool = False,
    retries: int = 0,
    failures: Literal["ignore", "worst", "constraint"] = "ignore",
    target_objective: float | None = None,
    until: float | str | datetime.datetime | None = None,
    journal: str | Path | None = None,
    export: str | Path | None = None,
    callbacks: Sequence[StudyCallback] | None = None,
    world: DivisibleWorld | None = None,
) -> optuna.Study:
    """Search for the best parameters: `study.optimize` over blocks of ranks.

    The same script runs on every rank. Started with `python`, it trains one trial after another. With
    `mpiexec -n 7` and `block_size=3`, the first rank coordinates and two blocks of three ranks train a trial
    each. `objective(trial)` runs on all ranks of a block with the same parameters. A distributed training in
    it uses the block as its world automatically; trainings left open are closed when the objective returns.

    Args:
        study: an Optuna study, in memory, created alike on all ranks; the first rank's pruner judges.
        objective: returns one value or several; the value from the block's first rank (its server) counts.
        n_trials: how many trials to finish; with a journal, over all starts of the job.
        block_size: ranks per trial.
        search_ranks: how many ranks, after the first, only choose parameters, each for another trial at the
            same time: for samplers too slow for the blocks.
        spares: how many ranks, the last ones, wait to take over from the first if it dies, under `mpiexec
            --with-ft ulfm` of Open MPI 5. The journal and the export must be files that their hosts see.
        folds: trains each trial once per fold, each time validating on another part of the data (see
            `trial.split`); its value is the mean. Side by side if `block_size` is a multiple, else in turn.
        sampler: "bayesian", "random" or another name of the page on searches, or any Optuna sampler; None:
            the study's own.
        seed: seeds the named samplers and `trial.seed`, which is the same whichever block trains a trial.
        lockstep: whether the search repeats bit for bit with as many blocks, at any pace: each trial is
            chosen with the same results known. A block that is ahead waits for the others.
        elastic: whether idle blocks help running trials when nothing is left to begin: they train waiting
            folds, and join trainings that have a checkpoint, which resume on more ranks.
        retries: how often to retry a trial, with the same parameters, when its objective failed.
        failures: what the sampler learns of a failed trial: "ignore": nothing; "worst": the worst value so
            far; "constraint": that value and a violated constraint.
        target_objective: the search ends, and running trials are interrupted, once a value reaches it; with a
            journal also one of an earlier start.
        until: when the search must end: seconds from now, a time, or "slurm" for the end of its job. No trial
            begins that would take longer, judging by the trials so far.
        journal: a file from which a rerun of the same command resumes.
        export: a file, .db (SQLite) or .log, that mirrors the study, for Optuna's dashboard.
        callbacks: functions that the first rank calls with the study and each trial that has ended for good,
            as `Study.optimize` does; `study.stop()` in one ends the search after the running trials.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.

    Returns:
        The study, on all ranks with all trials.

    Raises:
        ConfigurationError: the ranks cannot be split into blocks, or their arguments differ.
        MissingExtraError: Optuna is not installed.
        SystemExit: with status 75, after SIGTERM or SIGUSR1; rerun the command to resume from the journal.

    Example:
        >>> import optuna
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> def objective(trial):
        ...     return (trial.suggest_float("x", -1, 1) - 0.5) ** 2
        >>> study = optimize(optuna.create_study(), objective, n_trials=30, sampler="evolutionary")
        >>> len(study.trials), study.best_value < 0.1
        (30, True)
    """
    try:
        from nnlo_common.search._study_search import StudySearch
    except ImportError as error:
        if getattr(error, "name", "") != "optuna":
            raise
        raise MissingExtraError("optimize", "optuna", "tune") from None
    function_given("objective", objective)
    whole_number("n_trials", n_trials, 1)
    whole_number("block_size", block_size, 1)
    whole_number("retries", retries, 0)
    whole_number("folds", folds, 1)
    whole_number("search_ranks", search_ranks, 0)
    whole_number("spares", spares, 0)
    search = StudySearch(
        study,
        objective,
        n_trials=n_trials,
        folds=folds,
        sampler=sampler,
        seed=whole_number("seed", seed, 0),
        retries=retries,
        failures=failures,
        target=target_objective,
        until=until,
        journal=journal,
        export=export,
        callbacks=callbacks or (),
        lockstep=lockstep,
        elastic=elastic,
        search_ranks=search_ranks,
        spares=spares,
    )
    world = world or cast("DivisibleWorld | None", launched())
    if world is None or world.size == 1:
        return _study_or_exit(search.alone(), study)
    release = world.engage()
    try:
        blocks = agree(world, block_size, {"n_trials": n_trials, **search.facts}, search_ranks, spares)
        search.check(blocks)
    except ConfigurationError as error:
        error.collective = True
        release()
        raise
    interrupted = search.over(world, blocks)
    release()
    return _study_or_exit(interrupted, study)


def _study_or_exit(interrupted: bool, study: optuna.Study) -> optuna.Study:
    """Return the study, or exit if a signal interrupted the search."""
    if interrupted:
        raise SystemExit(EXIT_CODE)
    return study
