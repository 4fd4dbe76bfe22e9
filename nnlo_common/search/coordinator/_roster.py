"""Roster of the blocks, their teams, and the trial that each team trains; pure, like the coordinator.

A team is the ranks that train one fold together. A block, which gets a whole trial, is one team or one team
per fold. At the end of a search teams may unite under the number of the first; they part when one of their
ranks dies or they fail together.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnlo_common.search.coordinator._running_trial import RunningTrial

__all__ = ["Roster"]


class Roster:
    """The teams of all blocks.

    Attributes:
        count: the number of teams at the start.
        training: by team, the trial it trains a fold of.

    Args:
        blocks: the number of blocks.
        teams: teams per block.

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
        self._incomplete: set[int] = set()
        self._changed: set[int] = set()

    @property
    def living(self) -> list[int]:
        """The blocks that have teams, none of which lost a rank."""
        return [
            block
            for block, teams in self._teams.items()
            if teams and not self._incomplete.intersection(teams)
        ]

    @property
    def idle(self) -> list[int]:
        """The living blocks that train nothing."""
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
        """Return the blocks that a team's ranks came from."""
        return {one // self._each for one in self._made_of[team]}

    def strength(self, team: int) -> int:
        """Return how many original teams are in a team."""
        return len(self._made_of[team])

    def news(self, team: int) -> tuple[int, ...]:
        """Return the original teams in a team, once after each change; else nothing."""
        if team not in self._changed:
            return ()
        self._changed.discard(team)
        return tuple(self._made_of[team])

    def unite(self, team: int, others: Sequence[int]) -> None:
        """Unite teams under the number of the first."""
        for other in others:
            self._teams[other // self._each].remove(other)
            self._made_of[team] += self._made_of.pop(other)
            self._changed.add(team)

    def lose(self, team: int) -> int:
        """Record a death in an original team; return the team that now contains it.

        If that is a united team, it parts.
        """
        self._incomplete.add(team)
        whole = next(one for one, made_of in self._made_of.items() if team in made_of)
        self.part(whole)
        return whole

    def part(self, team: int) -> None:
        """Split a united team into its original teams."""
        for one in self._made_of[team][1:]:
            self._made_of[one] = [one]
            self._teams[one // self._each].append(one)
            self._changed |= {team, one}
        self._made_of[team] = [team]
