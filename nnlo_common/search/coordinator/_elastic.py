"""Elastic end of a search: when nothing is left to begin, idle teams help running trials.

    a waiting fold     is trained by an idle team
    a running fold     is recalled: its team leaves after its next checkpoint and resumes with idle teams

Help goes to the trial with the fewest ranks; among equals to the one that began last, which has most left to
do. A trial about to end is not recalled, because a restart takes time too. After a death no team is recalled:
MPI cannot split a communicator that has dead ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nnlo_common.search.coordinator._roster import Roster
from nnlo_common.search.coordinator._running_trial import RunningTrial
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.search.messages._search_messages import Done

__all__ = ["ElasticPolicy"]

# A trial is about to end after this share of the longest trial's time.
_ENDS_SOON = 0.75
# Failures that the added ranks did not cause.
_FAILS_ANYWAY = ("died", "NaN")


class ElasticPolicy:
    """Decides which idle teams help which trial.

    Args:
        roster: the teams.
        time_left: how long trials take.
    """

    def __init__(self, roster: Roster, time_left: TimeLeft) -> None:
        self._roster, self._time = roster, time_left
        self._recalled: set[int] = set()
        self._failed_with_helpers: set[int] = set()  # numbers of trials; they get no more helpers
        self._rank_died = False

    def folds(self, trials: Iterable[RunningTrial]) -> list[tuple[int, RunningTrial]]:
        """Pair idle teams with trials that have a waiting fold."""
        waiting = [running for running in trials for _ in running.waiting]
        return list(zip(self._roster.idle_teams, waiting, strict=False))

    def recalls(self, now_s: float) -> list[int]:
        """Return the teams to recall so that idle teams can join them; at most as many as are idle."""
        wanted = 0 if self._rank_died else len(self._roster.idle_teams) - len(self._recalled)
        training = self._roster.training.items()
        helped = sorted(
            (self._roster.strength(team), -running.began_s, team)
            for team, running in training
            if team not in self._recalled and self._needs_help(running, now_s)
        )
        teams = [team for _, _, team in helped[: max(0, wanted)]]
        self._recalled.update(teams)
        return teams

    def joining(self, team: int) -> list[int]:
        """Return the idle teams that join a recalled team; leave a share for recalled teams still to come."""
        idle, leaving = [one for one in self._roster.idle_teams if one != team], max(1, len(self._recalled))
        self._recalled.discard(team)
        if self._rank_died:
            return []
        return idle[: math.ceil(len(idle) / leaving)]

    def ended(self, team: int, running: RunningTrial, message: Done) -> bool:
        """Handle the end of a team's run; return whether to restart it without the teams that joined it.

        A training may fail only because it cannot use so many ranks; a failure without helpers counts.
        """
        self._recalled.discard(team)
        helped = self._roster.strength(team) > 1 and message.state == "failed" and not running.halted
        if not helped or message.failure in _FAILS_ANYWAY:
            return False
        self._failed_with_helpers.add(running.trial.number)
        self._roster.part(team)
        return True

    def report_death(self) -> None:
        """Recall no more teams, because a rank died."""
        self._rank_died = True

    def _needs_help(self, running: RunningTrial, now_s: float) -> bool:
        if running.halted or running.trial.number in self._failed_with_helpers:
            return False
        return not _ENDS_SOON * self._time.longest_s < now_s - running.began_s < self._time.longest_s
