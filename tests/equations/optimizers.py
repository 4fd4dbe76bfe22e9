"""The user's optimizers from their equations, in NumPy float64; each step returns the new x."""

from __future__ import annotations

import numpy as np

from tests.equations.network import Array

__all__ = ["SGD", "Adam", "Optimizer"]


class Optimizer:
    """Steps a vector.

    Attributes:
        rate: the learning rate.
        momentum: 0 where it has none.
        epsilon: of Adam.
        hat: whether it is added before the correction.
    """

    rate: float
    momentum = 0.0
    epsilon: float | None = None
    hat = False

    def __call__(self, x: Array, g: Array) -> Array:
        raise NotImplementedError


class SGD(Optimizer):
    """b <- mu b + g; x <- x - eta b, or with Nesterov's momentum x <- x - eta (g + mu b)."""

    def __init__(self, rate: float, momentum: float = 0.0, *, nesterov: bool = False) -> None:
        self.rate, self.momentum, self._nesterov = rate, momentum, nesterov
        self._b: Array | float = 0.0

    def __call__(self, x: Array, g: Array) -> Array:
        self._b = self.momentum * self._b + g
        return x - self.rate * (g + self.momentum * self._b if self._nesterov else self._b)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2014, arXiv:1412.6980, algorithm 1).

    Args:
        rate: alpha.
        epsilon: added to the root of the corrected second moment (PyTorch), or of the uncorrected one where
            `hat` is set (Keras; the end of the paper's section 2).
        hat: see there. Keras also takes the powers of the decay rates in float32, which matters: 1 - 0.999
            has three digits less.
    """

    def __init__(self, rate: float, *, epsilon: float, hat: bool) -> None:
        self.rate, self.epsilon, self.hat = rate, epsilon, hat
        self._m: Array | float = 0.0
        self._v: Array | float = 0.0
        self._t = 0

    def __call__(self, x: Array, g: Array) -> Array:
        self._t += 1
        self._m = 0.9 * self._m + 0.1 * g
        self._v = 0.999 * self._v + 0.001 * g**2
        first, second = 1 - 0.9**self._t, 1 - 0.999**self._t
        if self.hat:
            first, second = (float(1 - np.float32(rate) ** np.float32(self._t)) for rate in (0.9, 0.999))
            return x - self.rate * np.sqrt(second) / first * self._m / (np.sqrt(self._v) + self.epsilon)
        return x - self.rate * self._m / first / (np.sqrt(self._v / second) + self.epsilon)
