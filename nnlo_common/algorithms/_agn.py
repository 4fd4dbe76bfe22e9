"""Accumulated gradient normalization: take local steps, push the mean of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nnlo_common.algorithms._downpour import DownpourCenter, DownpourWorker
from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.algorithms._rule import Algorithm
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._options import option

__all__ = ["AGN", "AGNWorker"]


class AGNWorker(DownpourWorker):
    """Push a / lambda, the mean of the lambda gradients since the last fetch."""

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return a / lambda; a <- 0. At the end of an epoch lambda may be smaller."""
        steps = self.gathered
        total = super().outgoing(parameters, gradient)
        if steps > 1:
            np.divide(total, np.float32(steps), out=total)
        return total


@dataclass(frozen=True, kw_only=True)
class AGN(Algorithm):
    r"""Accumulated gradient normalization (Hermans 2017, arXiv:1710.02368, algorithm 1).

    Worker: :math:`x \leftarrow c`; lambda local steps :math:`x \leftarrow x - \eta g_j`; push
    :math:`\frac{1}{\lambda}\sum_j g_j`. Centre: one step of its optimizer with that mean.

    Deviation: workers send the mean of the raw gradients and the centre's optimizer applies its learning
    rate; the paper sends the mean displacement :math:`-\frac{\eta}{\lambda}\sum_j g_j`. With plain SGD
    of learning rate eta at the centre the two are equal, and every=1 is Downpour bit for bit.

    (dist-keras calls this ADAG; the ADAG of the thesis is a different algorithm.)

    Attributes:
        every: lambda, local steps per push.
        local_learning_rate: eta of the local steps; give the centre's, or 0 to stay at the centre and
            merely average.

    Example:
        >>> from nnlo_common import SGD
        >>> from nnlo_common.testing import train_virtually
        >>> run = train_virtually(AGN(every=2, local_learning_rate=0.5), lambda x, rank: x, [1.0],
        ...                       workers=1, steps=2, optimizer=SGD(0.5))
        >>> run.center  # 1 - 0.5 (1 + 0.5) / 2
        array([0.625], dtype=float32)
    """

    one_optimizer: ClassVar[str] = "its mean gradient would count the steps of the other optimizer"

    every: int = option(10, "steps of a worker between exchanges", least=1)
    local_learning_rate: float = option(
        help="learning rate of a worker's local steps between exchanges; without it, your optimizer's",
        least=0,
        local="rate",
    )

    def worker(self, size: int, workers: int) -> AGNWorker:
        """Make the worker's half."""
        return AGNWorker(
            size, n_push=self.every, n_fetch=self.every, first_push=self.every - 1, pipeline=self.lag
        )

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> DownpourCenter:
        """Make the centre's half, which is Downpour's."""
        return DownpourCenter(center, self._needs_optimizer(optimizer))

    def local_optimizer(self) -> VectorOptimizer | None:
        """Return plain SGD with the local learning rate, if that is not 0."""
        return SGD(self.local_learning_rate) if self.local_learning_rate else None
