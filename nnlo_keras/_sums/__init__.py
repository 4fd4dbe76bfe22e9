"""Sums of a worker's gradients since its last exchange, added up within the training step.

Each variable has an accumulator of the same shape. Adding and restarting must cost no more than a plain
optimizer's step, so there are two versions: torch runs Python at every step, tensorflow and jax trace the
step once.
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
        """Add one gradient or None for each variable; runs within the training step."""

    def tie(self, vectors: Sequence[FlatVector], model: Any) -> None:
        """Set the vectors that take the sums, in turn; all have the layout of the variables."""

    def collect(self) -> None:
        """Copy the sum into the current vector, and mark which gradients are present.

        A mark may be the sum of several gradients' marks.
        """

    def twice(self) -> bool:
        """Whether a variable has more than one gradient in the sum that `collect` has copied."""

    def restart(self, turn: int) -> None:
        """Begin a new sum, for the vector with this index."""

    def resume(self) -> None:
        """Resume with the sum that `collect` has copied into the current vector."""


def gradient_sum(optimizer: Any, variables: Sequence[Any], *, changed: bool = False) -> GradientAccumulator:
    """Make a gradient sum for an optimizer's variables.

    Args:
        optimizer: the owner of the variables that hold the sums.
        variables: the variables that get gradients.
        changed: the collected sums are changed, as the mean over a group is made in their place.
    """
    if keras.backend.backend() == "torch":
        from nnlo_keras._sums._torch import TorchSum

        return TorchSum(variables)
    from nnlo_keras._sums._traced import TracedSum

    return TracedSum(optimizer, variables, changed=changed)
