"""Ranks that leave a training while others train on: a server warns of them."""

from __future__ import annotations

import math

from nnlo_common.base._errors import warn
from nnlo_common.protocol import Kind, Message, Server, Standing

__all__ = ["CONTRIBUTIONS", "OF_STEPS", "EarlyLeavers"]

#: Messages of a worker that change the centre, and those that only a worker that makes steps sends.
CONTRIBUTIONS = (Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT)
OF_STEPS = (*CONTRIBUTIONS, Kind.LOCK)


class EarlyLeavers:
    """Warns, once, that a worker trains in an epoch for which another rank's loop is over.

    Without epochs nobody can tell: in a loop of its own each rank leaves when it is done.

    Args:
        server: the state machine.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._told = server, False
        self._left_after = math.inf  # the number of epochs of the worker that left first

    def look(self, message: Message, own_epochs: int, *, tells: bool) -> None:
        """Look at a message that has arrived.

        Args:
            message: the message.
            own_epochs: the epochs after which this server has left; 0: it has not, or has no epochs.
            tells: this server warns, one of several.
        """
        peers, sender = self._server.peers, message.sender
        if message.kind is Kind.LEAVE:
            self._left_after = min(self._left_after, peers[sender].epochs)
        if message.kind not in OF_STEPS or self._told or self._server.stopping:
            return
        done = peers[sender].epochs
        if 0 < own_epochs <= done:
            gone, epochs = self._server.rank, own_epochs
            found = (
                "A server gets no batch in its loop: that is not the end of the training, and what it has "
                "evaluated or saved since is not the trained model"
            )
        elif 0 < done >= self._left_after:
            gone = min(rank for rank, peer in peers.items() if peer.standing is Standing.LEFT)
            epochs, found = peers[gone].epochs, "It takes no part in what follows"
        else:
            return
        self._told = True
        if tells:
            warn(
                f"rank {gone} has left the training after epoch {epochs}, but rank {sender} trains in epoch "
                f"{done + 1}. {found}. Loop over as many epochs on all ranks, or end the training on all of "
                "them with optimizer.stop()"
            )
