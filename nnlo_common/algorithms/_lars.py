"""LARS and LARC: learning rates per parameter, from the ratio of its norm to its gradient's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nnlo_common.algorithms._vector_optimizer import Optimizer, Work, descend
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Vector

__all__ = ["LARS"]


@dataclass(eq=False, kw_only=True)
class LARS(Optimizer):
    """Momentum SGD with a rate of its own for each parameter: You et al. 2017, arXiv:1708.03888.

        r <- trust * |x| / (|g| + weight_decay * |x| + epsilon)      per parameter; LARS
        r <- min(r / learning_rate, 1)                               clip=True; LARC
        b <- momentum * b + r * (g + weight_decay * x)               b starts at 0
        x <- x - learning_rate * b

    Where |x| or |g| is 0 the gradient is not scaled. LARC never steps further than SGD. A vector counts as
    one parameter until `fit` sets the sizes of its parameters; a training calls `fit` itself.

    Args:
        learning_rate, weight_decay, epsilon: at least 0.
        momentum: in [0, 1).
        trust: above 0; the paper uses 0.001, NVIDIA's LARC 0.02.
        clip: LARC instead of LARS.

    Example:
        >>> x = np.array([3, 4, 10], np.float32)
        >>> optimizer = LARS(1.0, trust=0.1)
        >>> optimizer.fit([2, 1])
        >>> optimizer.step(x, np.array([100, 0, -1], np.float32))
        >>> print(x)  # moved by a tenth of its length each
        [ 2.5  4.  11. ]
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    trust: float = 0.001
    epsilon: float = 1e-8
    clip: bool = False
    _coordinatewise = False
    _ranges = Optimizer._ranges | {"epsilon": (0.0, math.inf), "trust": (0.0, math.inf)}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes: list[int] | None = None

    def fit(self, sizes: Sequence[int]) -> None:
        """Set the number of values of each parameter, in order."""
        self._sizes = [size for size in sizes if size]

    def _parts(self, size: int) -> list[slice]:
        ends = np.cumsum([size] if self._sizes is None else self._sizes).tolist()
        return [slice(start, end) for start, end in zip([0, *ends][:-1], ends, strict=True)]

    def _prepare(self, size: int) -> None:
        if self._sizes is not None and sum(self._sizes) != size:
            raise ConfigurationError(
                f"LARS was fitted to parameters of {sum(self._sizes)} values together and got a vector of "
                f"{size}; call fit with the sizes of the vector that it steps"
            )
        super()._prepare(size)

    def _initial(self) -> dict[str, float]:
        return {"buffer": 0.0} if self.momentum else {}

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        direction = work.first
        length, slope = math.sqrt(np.dot(x, x)), math.sqrt(np.dot(gradient, gradient))
        if length and slope:
            ratio = self.trust * length / (slope + self.weight_decay * length + self.epsilon)
            if self.clip:
                ratio = min(ratio / self.learning_rate, 1.0) if self.learning_rate else 1.0
            np.add(gradient, np.multiply(x, self.weight_decay, out=direction), out=direction)
            gradient = np.multiply(direction, ratio, out=direction)
        for buffer in slots:
            np.multiply(buffer, self.momentum, out=buffer)
            gradient = np.add(buffer, gradient, out=buffer)
        descend(x, gradient, self.learning_rate, work.last)
