"""Connection of the ranks of a search: opens the channels of all ranks, and closes them."""

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
    """One rank's connection to a running search.

    Attributes:
        channel: to the coordinator and within the team; unused on the coordinator.
        coordinator_channel: to all teams; used only on the coordinator.
        interrupts: the signals that this process received.
    """

    channel: RankChannel
    coordinator_channel: CoordinatorChannel
    interrupts: Interrupts


@contextmanager
def connect_search(
    world: DivisibleWorld, teams: Sequence[tuple[int, ...]], *, hint: str
) -> Iterator[SearchConnection]:
    """Connect the ranks of a search (collective); on exit wait until no message is under way.

    Args:
        world: the ranks; the first is the coordinator.
        teams: the ranks of each team, and of each search rank.
        hint: tells the user what a rerun does after a death that ends the search.

    Raises:
        PeerLostError: a rank that the search needs died.
    """
    mine = next((team for team in teams if world.rank in team), (world.rank,))
    hosts = world.gather_text(world.host)
    mail = world.mail()
    channel = RankChannel(mail, 0, mine, mine.index(world.rank))
    coordinator_channel = CoordinatorChannel(mail, teams, hosts)
    with Interrupts() as interrupts, report_loss_once(channel, mail, world, hosts=hosts, hint=hint):
        yield SearchConnection(channel, coordinator_channel, interrupts)
        if world.rank == 0:
            coordinator_channel.await_leaving()  # before the mail closes
        else:
            channel.tell_coordinator(Left(-1))
    mail.close()
