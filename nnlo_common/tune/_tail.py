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

from nnlo_common.tune._roster import Roster
from nnlo_common.tune._time_left import TimeLeft
from nnlo_common.tune._under_way import UnderWay

__all__ = ["Tail"]

# A trial that has had so much of the time of the longest so far is about to end.
_ENDS_SOON = 0.75


class Tail:
    """Who helps whom.

    Args:
        roster: the teams.
        time_left: knows how long trials take.
    """

    def __init__(self, roster: Roster, time_left: TimeLeft) -> None:
        self._roster, self._time = roster, time_left
        self._recalled: set[int] = set()
        self._mourning = False

    def folds(self, trials: Iterable[UnderWay]) -> list[tuple[int, UnderWay]]:
        """Return idle teams, each with a trial of which it is to train a fold that waits."""
        waiting = [under for under in trials for _ in under.waiting]
        return list(zip(self._roster.idle_teams, waiting, strict=False))

    def recalls(self, now_s: float) -> list[int]:
        """Return teams that are to leave, so that idle ones can join them: as many as are idle at most."""
        wanted = 0 if self._mourning else len(self._roster.idle_teams) - len(self._recalled)
        training = self._roster.training.items()
        helped = sorted(
            (self._roster.strength(team), -under.began_s, team)
            for team, under in training
            if not under.halted and team not in self._recalled and not self._ends_soon(now_s - under.began_s)
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

    def ended(self, team: int) -> None:
        """A team has ended its run."""
        self._recalled.discard(team)

    def mourn(self) -> None:
        """A rank has died."""
        self._mourning = True

    def _ends_soon(self, seconds: float) -> bool:
        return _ENDS_SOON * self._time.longest_s < seconds < self._time.longest_s
