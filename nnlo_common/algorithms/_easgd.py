"""Elastic averaging SGD and its momentum form: an elastic force pulls worker and centre together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from nnlo_common.algorithms._optimizers import LookaheadMomentum
from nnlo_common.algorithms._rule import Algorithm, Ask, CenterRule, Contribution, WorkerRule
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._plural import plural

__all__ = ["EAMSGD", "EASGD", "ElasticCenter", "ElasticWorker"]

_BLOCK = 32768  # numbers: a block of the centre and one of a contribution fit a second-level cache


class ElasticWorker(WorkerRule):
    """Send x; receive the elastic difference E = alpha (x - c); x <- x - E."""

    def __init__(self, *, every: int, exchange_first: bool, pipeline: int = 0) -> None:
        super().__init__(pipeline=pipeline)
        self.every, self.exchange_first = every, exchange_first

    def due(self) -> Ask | None:
        """Exchange before steps 0, tau, 2 tau, ... (paper), or after steps tau - 1, 2 tau - 1, ..."""
        steps = self.clock if self.exchange_first else self.clock + 1
        return Ask.EXCHANGE if steps % self.every == 0 else None

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return x."""
        self.gathered = 0
        return parameters

    def incoming(self, parameters: Vector, reply: Vector) -> None:
        """x <- x - E."""
        parameters -= reply


class ElasticCenter(CenterRule):
    """c <- c + sum of E_i, with E_i = alpha (x_i - c) all taken at the old centre."""

    def __init__(self, center: Vector, alpha: float, *, synchronous: bool) -> None:
        super().__init__(center)
        self.alpha, self.synchronous = np.float32(alpha), synchronous

    def quorum(self, awaited: int) -> int:
        """Commit each contribution on arrival, or all at once."""
        return awaited if self.synchronous else 1

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Replace each x by its E, so that both sides move by the same float32 numbers."""
        vectors = [contribution.vector for contribution in contributions]
        for start in range(0, self.center.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            center, differences = self.center[part], [vector[part] for vector in vectors]
            for one in differences:
                np.subtract(one, center, out=one)
                np.multiply(one, self.alpha, out=one)
            for one in differences:
                np.add(center, one, out=center)

    def reply(self, vector: Vector) -> None:
        """Do nothing: `apply` has left the reply E in the vector."""


@dataclass(frozen=True, kw_only=True)
class EASGD(Algorithm):
    r"""Elastic averaging SGD (Zhang, Choromanska, LeCun, NIPS 2015, arXiv:1412.6651).

    Asynchronous (algorithm 1), every tau steps of a worker, with :math:`E = \alpha (x - c)`:
    :math:`x \leftarrow x - E,\ c \leftarrow c + E`. Synchronous (equations 3 and 4): the same for all
    workers at once with the old centre. In between each worker steps on its own.

    The order of exchange and step decides stability. With f = h x^2 / 2, e = eta h and one worker:

    * order="paper": the gradient is taken at x before the exchange and applied after it.
      Stable iff 0 <= e <= 2 and 0 <= alpha <= (4 - 2e)/(4 - e). The default beta=0.9 with ONE worker
      therefore diverges for e > 4/11; use more workers or a smaller beta there.
    * order="step_first": the local step, then the exchange. Stable iff alpha is below
      (4 - 2e)/(4 - 3e) for e < 4/3 and below e/(2(e - 1)) for e > 1; for e > 2 it must also be above
      (4 - 2e)/(4 - 3e).

    A training resumed with another number of workers keeps beta, not alpha, and all workers start at c.

    Deviations: the worker sends x and the server replies E (the paper sends c down and E up), so that both
    sides move by the same float32 numbers in one round trip without a lock. "step_first" is the default
    because, asynchronously, it is stable wherever "paper" is, and because it is right for optimizers that
    read x (weight decay).

    Attributes:
        every: tau, steps between exchanges.
        alpha: the moving rate. None: from beta.
        beta: p alpha for p workers.
        beta_per: whether beta is for an exchange or a step: "exchange": alpha = beta / p; "step":
            alpha = beta / (p tau), the paper's footnote on effective elasticity.
        order: whether the exchange or the step comes first; see above.
        synchronous: wait for all workers at each exchange.

    Example:
        >>> from nnlo_common.testing import train_virtually
        >>> still = lambda x, rank: 0 * x
        >>> run = train_virtually(EASGD(every=1, alpha=0.25), still, [0.0], workers=1, steps=1,
        ...                       begin=[[1.0]])
        >>> run.center, run.parameters[0]
        (array([0.25], dtype=float32), array([0.75], dtype=float32))
    """

    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "worker"

    every: int = 10
    alpha: float | None = None
    beta: float = 0.9
    beta_per: Literal["exchange", "step"] = "exchange"
    order: Literal["paper", "step_first"] = "step_first"
    synchronous: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("every", least=1)
        if self.alpha is not None:
            self._real("alpha", below=1)
        self._real("beta")
        self._one_of("beta_per", "exchange", "step")
        self._one_of("order", "paper", "step_first")

    def moving_rate(self, workers: int) -> float:
        """Return alpha for `workers` workers."""
        if self.alpha is not None:
            return self.alpha
        steps = self.every if self.beta_per == "step" else 1
        alpha = self.beta / (workers * steps)
        if alpha >= 1:
            self._refuse(
                f"beta={self.beta:g} with {plural(workers, 'worker')} makes alpha={alpha:.3g}, but alpha "
                "must be below 1; use a smaller beta or more workers"
            )
        return alpha

    def check(self, workers: int, servers: int) -> None:
        """Refuse too few workers for beta: alpha must stay below 1."""
        self.moving_rate(workers)

    def worker(self, size: int, workers: int) -> ElasticWorker:
        """Make the worker's half."""
        return ElasticWorker(every=self.every, exchange_first=self.order == "paper", pipeline=self.lag)

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> ElasticCenter:
        """Make the centre's half."""
        return ElasticCenter(center, self.moving_rate(workers), synchronous=self.synchronous)


@dataclass(frozen=True, kw_only=True)
class EAMSGD(EASGD):
    r"""EASGD with Nesterov momentum on the workers (the same paper, algorithm 2).

    :math:`v \leftarrow \delta v - \eta g(x + \delta v),\ x \leftarrow x + v`; the exchange is EASGD's in
    the paper's order and leaves v alone. With momentum=0 it is EASGD with plain SGD.

    Take the gradient at the look-ahead point :math:`x + \delta v`, not to x.

    Attributes:
        learning_rate: eta.
        momentum: delta.

    Example:
        >>> EAMSGD(learning_rate=0.1).local_optimizer()
        LookaheadMomentum(learning_rate=0.1, momentum=0.99)
    """

    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "nowhere"

    order: Literal["paper", "step_first"] = "paper"
    learning_rate: float
    momentum: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        self._real("learning_rate")
        self._real("momentum", least=0, below=1)

    def local_optimizer(self) -> VectorOptimizer:
        """Return the look-ahead momentum optimizer of algorithm 2."""
        return LookaheadMomentum(self.learning_rate, momentum=self.momentum)
