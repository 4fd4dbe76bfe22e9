"""Search over blocks of ranks: this rank's part in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    EXIT_CODE,
    LARGEST_JSON,
    SIGNAL,
    Coordinator,
    DivisibleWorld,
    End,
    Inheritance,
    TimeLeft,
    agree,
    connect_search,
    cut_teams,
    hold,
    parsed_json,
    read_whole,
    run_block,
    run_coordinator,
    write_whole,
)
from nnlo_keras.tune._compat import (
    file_of_oracle,
    redirect_saves,
    refill_grid,
    replace_retries,
    trial_file,
    waiting_retries,
)
from nnlo_keras.tune._oracle import OracleTrials, failure_told

__all__ = ["inherit", "keep_nothing", "keep_whole", "mend", "read", "search_over", "write"]

# -- directory of a search: one rank writes every file whole or not at all, and resumes from them ------
# Keras-tuner rewrites its files in place, and reads all of them to resume. A killed job leaves
#
# * half of a file: prevented by writing a new file beside the old one, which it then replaces;
# * a chosen trial that `oracle.json` does not have yet: dropped, and chosen again;
# * a finished trial that `oracle.json` still lists as running: kept as finished.


def write(path: str, content: Any) -> None:
    """Write JSON, whole or not at all."""
    write_whole(Path(path), json.dumps(content))


def keep_whole(oracle: Any) -> None:
    """Make an oracle write its files whole or not at all."""
    redirect_saves(
        oracle,
        lambda: write(file_of_oracle(oracle), oracle.get_state()),
        lambda trial: write(trial_file(oracle, trial.trial_id), trial.get_state()),
    )


def keep_nothing(oracle: Any) -> None:
    """Make an oracle write nothing, because another rank owns the directory."""
    redirect_saves(oracle, lambda: None, lambda trial: None)


def read(tuner: Any) -> None:
    """Resume a tuner and its oracle from the directory.

    Raises:
        ConfigurationError: a file is damaged; files written by nnlo are whole.
        RuntimeError: the directory is of a search with another oracle, in keras-tuner's words.
    """
    state = Path(tuner.state_file)
    try:
        _check_files(Path(tuner.project_dir))
        tuner.oracle.reload()
        if state.exists():  # missing if another kind of tuner made the directory
            tuner.set_state(parsed_json(read_whole(state, LARGEST_JSON)))
        mend(tuner.oracle)
    except ConfigurationError:
        raise
    except Exception as error:  # keras-tuner raises errors of many types for content that it has not written
        if isinstance(error.__cause__, KeyError):  # its own refusal: names the directory, and what to do
            raise
        kind = "not JSON" if isinstance(error, json.JSONDecodeError) else "not of a search"
        raise ConfigurationError(
            f"the search in {tuner.project_dir} cannot resume: one of its files is {kind} ({error}). "
            "Repair or remove that file, give another project_name, or overwrite=True to start anew"
        ) from error


def _check_files(folder: Path) -> None:
    """Refuse files that keras-tuner could not read to an end, and JSON beyond our limits."""
    for pattern in ("*.json", "trial_*/trial.json"):
        for path in folder.glob(pattern):
            parsed_json(read_whole(path, LARGEST_JSON))


def mend(oracle: Any) -> None:
    """Repair an oracle's state that was read after a kill, so that it can resume."""
    found = oracle.trials  # in the file system's order
    oracle.trials = {one: found[one] for one in dict.fromkeys(oracle.start_order) if one in found}
    ended = set(oracle.end_order)
    retries = dict.fromkeys(waiting_retries(oracle))
    replace_retries(oracle, [one for one in retries if one in oracle.trials and one not in ended])
    if isinstance(oracle, keras_tuner.oracles.GridSearchOracle):
        refill_grid(oracle)


def search_over(
    tuner: Any,
    world: DivisibleWorld,
    *,
    block_size: int,
    folds: int,
    lockstep: bool,
    spares: int,
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
        spares: how many ranks, the last ones, wait to take over from the first if it dies.
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
        blocks = agree(world, block_size, tuner.facts, spares=spares)
        _claim(tuner, world)
    except Exception as error:
        error.collective = True  # type: ignore[attr-defined]
        release()
        raise
    teams = cut_teams(blocks, folds)
    failure: Exception | None
    hint = f"Rerun the same command to resume from {tuner.project_dir}"
    standing_by = range(world.size - spares, world.size)
    with connect_search(world, teams, hint=hint, spares=standing_by) as here:
        found = here.coordinator_channel.stand_by() if world.rank in standing_by else None
        inherited = found if isinstance(found, Inheritance) else None
        if world.rank == 0 or inherited is not None:
            if inherited is not None:
                inherit(tuner, inherited)
            each = len(teams) // len(blocks)
            source = OracleTrials(tuner, folds)
            coordinator = Coordinator(
                source, blocks=len(blocks), teams=each, folds=folds, lockstep=lockstep, time_left=time_left
            )
            run_coordinator(
                coordinator,
                here.coordinator_channel,
                here.interrupts,
                inherited=inherited,
                here=f"rank {world.rank} on {world.host}",
            )
            failure, interrupted = source.failure, coordinator.interrupted
        else:
            end = found if isinstance(found, End) else run_block(here.channel, world, train)
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
    return failure_told(summary["failure"])


def inherit(tuner: Any, inherited: Inheritance) -> None:
    """Make this rank the owner of the directory and the oracle, with the trials of the one that died."""
    tuner.has_directory = True
    keep_whole(tuner.oracle)
    if inherited.state is None:  # no trial has begun; the directory is as the search found it
        hold(Path(tuner.project_dir), "searching")
        tuner.reload()
    else:
        trials = inherited.changed.items()
        tuner.oracle.trials = {key: Trial.from_state(state) for key, state in trials}
    tuner.on_search_begin()
