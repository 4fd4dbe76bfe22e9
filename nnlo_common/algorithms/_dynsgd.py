"""DynSGD: steps divided by the staleness of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nnlo_common.algorithms._downpour import DownpourCenter, DownpourWorker
from nnlo_common.algorithms._rule import Algorithm, Contribution
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import PartWork, Vector
from nnlo_common.base._options import option

__all__ = ["DynSGD", "DynSGDCenter"]


class DynSGDCenter(DownpourCenter):
    """c <- Optimizer(c, a / (staleness + 1))."""

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Scale by staleness, then step."""
        for contribution in contributions:
            _scale(contribution)
        super().apply(contributions)

    def apply_by_parts(self, contribution: Contribution) -> PartWork | None:
        """Scale at once what is then applied part by part."""
        move = super().apply_by_parts(contribution)
        if move is not None:
            _scale(contribution)
        return move


def _scale(contribution: Contribution) -> None:
    if contribution.staleness:
        scale = np.float32(contribution.staleness + 1)
        np.divide(contribution.vector, scale, out=contribution.vector)


@dataclass(frozen=True, kw_only=True)
class DynSGD(Algorithm):
    r"""Staleness-aware SGD (Jiang et al., SIGMOD 2017, section 5; Hermans' thesis, section on DynSGD).

    Downpour whose centre divides each push by its staleness plus one:
    :math:`c \leftarrow \mathrm{Optimizer}(c, a / (T - T_\mathrm{pull} + 1))`, with T the commits done now
    and T_pull those done when the worker fetched the centre.

    Deviation: the thesis prints :math:`1/\tau`, which is undefined at 0; its author ran 1/(tau + 1).
    With one worker it is Downpour bit for bit. An optimizer that normalizes its gradients (Adam, RMSprop)
    undoes much of the scaling; the paper assumes plain or momentum SGD.

    Attributes:
        every: steps between pushes; each push is followed by a fetch in the same round trip.

    Example:
        >>> from nnlo_common import SGD
        >>> from nnlo_common.testing import train_virtually
        >>> slope = lambda x, rank: 0 * x + 1
        >>> run = train_virtually(DynSGD(), slope, [0.0], workers=2, steps=1, optimizer=SGD(1.0))
        >>> run.center  # the second push is one commit stale: -1 - 1/2
        array([-1.5], dtype=float32)
    """

    scales_by_staleness: ClassVar[bool] = True

    every: int = option(1, "steps of a worker between exchanges", least=1)

    def worker(self, size: int, workers: int) -> DownpourWorker:
        """Make the worker's half, which is Downpour's."""
        return DownpourWorker(
            size, n_push=self.every, n_fetch=self.every, first_push=self.every - 1, pipeline=self.lag
        )

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> DynSGDCenter:
        """Make the centre's half."""
        return DynSGDCenter(center, self._needs_optimizer(optimizer))
