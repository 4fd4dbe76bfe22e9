"""Connection of the ranks of a search: opens the channels of all ranks, and closes them.

One rank reports that a search cannot continue. Under ULFM, MPI_Abort ends only the rank that calls it, so the
other ranks run into the same error in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._signals import Interrupts
from nnlo_common.cluster.transport._endpoint import DivisibleWorld, Mail
from nnlo_common.search.messages._coordinator_channel import CoordinatorChannel
from nnlo_common.search.messages._rank_channel import RankChannel
from nnlo_common.search.messages._search_messages import Left, LossReported, from_text, to_text

__all__ = ["SearchConnection", "connect_search"]

# Each rank waits for the ranks before it; the first message between two ranks takes a while.
_TURN_S, _LAST_TURN, _DELIVERY_S = 0.4, 25, 0.3


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
    with Interrupts() as interrupts, _reporting_loss(channel, mail, world, hosts, hint):
        yield SearchConnection(channel, coordinator_channel, interrupts)
        if world.rank == 0:
            coordinator_channel.await_leaving()  # before the mail closes
        else:
            channel.tell_coordinator(Left(-1))
    mail.close()


@contextmanager
def _reporting_loss(
    channel: RankChannel, mail: Mail, world: DivisibleWorld, hosts: Sequence[str], hint: str
) -> Iterator[None]:
    """Let only one rank report the death of a rank that the search needs."""
    try:
        yield
    except PeerLostError as lost:
        end = PeerLostError(lost.rank, f"on {hosts[lost.rank]} {lost.problem}. {hint}")
        end.said = not _reports(mail, world.rank, world.size, reported=channel.told or lost.said)
        raise end from lost.__cause__


def _reports(mail: Mail, rank: int, size: int, *, reported: bool) -> bool:
    """Return whether this rank reports the loss: only if no other rank has. If so, notify the others."""
    until_s = time.monotonic() + _TURN_S * max(0, min(rank - 1, _LAST_TURN))
    while not reported and (left_s := until_s - time.monotonic()) > 0:
        received = mail.receive(left_s)
        reported = isinstance(received, tuple) and isinstance(from_text(received[1]), LossReported)
    if reported:
        return False
    for peer in range(size):
        if peer != rank:
            mail.send(peer, to_text(LossReported(-1)))
    with suppress(PeerLostError):  # a notified rank may exit
        mail.receive(_DELIVERY_S)
    return True
