"""Between the coordinator and its channel: messages to teams, and deaths among them."""

from __future__ import annotations

from dataclasses import dataclass

from nnlo_common.search.messages._search_messages import SearchMessage

__all__ = ["Death", "TeamMessage"]


@dataclass(frozen=True, slots=True)
class TeamMessage:
    """Action: a message to a team.

    Attributes:
        team: its index; those of the search ranks come after those of the blocks.
        message: what it says.
        leader_only: whether only the leader gets it; else each rank of the team does.
        made_of: the teams that are one from now on; empty: as it has been.
    """

    team: int
    message: SearchMessage
    leader_only: bool = False
    made_of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Death:
    """Event: a rank has died.

    Attributes:
        team: the team that it was in to begin with.
        rank: its number.
        host: its host.
    """

    team: int
    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def error(self) -> str:
        """The error of the trial that it trained."""
        return f"{self}, which trained it, has died (killed, crashed or out of memory)"

    def of_block(self, living: int) -> str:
        """Say what the death means, with so many blocks that go on."""
        return f"{self} has died; its block takes no more trials. Blocks that go on: {living}"
