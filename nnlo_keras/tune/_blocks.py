"""A search over blocks of ranks: what each rank does in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial

from nnlo_common._errors import ConfigurationError, PeerLostError
from nnlo_common._interrupts import EXIT_CODE, Interrupts
from nnlo_common.protocol import Lost
from nnlo_common.transport._mail import DivisibleWorld, Mail
from nnlo_common.tune._block import run_block
from nnlo_common.tune._choosers import Post
from nnlo_common.tune._coordinator import SIGNAL
from nnlo_common.tune._messages import End, from_text, to_text
from nnlo_common.tune._office import Office
from nnlo_common.tune._optimize import _agree
from nnlo_common.tune._search import cut_teams
from nnlo_common.tune._telling import told_once
from nnlo_keras.tune._dispatch import Dispatch

__all__ = ["search_over"]

# How long an oracle that has nothing to say, though nobody trains, is left to think.
_THINKING_S = 0.05
# How long the coordinator waits for letters before it looks for signals.
_LOOK_EVERY_S = 0.2


def search_over(
    tuner: Any, world: DivisibleWorld, *, block_size: int, folds: int, train: Callable[[Any], float]
) -> None:
    """Do this rank's part in a search; on return all ranks have its results (collective).

    Args:
        tuner: this rank's; that of rank 0 has the oracle which counts.
        world: the ranks.
        block_size: how many ranks train one trial.
        folds: how many folds it has.
        train: trains one fold of a trial on this rank.

    Raises:
        ConfigurationError: the ranks cannot be cut into blocks, do not agree on what is asked, or another job
            has the directory.
        SystemExit: with status 75, after SIGTERM or SIGUSR1.
    """
    release = world.engage()
    try:
        blocks = _agree(world, block_size, tuner.facts)
        _claim(tuner, world)
    except Exception as error:
        error.collective = True  # type: ignore[attr-defined]
        release()
        raise
    teams = cut_teams(blocks, folds)
    mine = next((team for team in teams if world.rank in team), (world.rank,))
    mail, part = world.mail(), world.part(mine)
    failure: Exception | None
    office = Office(mail, 0, mine, part.rank)
    with Interrupts() as interrupts, told_once(office, mail, world):
        if world.rank == 0:
            dispatch = Dispatch(tuner, blocks=len(blocks), teams=len(teams) // len(blocks), folds=folds)
            _coordinate(mail, teams, dispatch, interrupts)
            failure, interrupted = dispatch.failure, dispatch.interrupted
        else:
            end = run_block(office, part, train)
            failure, interrupted = _take_over(tuner, end), end.interrupted
        world.gather_text("")  # nobody may have a letter under way when the post closes
    mail.close()
    part.close()
    release()
    if failure is not None:
        failure.collective = True  # type: ignore[attr-defined]
        raise failure
    if interrupted:
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


def _coordinate(
    mail: Mail, teams: Sequence[tuple[int, ...]], dispatch: Dispatch, interrupts: Interrupts
) -> None:
    team_of = {rank: index for index, team in enumerate(teams) for rank in team}
    posts = dispatch.ask()
    while True:
        _deliver(mail, teams, posts)
        if dispatch.over:
            return
        letter = mail.receive(_THINKING_S if dispatch.idle else _LOOK_EVERY_S)
        if isinstance(letter, Lost):
            problem = "has died, so the search ends; the same command goes on from the tuner's directory"
            raise PeerLostError(letter.rank, problem)
        if letter is not None:
            posts = dispatch.handle(team_of[letter[0]], from_text(letter[1]))
        else:
            posts = dispatch.ask() if dispatch.idle else []
        if interrupts.came:
            posts += dispatch.interrupt(SIGNAL)


def _deliver(mail: Mail, teams: Sequence[tuple[int, ...]], posts: Sequence[Post]) -> None:
    for post in posts:
        for rank in teams[post.team]:
            mail.send(rank, to_text(post.message))


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
