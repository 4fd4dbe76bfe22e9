"""Roster of the blocks: their teams, and the trial that each trains; pure, as the coordinator is.

A team is the ranks that train one fold together. A block, which is given a trial, is one team, or as many as
there are folds. At the end of a search teams may become one, which has the number of the first of them, until
one of their ranks dies or they fail together.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnlo_common.search.coordinator._running_trial import RunningTrial

__all__ = ["Roster"]


class Roster:
    """The teams of all blocks.

    Attributes:
        count: how many teams there were to begin with.
        training: the trial that a team trains a fold of, by team.

    Args:
        blocks: how many blocks there are.
        teams: how many teams each has.

    Example:
        >>> roster = Roster(blocks=3, teams=1)
        >>> roster.unite(0, [1, 2])
        >>> roster.living, roster.strength(0), roster.news(0), roster.news(0)
        ([0], 3, (0, 1, 2), ())
        >>> roster.lose(1), roster.living
        (0, [0, 2])
    """

    def __init__(self, blocks: int, teams: int) -> None:
        self.count, self._each = blocks * teams, teams
        self.training: dict[int, RunningTrial] = {}
        self._made_of = {team: [team] for team in range(self.count)}
        self._teams = {block: [block * teams + index for index in range(teams)] for block in range(blocks)}
        self._short: set[int] = set()
        self._untold: set[int] = set()

    @property
    def living(self) -> list[int]:
        """The blocks that have teams, all with all of their ranks."""
        return [
            block for block, teams in self._teams.items() if teams and not self._short.intersection(teams)
        ]

    @property
    def idle(self) -> list[int]:
        """Those of them that train nothing."""
        return [block for block in self.living if not self.training.keys() & self._teams[block]]

    @property
    def idle_teams(self) -> list[int]:
        """The teams of living blocks that train nothing."""
        teams = (team for block in self.living for team in self._teams[block])
        return [team for team in teams if team not in self.training]

    def teams(self, block: int) -> list[int]:
        """Return the teams of a block."""
        return self._teams[block]

    def blocks_of(self, team: int) -> set[int]:
        """Return the blocks that the ranks of a team are from."""
        return {one // self._each for one in self._made_of[team]}

    def strength(self, team: int) -> int:
        """Return how many teams a team was made of."""
        return len(self._made_of[team])

    def news(self, team: int) -> tuple[int, ...]:
        """Return what a team is made of, if its ranks have not been told yet; else nothing."""
        if team not in self._untold:
            return ()
        self._untold.discard(team)
        return tuple(self._made_of[team])

    def unite(self, team: int, others: Sequence[int]) -> None:
        """Make several teams one."""
        for other in others:
            self._teams[other // self._each].remove(other)
            self._made_of[team] += self._made_of.pop(other)
            self._untold.add(team)

    def lose(self, team: int) -> int:
        """Take note of a death in what was a team to begin with; return the team that has lost a rank.

        If it was made of several, the others of them are teams again.
        """
        self._short.add(team)
        whole = next(one for one, made_of in self._made_of.items() if team in made_of)
        self.part(whole)
        return whole

    def part(self, team: int) -> None:
        """Make those teams again that a team was made of."""
        for one in self._made_of[team][1:]:
            self._made_of[one] = [one]
            self._teams[one // self._each].append(one)
            self._untold |= {team, one}
        self._made_of[team] = [team]
