"""Who tells the user that a search cannot go on: one rank, wherever those that live cannot be ended by it.

Under ULFM MPI_Abort ends the rank that calls it and leaves the others, which find the same in their turn.
"""

from __future__ import annotations

import time
from contextlib import suppress

from nnlo_common._errors import PeerLostError
from nnlo_common.transport._mail import Mail
from nnlo_common.tune._messages import Told, from_text, to_text

__all__ = ["DIED", "is_to_tell"]

#: What has become of the rank that coordinates.
DIED = "has died, which coordinated the search"

# Each waits for those before it; letters between ranks that never wrote to each other take a while.
_TURN_S, _LAST_TURN, _DELIVERY_S = 0.4, 25, 0.3


def is_to_tell(mail: Mail, rank: int, size: int, *, told: bool = False) -> bool:
    """Say whether this rank is to tell the user why the search has ended; the others then hear that it does.

    Args:
        mail: this rank's letter box.
        rank: its number.
        size: how many ranks there are, dead ones too.
        told: whether another one has told it already.
    """
    until_s = time.monotonic() + _TURN_S * max(0, min(rank - 1, _LAST_TURN))
    while not told and (left_s := until_s - time.monotonic()) > 0:
        letter = mail.receive(left_s)
        told = isinstance(letter, tuple) and isinstance(from_text(letter[1]), Told)
    if told:
        return False
    for peer in range(size):
        if peer != rank:
            mail.send(peer, to_text(Told(-1)))
    with suppress(PeerLostError):  # of whom has heard it, and ended
        mail.receive(_DELIVERY_S)
    return True
