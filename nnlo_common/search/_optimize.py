"""One search over all ranks of a job: a coordinator, and blocks of ranks that train its trials."""

from __future__ import annotations

import datetime
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._signals import EXIT_CODE
from nnlo_common.cluster._hosts import describe_here, locate
from nnlo_common.cluster._threads import limit_threads
from nnlo_common.cluster.transport._mail import DivisibleWorld
from nnlo_common.training._joining import launched

if TYPE_CHECKING:
    import optuna

    from nnlo_common.search.block._block import Objective

__all__ = ["cut_blocks", "optimize"]


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


def agree(
    world: DivisibleWorld, block_size: int, facts: dict[str, Any], search_ranks: int = 0
) -> list[tuple[int, ...]]:
    """Cut the ranks into blocks; refuse, on all ranks alike, what does not fit."""
    mine = {"facts": {"block_size": block_size, **facts}, "here": describe_here()}
    everyone = [json.loads(text) for text in world.gather_text(json.dumps(mine))]
    for rank, other in enumerate(everyone):
        for name, value in everyone[0]["facts"].items():
            if other["facts"][name] != value:
                raise ConfigurationError(
                    f"optimize: {name} is {value!r} on rank 0 but {other['facts'][name]!r} on rank {rank} "
                    f"(host {other['here']['host']}); give all {world.size} ranks the same script"
                )
    places = locate([one["here"] for one in everyone])
    blocks = cut_blocks([place.host for place in places], block_size, search_ranks)
    if world.own_process:
        limit_threads(places[world.rank].local_size, places[world.rank].host_cores)
    return blocks


def cut_blocks(hosts: Sequence[str], block_size: int, search_ranks: int = 0) -> list[tuple[int, ...]]:
    """Cut all ranks into blocks but the first, which coordinates, and the search ranks, which follow it.

    As many blocks as possible lie on one host each; what is left over on the hosts makes up the others.

    Args:
        hosts: the host of every rank.
        block_size: how many ranks each block has.
        search_ranks: how many ranks choose parameters.

    Raises:
        ConfigurationError: ranks would be left over or missing.

    Example:
        >>> cut_blocks(["a", "a", "a", "a", "b", "b", "b"], 2)
        [(1, 2), (4, 5), (3, 6)]
    """
    size = len(hosts)
    training = size - 1 - search_ranks
    if training % block_size or training < block_size:
        raise ConfigurationError(_arithmetic(size, block_size, search_ranks))
    residents: dict[str, list[int]] = defaultdict(list)
    for rank in range(1 + search_ranks, size):
        residents[hosts[rank]].append(rank)
    blocks, rest = [], []
    for ranks in residents.values():
        whole = len(ranks) // block_size * block_size
        blocks += [tuple(ranks[start : start + block_size]) for start in range(0, whole, block_size)]
        rest += ranks[whole:]
    return blocks + [tuple(rest[start : start + block_size]) for start in range(0, len(rest), block_size)]


def _arithmetic(size: int, block_size: int, search_ranks: int) -> str:
    """Say why the ranks cannot be cut so, and what could be done."""
    ranks = size - 1 - search_ranks
    below = ranks // block_size
    sizes = sorted({1 + search_ranks + max(count, 1) * block_size for count in (below, below + 1)})
    divisors = [value for value in range(1, ranks + 1) if ranks % value == 0]
    near = sorted(sorted(divisors, key=lambda value: abs(value - block_size))[:2])
    fewer = ranks < block_size
    problem = (
        f"fewer than block_size={block_size}"
        if fewer
        else f"which is not a multiple of block_size={block_size}"
    )
    searchers = f" - {search_ranks} search ranks" if search_ranks else ""
    keeping = [f"block_size={' or '.join(map(str, near))}"] if near else []
    fewer_searchers = [
        count
        for count in range(search_ranks)
        if size - 1 - count >= block_size and (size - 1 - count) % block_size == 0
    ]
    keeping += [f"search_ranks={fewer_searchers[-1]}"] if fewer_searchers else []
    keep = f", or keep {size} with {' or '.join(keeping)}" if keeping else ""
    return (
        f"{size} ranks cannot be cut into blocks: {size} - 1 coordinator{searchers} = {ranks} ranks, "
        f"{problem}. Start {' or '.join(map(str, sizes))} ranks{keep}"
    )
