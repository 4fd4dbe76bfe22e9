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

# Each waits for those before it; letters between ranks that never wrote to each other take a while.
_TURN_S, _LAST_TURN, _DELIVERY_S = 0.4, 25, 0.3


@contextmanager
def report_loss_once(
    channel: RankChannel, mail: Mail, world: RankWorld, *, hosts: Sequence[str], goes_on: str
) -> Iterator[None]:
    """Let one rank only tell that a rank has died which the search cannot do without.

    Args:
        channel: what this rank has heard from the others.
        mail: its letter box.
        world: all ranks, dead ones too.
        hosts: of every rank.
        goes_on: what the same command would do.

    Raises:
        PeerLostError: it has, there.
    """
    try:
        yield
    except PeerLostError as lost:
        end = PeerLostError(lost.rank, f"on {hosts[lost.rank]} {lost.problem}. {goes_on}")
        end.said = not _is_to_tell(mail, world.rank, world.size, told=channel.told or lost.said)
        raise end from lost.__cause__


def _is_to_tell(mail: Mail, rank: int, size: int, *, told: bool) -> bool:
    """Say whether this rank is to tell it, unless another one has; the others then hear that it does."""
    until_s = time.monotonic() + _TURN_S * max(0, min(rank - 1, _LAST_TURN))
    while not told and (left_s := until_s - time.monotonic()) > 0:
        letter = mail.receive(left_s)
        told = isinstance(letter, tuple) and isinstance(from_text(letter[1]), LossReported)
    if told:
        return False
    for peer in range(size):
        if peer != rank:
            mail.send(peer, to_text(LossReported(-1)))
    with suppress(PeerLostError):  # of whom has heard it, and ended
        mail.receive(_DELIVERY_S)
    return True
