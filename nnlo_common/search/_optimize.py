"""One search over all ranks of a job: a coordinator, and blocks of ranks that train its trials."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._signals import EXIT_CODE
from nnlo_common.cluster.transport._mail import DivisibleWorld
from nnlo_common.search._partition import agree
from nnlo_common.training._joining import launched

if TYPE_CHECKING:
    import optuna

    from nnlo_common.search.block._block import Objective

__all__ = ["optimize"]


def optimize(
    study: optuna.Study,
    objective: Objective,
    *,
    n_trials: int,
    block_size: int = 1,
    search_ranks: int = 0,
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
    world: DivisibleWorld | None = None,
) -> optuna.Study:
    """Search for the best parameters: `study.optimize` over blocks of ranks.

    The same script runs on every rank. Started with `python` trials are trained one after another; with
    `mpiexec -n 7` and `block_size=3` the first rank coordinates, and two blocks of three ranks train a trial
    each. `objective(trial)` runs on all ranks of a block with the same parameters. A distributed training in
    it has the block for its world without being told; what it leaves open is closed when it returns.

    Args:
        study: an Optuna study, in memory, made alike on all ranks; its pruner runs on the first.
        objective: returns the value, or several; that of the block's first rank (its server) counts.
        n_trials: how many trials are to be finished; with a journal, over all starts of the job.
        block_size: how many ranks train one trial.
        search_ranks: how many ranks, after the first, only choose parameters, each for another trial at the
            same time: for samplers that take longer than blocks can wait.
        folds: how often each trial is trained, each time with another part of the data to validate (see
            `trial.split`); its value is the mean. Side by side if `block_size` is a multiple, else in turn.
        sampler: "bayesian", "evolutionary", "random", "grid", "qmc", "tpe", "gp", "cmaes", "nsgaii" or any
            Optuna sampler; None: the study's own.
        seed: of the named samplers, and of `trial.seed`, which is the same whichever block trains a trial.
        lockstep: whether the search is to repeat bit for bit with as many blocks, whatever their pace: each
            trial is chosen with the same results known. A block that is ahead of the others waits for them.
        elastic: whether blocks that are idle when nothing is left to begin help those that train: they train
            folds that wait, and go on with trainings that have a checkpoint, together with who began them.
        retries: how often a trial is tried again, with the same parameters, when its objective has failed.
        failures: what a failed trial tells the sampler: "ignore" nothing, "worst" that its value is the worst
            so far, "constraint" that it breaks a constraint besides.
        target_objective: the search ends, and running trials are broken off, once a value is as good.
        until: when the search is to be over: seconds from now, a time, or "slurm" for the end of its job. No
            trial is begun that would take longer, as far as the trials so far can tell.
        journal: a file from which the same command goes on after the job was killed.
        export: a file, .db (SQLite) or .log, that follows the study, for Optuna's dashboard.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.

    Returns:
        The study, on all ranks with all trials.

    Raises:
        ConfigurationError: the ranks cannot be cut into blocks, or do not agree on what is asked.
        MissingExtraError: Optuna is not installed.
        SystemExit: with status 75, after SIGTERM or SIGUSR1; the same command goes on from the journal.

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
    whole_number("n_trials", n_trials, 1)
    whole_number("block_size", block_size, 1)
    whole_number("retries", retries, 0)
    whole_number("folds", folds, 1)
    whole_number("search_ranks", search_ranks, 0)
    search = StudySearch(
        study,
        objective,
        n_trials=n_trials,
        folds=folds,
        sampler=sampler,
        seed=seed,
        retries=retries,
        failures=failures,
        target=target_objective,
        until=until,
        journal=journal,
        export=export,
        lockstep=lockstep,
        elastic=elastic,
        search_ranks=search_ranks,
    )
    world = world or cast("DivisibleWorld | None", launched())
    if world is None or world.size == 1:
        return _unless(search.alone(), study)
    release = world.engage()
    try:
        blocks = agree(world, block_size, {"n_trials": n_trials, **search.facts}, search_ranks)
        search.check(blocks)
    except ConfigurationError as error:
        error.collective = True
        release()
        raise
    interrupted = search.over(world, blocks)
    release()
    return _unless(interrupted, study)


def _unless(interrupted: bool, study: optuna.Study) -> optuna.Study:
    """Return the study, unless this process is expected to end."""
    if interrupted:
        raise SystemExit(EXIT_CODE)
    return study
