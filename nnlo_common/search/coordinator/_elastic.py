"""The end of a search, when nothing is left to begin: teams that are idle help those that train.

    a fold that waits     is trained by an idle team
    a fold that trains    is recalled: its team leaves after its next checkpoint, and goes on with idle ones

Which trial is helped: the one with the fewest ranks, of these that which began last, as it has most to do.
What is about to end is left alone, because to begin again takes time, too. After a death no team is recalled,
as MPI cuts no part out of ranks of which some are dead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nnlo_common.search.coordinator._roster import Roster
from nnlo_common.search.coordinator._running_trial import RunningTrial
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.search.messages._search_messages import Done

__all__ = ["ElasticPolicy"]

# A trial that has had so much of the time of the longest so far is about to end.
_ENDS_SOON = 0.75
# What company has nothing to do with, or a training that has come to its end.
_FAILS_ANYWAY = ("died", "NaN")


class ElasticPolicy:
    """Decides which idle teams help which trial.

    Args:
        roster: the teams.
        time_left: knows how long trials take.
    """

    def __init__(self, roster: Roster, time_left: TimeLeft) -> None:
        self._roster, self._time = roster, time_left
        self._recalled: set[int] = set()
        self._lonely: set[int] = set()  # numbers of trials that are not helped
        self._mourning = False

    def folds(self, trials: Iterable[RunningTrial]) -> list[tuple[int, RunningTrial]]:
        """Return idle teams, each with a trial of which it is to train a fold that waits."""
        waiting = [running for running in trials for _ in running.waiting]
        return list(zip(self._roster.idle_teams, waiting, strict=False))

    def recalls(self, now_s: float) -> list[int]:
        """Return teams that are to leave, so that idle ones can join them: as many as are idle at most."""
        wanted = 0 if self._mourning else len(self._roster.idle_teams) - len(self._recalled)
        training = self._roster.training.items()
        helped = sorted(
            (self._roster.strength(team), -running.began_s, team)
            for team, running in training
            if team not in self._recalled and self._is_to_be_helped(running, now_s)
        )
        teams = [team for _, _, team in helped[: max(0, wanted)]]
        self._recalled.update(teams)
        return teams

    def joining(self, team: int) -> list[int]:
        """Return the idle teams that join one which has left for them; others may be still to leave."""
        idle, leaving = [one for one in self._roster.idle_teams if one != team], max(1, len(self._recalled))
        self._recalled.discard(team)
        if self._mourning:
            return []
        return idle[: math.ceil(len(idle) / leaving)]

    def ended(self, team: int, running: RunningTrial, message: Done) -> bool:
        """Take in that a team has ended its run; say whether it is to go on without those who joined it.

        That a training fails may be because of them: it is not fit for so many. Without them it fails.
        """
        self._recalled.discard(team)
        company = self._roster.strength(team) > 1 and message.state == "failed" and not running.halted
        if not company or message.failure in _FAILS_ANYWAY:
            return False
        self._lonely.add(running.trial.number)
        self._roster.part(team)
        return True

    def report_death(self) -> None:
        """A rank has died."""
        self._mourning = True

    def _is_to_be_helped(self, running: RunningTrial, now_s: float) -> bool:
        if running.halted or running.trial.number in self._lonely:
            return False
        return not _ENDS_SOON * self._time.longest_s < now_s - running.began_s < self._time.longest_s
