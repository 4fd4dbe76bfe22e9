"""Place of a rank in its training: what the first line of its facts tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnlo_common.cluster._hosts import ClockOffset, describe_here
from nnlo_common.training._readable_options import readable
from nnlo_common.training._session import Session

__all__ = ["RankPlace"]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank's place in its training.

    Attributes:
        rank: its number.
        role: "alone", "server 0", "worker 0", ...
        host: its machine.
        cores: how many processor cores all ranks of this job there may use together.
        facts: further facts for the first line.
        clock: how far its host's clock is ahead of the first rank's.
    """

    rank: int
    role: str
    host: str
    cores: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    clock: ClockOffset = field(default_factory=ClockOffset)

    @classmethod
    def of(cls, team: Session | None) -> RankPlace:
        """Return the layout of a rank of this session; None: a process alone."""
        if team is None:
            here = describe_here()
            return cls(rank=0, role="alone", host=str(here["host"]), cores=int(here["cores"]))
        member = team.member
        facts = {
            "size": team.size,
            "servers": member.servers,
            "workers": member.workers,
            "group_size": member.group_size,
            "algorithm": readable(team.algorithm.describe()),
            "parameters": team.model.parameters.vector.size,
        }
        return cls(
            rank=team.rank,
            role=member.role,
            host=member.place.host,
            cores=member.place.host_cores,
            facts=facts,
            clock=member.clock,
        )
