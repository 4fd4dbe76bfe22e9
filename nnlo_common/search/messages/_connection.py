"""Connection of the ranks of a search: the coordinator's channel, the others' channels, and their end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nnlo_common.base._signals import Interrupts
from nnlo_common.cluster.transport._mail import DivisibleWorld
from nnlo_common.search.messages._coordinator_channel import CoordinatorChannel
from nnlo_common.search.messages._loss_report import report_loss_once
from nnlo_common.search.messages._rank_channel import RankChannel
from nnlo_common.search.messages._search_messages import Left

__all__ = ["SearchConnection", "connect_search"]


@dataclass(frozen=True, slots=True)
class SearchConnection:
    """What one rank has of a search as long as it lasts.

    Attributes:
        channel: to the coordinator and within the team; not for the coordinator.
        coordinator_channel: the coordinator's own, to all teams.
        interrupts: the signals that have come here.
    """

    channel: RankChannel
    coordinator_channel: CoordinatorChannel
    interrupts: Interrupts


@contextmanager
def connect_search(
    world: DivisibleWorld, teams: Sequence[tuple[int, ...]], *, goes_on: str
) -> Iterator[SearchConnection]:
    """Connect the ranks of a search (collective); at the end wait until no message is under way.

    Args:
        world: the ranks; the first coordinates.
        teams: the ranks that train, or choose, together.
        goes_on: what the same command would do after the death of a rank that the search needs.

    Raises:
        PeerLostError: such a rank has died.
    """
    mine = next((team for team in teams if world.rank in team), (world.rank,))
    hosts = world.gather_text(world.host)
    mail = world.mail()
    channel = RankChannel(mail, 0, mine, mine.index(world.rank))
    coordinator_channel = CoordinatorChannel(mail, teams, hosts)
    with Interrupts() as interrupts, report_loss_once(channel, mail, world, hosts=hosts, goes_on=goes_on):
        yield SearchConnection(channel, coordinator_channel, interrupts)
        if world.rank == 0:
            coordinator_channel.await_leaving()  # before the mail closes
        else:
            channel.tell_coordinator(Left(-1))
    mail.close()
