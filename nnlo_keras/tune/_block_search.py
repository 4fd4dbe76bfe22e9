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
    CoordinatorChannel,
    Death,
    DivisibleWorld,
    End,
    Interrupts,
    TimeLeft,
    agree,
    connect_search,
    cut_teams,
    run_block,
)
from nnlo_keras.tune._dispatch import Dispatch

__all__ = ["search_over"]

# How long an oracle that has nothing to say, though nobody trains, is left to think.
_THINKING_S = 0.05
# How long the coordinator waits for letters before it looks for signals.
_LOOK_EVERY_S = 0.2


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
    goes_on = f"The same command goes on from {tuner.project_dir}"
    with connect_search(world, teams, goes_on=goes_on) as here:
        if world.rank == 0:
            each = len(teams) // len(blocks)
            dispatch = Dispatch(
                tuner, blocks=len(blocks), teams=each, folds=folds, lockstep=lockstep, time_left=time_left
            )
            _coordinate(here.letters, dispatch, here.interrupts)
            failure, interrupted = dispatch.failure, dispatch.interrupted
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


def _coordinate(letters: CoordinatorChannel, dispatch: Dispatch, interrupts: Interrupts) -> None:
    """Hand out the trials until the search has ended."""
    letters.deliver(dispatch.ask())
    while not dispatch.over:
        letter = letters.receive(_THINKING_S if dispatch.idle else _LOOK_EVERY_S)
        if isinstance(letter, Death):
            letters.deliver(dispatch.lost(letter))
        elif letter is not None:
            letters.deliver(dispatch.handle(*letter))
        elif dispatch.idle:
            letters.deliver(dispatch.ask())
        letters.deliver(dispatch.interrupt(SIGNAL) if interrupts.came else dispatch.look())


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
