"""Meeting of the ranks of a search: coordinator and all others join, exchange letters and part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nnlo_common.base._signals import Interrupts
from nnlo_common.cluster.transport._mail import DivisibleWorld, Mail
from nnlo_common.search.messages._coordinator_channel import CoordinatorChannel
from nnlo_common.search.messages._loss_report import report_loss_once
from nnlo_common.search.messages._rank_channel import RankChannel
from nnlo_common.search.messages._search_messages import Left

__all__ = ["SearchConnection", "connect_search"]


@dataclass(frozen=True, slots=True)
class SearchConnection:
    """What one rank has of a search as long as it lasts.

    Attributes:
        mail: its letter box.
        letters: those of the coordinator.
        channel: those of another rank.
        interrupts: the signals that have come here.
    """

    mail: Mail
    letters: CoordinatorChannel
    channel: RankChannel
    interrupts: Interrupts


@contextmanager
def connect_search(
    world: DivisibleWorld, teams: Sequence[tuple[int, ...]], *, goes_on: str
) -> Iterator[SearchConnection]:
    """Meet the other ranks (collective); at the end wait until nothing is under way.

    Args:
        world: the ranks; the first coordinates.
        teams: those that train, or choose, together.
        goes_on: what the same command would do after the death of a rank that nothing goes on without.

    Raises:
        PeerLostError: it has died.
    """
    mine = next((team for team in teams if world.rank in team), (world.rank,))
    hosts = world.gather_text(world.host)
    mail = world.mail()
    channel, letters = (
        RankChannel(mail, 0, mine, mine.index(world.rank)),
        CoordinatorChannel(mail, teams, hosts),
    )
    with Interrupts() as interrupts, report_loss_once(channel, mail, world, hosts=hosts, goes_on=goes_on):
        yield SearchConnection(mail, letters, channel, interrupts)
        if world.rank == 0:
            letters.await_leaving()  # before the post closes
        else:
            channel.tell_coordinator(Left(-1))
    mail.close()
