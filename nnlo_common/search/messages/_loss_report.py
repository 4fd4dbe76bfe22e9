"""Report to the user that a search cannot continue: from one rank, wherever the living cannot be ended by it.

Under ULFM MPI_Abort ends the rank that calls it and leaves the others, which find the same in their turn.
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

# Each waits for those before it; first messages between two ranks take a while.
_TURN_S, _LAST_TURN, _DELIVERY_S = 0.4, 25, 0.3


@contextmanager
def report_loss_once(
    channel: RankChannel, mail: Mail, world: RankWorld, *, hosts: Sequence[str], goes_on: str
) -> Iterator[None]:
    """Let only one rank report the death of a rank that the search needs.

    Args:
        channel: this rank's, to the others.
        mail: this rank's.
        world: all ranks, dead ones too.
        hosts: of every rank.
        goes_on: what the same command would do.

    Raises:
        PeerLostError: such a rank has died.
    """
    try:
        yield
    except PeerLostError as lost:
        end = PeerLostError(lost.rank, f"on {hosts[lost.rank]} {lost.problem}. {goes_on}")
        end.said = not _reports(mail, world.rank, world.size, told=channel.told or lost.said)
        raise end from lost.__cause__


def _reports(mail: Mail, rank: int, size: int, *, told: bool) -> bool:
    """Say whether this rank reports it: unless another has. If so the others are told."""
    until_s = time.monotonic() + _TURN_S * max(0, min(rank - 1, _LAST_TURN))
    while not told and (left_s := until_s - time.monotonic()) > 0:
        received = mail.receive(left_s)
        told = isinstance(received, tuple) and isinstance(from_text(received[1]), LossReported)
    if told:
        return False
    for peer in range(size):
        if peer != rank:
            mail.send(peer, to_text(LossReported(-1)))
    with suppress(PeerLostError):  # of whom has heard it, and ended
        mail.receive(_DELIVERY_S)
    return True
