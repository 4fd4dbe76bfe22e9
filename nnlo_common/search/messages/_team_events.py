"""Messages to teams and deaths in them, between the coordinator and its channel."""

from __future__ import annotations

from dataclasses import dataclass

from nnlo_common.search.messages._search_messages import SearchMessage

__all__ = ["Death", "TeamMessage"]


@dataclass(frozen=True, slots=True)
class TeamMessage:
    """Action: a message to a team.

    Attributes:
        team: the team's index; search ranks come after the blocks' teams.
        message: the message.
        leader_only: whether only the leader gets it; else every rank of the team.
        made_of: the original teams that are united from now on; empty: no change.
    """

    team: int
    message: SearchMessage
    leader_only: bool = False
    made_of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Death:
    """Event: a rank died.

    Attributes:
        team: the team that it was in at the start.
        rank: the rank.
        host: its host.
    """

    team: int
    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def error(self) -> str:
        """The error of the trial that the rank trained."""
        return f"{self}, which trained it, has died (killed, crashed or out of memory)"

    def of_block(self, living: int) -> str:
        """Describe the death and how many blocks are left."""
        return f"{self} has died; its block gets no more trials. Blocks left: {living}"
