"""DiLoCo: local rounds whose mean displacement is a gradient for an outer optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from nnlo_common.algorithms._localsgd import TOPK_OF_ROUNDS, LocalSGDWorker
from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.algorithms._rule import Algorithm, CenterRule, Contribution, mean_of
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._options import option

__all__ = ["DiLoCo", "DiLoCoCenter", "DiLoCoWorker"]


class DiLoCoWorker(LocalSGDWorker):
    """Send c_old - x, the displacement of the round; x <- c."""

    saved = ("clock", "gathered", "anchor")
    absorbs_parts = keeps_own = False

    def __init__(self, size: int, *, every: int, pipeline: int = 0) -> None:
        super().__init__(every=every, pipeline=pipeline)
        self.anchor: Vector = np.zeros(size, np.float32)
        self._moved: Vector = np.zeros(size, np.float32)

    def begin(self, parameters: Vector, center: Vector) -> None:
        """Start from the centre and measure the round from there."""
        super().begin(parameters, center)
        np.copyto(self.anchor, center)

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return c_old - x."""
        self.gathered = 0
        np.subtract(self.anchor, parameters, out=self._moved)
        # The next round starts here, unless `incoming` moves its start before the next step.
        np.copyto(self.anchor, parameters)
        return self._moved

    def incoming(self, parameters: Vector, reply: Vector) -> None:
        """x <- c, and measure the next round from there."""
        super().incoming(parameters, reply)
        np.copyto(self.anchor, parameters)


class DiLoCoCenter(CenterRule):
    """c <- OuterOptimizer(c, mean of c_old - x_i)."""

    saved = ("center", "clock", "optimizer")

    def __init__(self, center: Vector, optimizer: VectorOptimizer) -> None:
        super().__init__(center)
        self.optimizer = optimizer

    def quorum(self, awaited: int) -> int:
        """Wait for all workers."""
        return awaited

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Step with the mean, in rank order; a worker that has ended its epoch counts as displacement 0."""
        mean = mean_of(contributions)
        if self.absent:
            mean *= np.float32(len(contributions) / (len(contributions) + self.absent))
        self.optimizer.step(self.center, mean)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Algorithm):
    r"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1).

    Each worker makes H steps of its own inner optimizer from :math:`x^i = c`; then
    :math:`\Delta = \frac{1}{p}\sum_i (c - x^i)` (weighted by the workers' weights) and
    :math:`c \leftarrow \mathrm{OuterOptimizer}(c, \Delta)`; all start again from the new c. Inner
    optimizer state stays with its worker.

    The outer optimizer is SGD with Nesterov momentum, unless you pass another one for the centre. Outer
    learning rate 1 without momentum is federated averaging.

    Deviation: with lag L the new centre arrives L rounds late and is added to the progress made since.

    Attributes:
        every: H, inner steps per round.
        outer_learning_rate: of the outer SGD.
        outer_momentum: of the outer SGD.

    Example:
        >>> from nnlo_common import SGD
        >>> from nnlo_common.testing import train_virtually
        >>> run = train_virtually(DiLoCo(every=1), lambda x, rank: x, [1.0], workers=2, steps=1,
        ...                       local=lambda: SGD(1.0))
        >>> run.center.round(6)  # 1 - 0.7 (1 + 0.9)
        array([-0.33], dtype=float32)
    """

    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "worker"
    outer_optimizer: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    trains_in_rounds: ClassVar[bool] = True
    refused_wires: ClassVar[Mapping[str, str]] = {"topk": TOPK_OF_ROUNDS}

    every: int = option(500, "steps of a worker between exchanges", least=1)
    outer_learning_rate: float = option(0.7, "learning rate of the outer SGD")
    outer_momentum: float = option(0.9, "momentum of the outer SGD", least=0, below=1)

    def steps_until_move(self) -> int:
        """Return H: what is left of an epoch goes on in the next."""
        return self.every

    def worker(self, size: int, workers: int) -> DiLoCoWorker:
        """Make the worker's half."""
        return DiLoCoWorker(size, every=self.every, pipeline=self.lag)

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> DiLoCoCenter:
        """Make the centre's half."""
        momentum = self.outer_momentum
        outer = SGD(self.outer_learning_rate, momentum=momentum, nesterov=momentum > 0)
        return DiLoCoCenter(center, optimizer or outer)
