"""A search over blocks of ranks: what each rank does in it."""

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
    """Do this rank's part in a search; on return all ranks have its results (collective).

    Args:
        tuner: this rank's; that of rank 0 has the oracle which counts.
        world: the ranks.
        block_size: how many ranks train one trial.
        folds: how many folds it has.
        lockstep: whether the search is to repeat, whatever the pace of the blocks.
        time_left: how long there is.
        train: trains one fold of a trial on this rank.

    Raises:
        ConfigurationError: the ranks cannot be cut into blocks, do not agree on what is asked, or another job
            has the directory.
        PeerLostError: the first rank has died, or with another one the last block.
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
    """Keep other jobs out of the directory; all ranks refuse what the one that has it does (collective)."""
    problem = ""
    if world.rank == 0:
        try:
            tuner.claim()
        except ConfigurationError as error:
            problem = str(error)
    if problem := world.gather_text(problem)[0]:
        raise ConfigurationError(problem)


def _take_over(tuner: Any, end: End) -> Exception | None:
    """Give this rank's oracle all that the search has found; return what has ended it before its time."""
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
