"""Model of a rank, and what it shows of its vector: that of a server moves on while it serves."""

from __future__ import annotations

from nnlo_common.protocol import Server
from nnlo_common.training._model_vectors import Model

__all__ = ["ShownModel"]


class ShownModel:
    """Copies between a model and its vector, of which only a part may be the model's own memory.

    Parameters that do not share that memory show the vector as it was when it was last published, and those
    of 16 bits hold less than it does.

    Args:
        model: the model.
        server: the state machine of the vector's shard; None on a worker.
        moved_here: the user's optimizer moves a worker's parameters, so a script may, too.
        moved_outside: the framework moves a worker's parameters by itself between steps.
    """

    def __init__(self, model: Model, server: Server | None, *, moved_here: bool, moved_outside: bool) -> None:
        self._model, self._server = model, server
        self._moved_here, self._moved_outside = moved_here, moved_outside
        self._shown = -1  # commits of the centre that a server's model shows

    def publish(self) -> None:
        """Copy the vector into the parameters."""
        self._model.publish()
        self._shown = 0 if self._server is None else self._server.rule.clock

    def take_up(self) -> None:
        """Copy the parameters into their vector if the framework moves them by itself."""
        if self._moved_outside:
            self._model.absorb()

    def take_changes(self) -> None:
        """Take over what was changed in the model, where that counts.

        On a server between epochs: while it serves, its model shows an earlier centre. On a worker where
        more than exchanges moves the parameters.
        """
        if self._server is not None:
            if self._shown == self._server.rule.clock:
                self._model.absorb_changes()
        elif self._moved_outside:
            self._model.absorb()
        elif self._moved_here:
            self._model.absorb_changes()
