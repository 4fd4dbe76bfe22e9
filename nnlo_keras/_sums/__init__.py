"""The sum of a worker's gradients since its last exchange, added up within the training step.

Each variable has one more of its shape beside it. To add there, and to begin anew, must cost as little as a
plain optimizer's step does; what is cheap is different where Python runs at every step (torch) and where the
step is traced once (tensorflow, jax).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras

from nnlo_common import FlatVector

__all__ = ["GradientAccumulator", "gradient_sum"]


class GradientAccumulator(Protocol):
    """Adds up the gradients of some variables."""

    def add(self, gradients: Sequence[Any]) -> None:
        """Add one gradient for each variable, or None; within the training step."""

    def tie(self, vectors: Sequence[FlatVector], model: Any) -> None:
        """Say where sums are brought to, in turn; all have the layout of the variables."""

    def collect(self) -> None:
        """Bring the sum into the vector whose turn it is, with marks behind those that there are.

        A mark may be that of several gradients.
        """

    def restart(self, turn: int) -> None:
        """Begin a new sum, for the vector of that number."""

    def resume(self) -> None:
        """Go on with the sum that lies in the vector whose turn it is, as `collect` has brought it there."""


def gradient_sum(optimizer: Any, variables: Sequence[Any]) -> GradientAccumulator:
    """Make a sum of gradients, of variables that belong to an optimizer."""
    if keras.backend.backend() == "torch":
        from nnlo_keras._sums._torch import TorchSum

        return TorchSum(variables)
    from nnlo_keras._sums._traced import TracedSum

    return TracedSum(optimizer, variables)
