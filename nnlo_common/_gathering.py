"""What ranks have of each other beside their exchanges: the whole model, means, and copies.

All of it is asked at the desk of the first server, but for the centre's parameters, which lie on all servers.
Running statistics and the like never go through an optimizer: each worker brings its own at the end of its
epoch, and whoever wants those of the centre gets their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from nnlo_common._flat import Vector
from nnlo_common._framework import Buffers, Model
from nnlo_common._roles import TeamPart
from nnlo_common.protocol import DESK_NUMBERS

__all__ = ["Gathering"]

# As many numbers as fit into one question, with a few words before them.
_PIECE = DESK_NUMBERS - 64


class Gathering:
    """What one rank brings to the others, and gets from them.

    Attributes:
        part: what this rank asks by.
        views: how often all have seen the centre together; what is brought from then on is not of it.

    Args:
        part: what this rank asks by.
        model: this rank's.
        buffers: the model's, if it has any.
        speaks: whether it is this rank's copies that all get.
    """

    def __init__(self, part: TeamPart, model: Model, buffers: Buffers | None, *, speaks: bool) -> None:
        self.part, self._model, self._buffers, self._speaks = part, model, buffers, speaks
        self.views = 0

    def meet(self) -> None:
        """Wait for all ranks."""
        self.part.ask({"ask": "mean", "values": {}, "weight": 0})

    def agree_on_last_round(self, gathered: int) -> bool:
        """Return whether any rank has steps that no round has had; all ranks call it."""
        question = {"ask": "last round", "values": {"gathered": float(gathered)}, "weight": 1}
        return bool(self.part.ask(question)[0]["means"]["gathered"])

    def end_last_round(self) -> None:
        """Wait until all workers have made it."""
        self.part.ask({"ask": "last round", "values": {}, "weight": 0})

    def mean(self, values: Mapping[str, float], weight: float, epochs: int) -> dict[str, float]:
        """Return the means over all ranks after so many epochs; each gets the same."""
        question = {"ask": "mean", "values": dict(values), "weight": weight, "epochs": epochs}
        return dict(self.part.ask(question)[0]["means"])

    def copied(self, values: Mapping[str, Any], vector: Vector | None) -> dict[str, Any]:
        """Return the first server's values, and let `vector` hold its numbers; all ranks call it alike."""
        answer, _ = self.part.ask({"ask": "copy", "values": dict(values)})
        for start in range(0, 0 if vector is None else vector.size, _PIECE):
            assert vector is not None  # or there would be no piece
            piece = vector[start : start + _PIECE]
            _, numbers = self.part.ask({"ask": "copy", "values": {}}, piece if self._speaks else None)
            np.copyto(piece, numbers)
        return dict(answer["values"])

    def bring_buffers(self, weight: float, *, instead: bool = False) -> None:
        """Let this rank's buffers count in the mean of all, or be what all get instead of it."""
        if self._buffers is not None and weight:
            self._buffers.gather()
            question = {"ask": "average", "weight": weight, "views": self.views}
            self.part.ask(question | ({"instead": True} if instead else {}), self._buffers.flat.vector)

    def take_buffers(self) -> None:
        """Give the model the mean of all buffers."""
        self._swap_buffers(None)

    def take_center(self) -> Vector:
        """Give the model the centre as it is now; return a copy of its parameters."""
        self.part.look(self._model.parameters.vector)
        center = self._model.parameters.vector.copy()
        self._model.publish()
        self.take_buffers()
        return center

    @contextmanager
    def lent(self, center: Vector) -> Iterator[None]:
        """Let the model have these parameters, and the mean of all buffers, for the length of a block."""
        own, own_buffers = self._model.parameters.vector.copy(), self._swap_buffers(None)
        try:
            self._swap(center)
            yield
        finally:
            self._swap(own)
            self._swap_buffers(own_buffers)

    def _swap(self, vector: Vector) -> None:
        np.copyto(self._model.parameters.vector, vector)
        self._model.publish()

    def _swap_buffers(self, vector: Vector | None) -> Vector | None:
        """Give the model these buffers, or the mean of all; return those it had."""
        if self._buffers is None:
            return None
        self._buffers.gather()
        own = self._buffers.flat.vector.copy()
        if vector is None:
            _, vector = self.part.ask({"ask": "average", "weight": 0, "views": self.views})
        np.copyto(self._buffers.flat.vector, vector)
        self._buffers.scatter()
        return own
