"""Optimizers that step one float32 vector in place, without a framework.

Requirements that shaped this module:

* Each class implements one equation. Where PyTorch and Keras differ, the default is PyTorch's, and
  `epsilon_form="keras"` selects the other.
* Each coordinate is computed from itself only, and each operation rounds once, in float32, without fused
  multiply-add. So cutting a vector into slices with one optimizer each does not change a bit.
* A vector may hold many millions of values: slots and work buffers are allocated in the first step, then
  reused, and work proceeds in blocks so that intermediate values stay in the processor's cache.
* `state` and `load` are exact: N steps, save, load into a fresh object, M steps is N + M steps bit for bit.
  Options are set by the constructor; of them only the learning rate is part of the state.

A gradient that is not finite, or whose square is not, is handled by NumPy's error state (`numpy.errstate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from nnlo_common.algorithms._vector_optimizer import (
    Optimizer,
    Stretch,
    Work,
    descend,
    described,
    is_vector,
)
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Vector

__all__ = ["Adadelta", "Adagrad", "Adam", "LookaheadMomentum", "RMSprop", "SGD"]

EpsilonForm: TypeAlias = Literal["torch", "keras"]


@dataclass(eq=False, kw_only=True)
class SGD(Optimizer):
    """Gradient descent with momentum, in PyTorch's form; g is the gradient plus `weight_decay * x`.

        b <- momentum * b + g                           b starts at 0
        x <- x - learning_rate * b                      nesterov=False
        x <- x - learning_rate * (g + momentum * b)     nesterov=True; x is the look-ahead point

    Sutskever et al., ICML 2013; DiLoCo's outer step (arXiv:2311.08105). Keras' buffer is -learning_rate * b:
    the same until the learning rate changes.

    Args:
        learning_rate, weight_decay: at least 0.
        momentum: in [0, 1).
        nesterov: needs a momentum.

    Example:
        >>> x = np.ones(1, np.float32)
        >>> SGD(0.7, momentum=0.9, nesterov=True).step(x, x.copy())
        >>> print(x.round(2))
        [-0.33]
    """

    _kept = ("buffer",)

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            self._refuse("momentum", "a number with 0 < momentum < 1 where nesterov=True")
        self._left = False  # workers have the momentum

    def own_momentum(self) -> tuple[float, bool]:
        """Return its momentum, and whether it is Nesterov's."""
        return self.momentum, self.nesterov

    def leave_momentum(self) -> None:
        """Step without momentum from now on, with the weight decay of all the steps that it would bring."""
        self._left = True

    def stretches(self, size: int, gradient: Vector | None) -> list[Stretch]:
        """Return its options, for the whole vector."""
        one = Stretch(
            place=slice(0, size),
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        return [one]

    def _initial(self) -> dict[str, float]:
        return {"buffer": -0.0} if self.momentum and not self._left else {}  # -0.0 + g is g, even for -0.0

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        total, scratch, last = work
        if self.weight_decay:
            decay = self.weight_decay / (1 - self.momentum) if self._left else self.weight_decay
            gradient = np.add(gradient, np.multiply(x, decay, out=total), out=total)
        direction = gradient
        for buffer in slots:
            direction = np.add(np.multiply(buffer, self.momentum, out=buffer), gradient, out=buffer)
            if self.nesterov:
                direction = np.add(gradient, np.multiply(buffer, self.momentum, out=scratch), out=total)
        descend(x, direction, self.learning_rate, last)


@dataclass(eq=False, kw_only=True)
class LookaheadMomentum(Optimizer):
    """Momentum with g taken at `x + momentum * v`: EAMSGD, arXiv:1412.6651, Algorithm 2.

        v <- momentum * v - learning_rate * g           v starts at 0
        x <- x + v

    The points at which g is taken are the iterates of `SGD` with `nesterov=True`.

    Args:
        learning_rate: at least 0.
        momentum: in [0, 1).

    Example:
        >>> x = np.ones(1, np.float32)
        >>> optimizer = LookaheadMomentum(0.5, momentum=0.5)
        >>> for _ in range(2):
        ...     optimizer.step(x, 1.0 * optimizer.gradient_point(x))
        ...     print(x)
        [0.5]
        [0.125]
    """

    momentum: float = 0.99
    _names = ("velocity",)
    _point: Vector = field(init=False, repr=False, default_factory=lambda: np.empty(0, np.float32))

    def gradient_point(self, x: Vector) -> Vector:
        """Return `x + momentum * v`, the point for the gradient, in a buffer that the next call reuses."""
        if not is_vector(x):
            raise ConfigurationError(f"gradient_point needs a contiguous float32 vector; got {described(x)}")
        self._prepare(x.size)
        if self._point.size != x.size:
            self._point = np.empty_like(x)
        np.multiply(self._slots["velocity"], self.momentum, out=self._point)
        return np.add(x, self._point, out=self._point)

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        (velocity,) = slots
        np.multiply(velocity, self.momentum, out=velocity)
        descend(velocity, gradient, self.learning_rate, work.last)
        np.add(x, velocity, out=x)


@dataclass(eq=False, kw_only=True)
class Adagrad(Optimizer):
    """A step size per coordinate that falls as gradients accumulate: Duchi et al., JMLR 12, 2011.

        s <- s + g^2                                    s starts at initial_accumulator
        x <- x - learning_rate * g / (sqrt(s) + epsilon)
        x <- x - learning_rate * g / sqrt(s + epsilon)  epsilon_form="keras"

    The defaults are those of Downpour's server (Dean et al., NIPS 2012, section 4.1). With them the first
    step has magnitude exactly `learning_rate`, unless g^2 leaves float32's range, and a coordinate does not
    move before its first gradient. PyTorch has epsilon=1e-10; Keras has 1e-7 and initial_accumulator=0.1.

    Args:
        learning_rate, epsilon, initial_accumulator: at least 0.
        epsilon_form: where epsilon is added.

    Example:
        >>> x = np.zeros(3, np.float32)
        >>> Adagrad(0.25).step(x, np.array([1e-8, 0, -300], np.float32))
        >>> print(x)
        [-0.25  0.    0.25]
    """

    epsilon: float = 0.0
    initial_accumulator: float = 0.0
    epsilon_form: EpsilonForm = "torch"
    _ranges = Optimizer._ranges | {"epsilon": (0.0, math.inf)}

    def _initial(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator}

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        (accumulator,), (root, ratio, last) = slots, work
        np.add(accumulator, np.multiply(gradient, gradient, out=ratio), out=accumulator)
        _root(accumulator, self.epsilon, self.epsilon_form, out=root)
        # g^2 may underflow to 0 where g is not 0: an infinite root then keeps the coordinate in place.
        np.copyto(root, np.inf, where=np.equal(root, 0.0, out=ratio.view(np.bool_)[: root.size]))
        descend(x, np.divide(gradient, root, out=last), self.learning_rate, last)


@dataclass(eq=False, kw_only=True)
class RMSprop(Optimizer):
    """Steps divided by a running root mean square: Tieleman and Hinton, Coursera lecture 6e, 2012.

        s <- decay * s + (1 - decay) * g^2              s starts at 0
        x <- x - learning_rate * g / (sqrt(s) + epsilon)
        x <- x - learning_rate * g / sqrt(s + epsilon)  epsilon_form="keras"

    PyTorch calls `decay` alpha. Keras calls it rho and has rho=0.9, epsilon=1e-7.

    Args:
        learning_rate: at least 0.
        decay: in [0, 1).
        epsilon: at least 1e-30.
        epsilon_form: where epsilon is added.

    Example:
        >>> x = np.zeros(2, np.float32)
        >>> RMSprop(0.5, decay=0.75).step(x, np.array([0, -300], np.float32))
        >>> print(x)
        [0. 1.]
    """

    decay: float = 0.99
    epsilon: float = 1e-8
    epsilon_form: EpsilonForm = "torch"
    _names = ("square_average",)

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        (square_average,), (root, _, last) = slots, work
        _average_square(square_average, gradient, self.decay, root)
        _root(square_average, self.epsilon, self.epsilon_form, out=root)
        descend(x, np.divide(gradient, root, out=last), self.learning_rate, last)


@dataclass(eq=False, kw_only=True)
class Adadelta(Optimizer):
    """Steps in the unit of the coordinate itself: Zeiler, arXiv:1212.5701, Algorithm 1.

        s <- decay * s + (1 - decay) * g^2              s and a start at 0
        d <- g * sqrt(a + epsilon) / sqrt(s + epsilon)
        a <- decay * a + (1 - decay) * d^2
        x <- x - learning_rate * d                      the paper has learning_rate=1

    PyTorch and Keras agree, and call `decay` rho; Keras has epsilon=1e-7.

    Args:
        learning_rate: at least 0.
        decay: in [0, 1).
        epsilon: at least 1e-30.

    Example:
        >>> x = np.zeros(1, np.float32)
        >>> Adadelta(1.0, decay=0.75).step(x, np.array([-300], np.float32))
        >>> print(x.round(6))
        [0.002]
    """

    decay: float = 0.9
    epsilon: float = 1e-6
    _names = ("square_average", "delta_average")

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        (square_average, delta_average), (delta, scratch, last) = slots, work
        _average_square(square_average, gradient, self.decay, scratch)
        _root(square_average, self.epsilon, "keras", out=scratch)
        _root(delta_average, self.epsilon, "keras", out=delta)
        np.multiply(np.divide(delta, scratch, out=delta), gradient, out=delta)
        _average_square(delta_average, delta, self.decay, scratch)
        descend(x, delta, self.learning_rate, last)


@dataclass(eq=False, kw_only=True)
class Adam(Optimizer):
    """Momentum over a running root mean square, both corrected for their start at 0: arXiv:1412.6980.

        m <- beta1 * m + (1 - beta1) * g                m and v start at 0
        v <- beta2 * v + (1 - beta2) * g^2
        x <- x - learning_rate * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)

    t is 1 in the first step. `epsilon_form="keras"` is the paper's "epsilon hat": epsilon is added to
    sqrt(v), before the correction. Keras has epsilon=1e-7.

    Args:
        learning_rate: at least 0.
        beta1, beta2: in [0, 1).
        epsilon: at least 1e-30.
        epsilon_form: where epsilon is added.

    Example:
        >>> x = np.zeros(3, np.float32)
        >>> Adam(0.5).step(x, np.array([1e-8, 0, -300], np.float32))
        >>> print(x.round(4))
        [-0.25  0.    0.5 ]
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    epsilon_form: EpsilonForm = "torch"
    _names = _kept = ("average", "square_average")

    def stretches(self, size: int, gradient: Vector | None) -> list[Stretch]:
        """Return its options, for the whole vector."""
        one = Stretch(
            place=slice(0, size),
            learning_rate=self.learning_rate,
            momentum=self.beta1,
            adaptive=True,
            beta2=self.beta2,
            epsilon=self.epsilon,
            epsilon_outside=self.epsilon_form == "keras",
        )
        return [one]

    def _update(self, x: Vector, gradient: Vector, slots: list[Vector], work: Work) -> None:
        (average, square_average), (root, _, last) = slots, work
        descend(average, np.subtract(average, gradient, out=root), 1.0 - self.beta1, root)
        _average_square(square_average, gradient, self.beta2, root)
        # Fold the corrections into scalars: sqrt(v / c^2) + epsilon is (sqrt(v) + epsilon * c) / c.
        correction = math.sqrt(1.0 - self.beta2**self._steps)
        epsilon = self.epsilon * (correction if self.epsilon_form == "torch" else 1.0)
        rate = self.learning_rate * correction / (1.0 - self.beta1**self._steps)
        _root(square_average, epsilon, "torch", out=root)
        descend(x, np.divide(average, root, out=last), rate, last)


def _average_square(average: Vector, values: Vector, decay: float, scratch: Vector) -> None:
    np.multiply(average, decay, out=average)
    # Scale before squaring, as PyTorch does: a large gradient overflows later than with (1 - decay) * g^2.
    np.multiply(np.multiply(values, 1.0 - decay, out=scratch), values, out=scratch)
    np.add(average, scratch, out=average)


def _root(square: Vector, epsilon: float, form: EpsilonForm, out: Vector) -> None:
    if form == "keras":
        np.sqrt(np.add(square, epsilon, out=out), out=out)
    else:
        np.add(np.sqrt(square, out=out), epsilon, out=out)
