"""Search over blocks of ranks: this rank's part in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial

from nnlo_common.plugin import (
    EXIT_CODE,
    SIGNAL,
    ConfigurationError,
    Coordinator,
    DivisibleWorld,
    End,
    TimeLeft,
    agree,
    connect_search,
    cut_teams,
    run_block,
    run_coordinator,
)
from nnlo_keras.tune._oracle_trials import OracleTrials

__all__ = ["search_over"]


def search_over(
    tuner: Any,
    world: DivisibleWorld,
    *,
    block_size: int,
    folds: int,
    lockstep: bool,
    time_left: TimeLeft,
    train: Callable[[Any], float],
) -> None:
    """Do this rank's part in a search; on return all ranks have the results (collective).

    Args:
        tuner: this rank's tuner; rank 0's has the oracle that counts.
        world: the ranks.
        block_size: how many ranks train one trial.
        folds: folds per trial.
        lockstep: whether the search must repeat, at any pace of the blocks.
        time_left: the time limit.
        train: trains one fold of a trial on this rank.

    Raises:
        ConfigurationError: the ranks cannot be split into blocks, their arguments differ, or another job uses
            the directory.
        PeerLostError: the first rank or the last block died.
        SystemExit: with status 75, after SIGTERM or SIGUSR1.
    """
    release = world.engage()
    try:
        blocks = agree(world, block_size, tuner.facts)
        _claim(tuner, world)
    except Exception as error:
        error.collective = True  # type: ignore[attr-defined]
        release()
        raise
    teams = cut_teams(blocks, folds)
    failure: Exception | None
    hint = f"Rerun the same command to resume from {tuner.project_dir}"
    with connect_search(world, teams, hint=hint) as here:
        if world.rank == 0:
            each = len(teams) // len(blocks)
            source = OracleTrials(tuner, folds)
            coordinator = Coordinator(
                source, blocks=len(blocks), teams=each, folds=folds, lockstep=lockstep, time_left=time_left
            )
            run_coordinator(coordinator, here.coordinator_channel, here.interrupts)
            failure, interrupted = source.failure, coordinator.interrupted
        else:
            end = run_block(here.channel, world, train)
            failure, interrupted = _take_over(tuner, end), end.interrupted
    release()
    if failure is not None:
        failure.collective = True  # type: ignore[attr-defined]
        raise failure
    if interrupted == SIGNAL:
        raise SystemExit(EXIT_CODE)


def _claim(tuner: Any, world: DivisibleWorld) -> None:
    """Lock the directory against other jobs; an error of rank 0 is raised on all ranks (collective)."""
    problem = ""
    if world.rank == 0:
        try:
            tuner.claim()
        except ConfigurationError as error:
            problem = str(error)
    if problem := world.gather_text(problem)[0]:
        raise ConfigurationError(problem)


def _take_over(tuner: Any, end: End) -> Exception | None:
    """Load the results into this rank's oracle; return the error that ended the search early, or None."""
    (summary,) = end.trials
    oracle = tuner.oracle
    oracle.trials = {state["trial_id"]: Trial.from_state(state) for state in summary["trials"]}
    oracle.set_state(json.loads(json.dumps(summary["oracle"])))
    if summary["failure"] is None:
        return None
    name, text = summary["failure"]
    kind = getattr(keras_tuner.errors, name, RuntimeError)
    error: Exception = kind(text)
    return error
