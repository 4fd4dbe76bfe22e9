"""Coordinator's channel: messages to and from the teams, and deaths in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nnlo_common.cluster.transport._endpoint import Mail
from nnlo_common.protocol import Lost
from nnlo_common.search.messages._search_messages import Left, SearchMessage, Start, from_text, to_text
from nnlo_common.search.messages._team_events import Death, TeamMessage

__all__ = ["CoordinatorChannel"]


class CoordinatorChannel:
    """Sends and receives the messages between the coordinator and the teams.

    Args:
        mail: the coordinator's.
        teams: the ranks of every team.
        hosts: the host of every rank.
    """

    def __init__(self, mail: Mail, teams: Sequence[tuple[int, ...]], hosts: Sequence[str]) -> None:
        self._mail, self._hosts, self._first = mail, hosts, tuple(teams)
        self._teams = list(teams)  # current ranks of each team
        self._team_of = {rank: index for index, team in enumerate(teams) for rank in team}
        self._present = set(self._team_of)

    def deliver(self, messages: Sequence[TeamMessage]) -> None:
        """Send messages to the living ranks of their teams."""
        for sent in messages:
            message = sent.message
            if sent.made_of and isinstance(message, Start):
                self._regroup(sent.team, sent.made_of)
                message = replace(message, members=self._teams[sent.team])
            ranks, text = self._teams[sent.team], to_text(message)
            for rank in ranks[:1] if sent.leader_only else ranks:
                if rank in self._present:
                    self._mail.send(rank, text)

    def receive(self, timeout_s: float | None) -> tuple[int, SearchMessage] | Death | None:
        """Return the next message with its team, or a death; None after the timeout."""
        received = self._mail.receive(timeout_s)
        if received is None:
            return None
        if isinstance(received, Lost):
            rank = received.rank
            self._present.discard(rank)
            return Death(self._team_of[rank], rank, self._hosts[rank])
        rank, text = received
        message = from_text(text, f"the message from rank {rank}")
        if isinstance(message, Left):
            self._present.discard(rank)
        return self._team_of[rank], message

    def _regroup(self, team: int, made_of: Sequence[int]) -> None:
        """Unite the ranks of the original teams `made_of`; the first rank leads."""
        together = tuple(rank for one in made_of for rank in self._first[one])
        parted = [ranks for ranks in self._teams if not set(together).isdisjoint(ranks)]
        for one in {self._team_of[rank] for ranks in parted for rank in ranks}:
            self._teams[one] = self._first[one]
        for one in made_of:
            self._teams[one] = ()
        self._teams[team] = together

    def await_leaving(self) -> None:
        """Wait until every living rank has left, so that no message is under way."""
        while self._present:
            self.receive(None)
