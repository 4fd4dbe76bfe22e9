"""Report that a search cannot continue, from one rank only.

Under ULFM, MPI_Abort ends only the rank that calls it, so the other ranks run into the same error in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from nnlo_common.base._errors import PeerLostError
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.cluster.transport._mail import Mail
from nnlo_common.search.messages._rank_channel import RankChannel
from nnlo_common.search.messages._search_messages import LossReported, from_text, to_text

__all__ = ["report_loss_once"]

# Each rank waits for the ranks before it; the first message between two ranks takes a while.
_TURN_S, _LAST_TURN, _DELIVERY_S = 0.4, 25, 0.3


@contextmanager
def report_loss_once(
    channel: RankChannel, mail: Mail, world: RankWorld, *, hosts: Sequence[str], hint: str
) -> Iterator[None]:
    """Let only one rank report the death of a rank that the search needs.

    Args:
        channel: this rank's channel.
        mail: this rank's mail.
        world: all ranks, including dead ones.
        hosts: the host of every rank.
        hint: tells the user what a rerun does.

    Raises:
        PeerLostError: a rank that the search needs died.
    """
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
