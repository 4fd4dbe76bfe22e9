"""Local SGD: rounds of local steps, then the mean of all workers' parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from nnlo_common.algorithms._rule import Algorithm, Ask, CenterRule, Contribution, WorkerRule, mean_of
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._options import option

__all__ = ["TOPK_OF_ROUNDS", "LocalSGD", "LocalSGDCenter", "LocalSGDWorker"]

#: Why displacements do not travel as their largest numbers.
TOPK_OF_ROUNDS = (
    "what a worker keeps of a round would be added to that of many later rounds, and a sum of rounds "
    "overshoots; use int8"
)


class LocalSGDWorker(WorkerRule):
    """Send x; x <- mean."""

    keeps_progress = keeps_own = True

    def __init__(self, *, every: int, warmup: int = 0, pipeline: int = 0) -> None:
        super().__init__(pipeline=pipeline)
        self.every, self.warmup = every, warmup

    def due(self) -> Ask | None:
        """Average after every step of the warm-up, then after every H steps."""
        done = self.clock + 1 - self.warmup
        return Ask.EXCHANGE if done <= 0 or done % self.every == 0 else None

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Return x."""
        self.gathered = 0
        return parameters


class LocalSGDCenter(CenterRule):
    """c <- mean of all x_i."""

    def quorum(self, awaited: int) -> int:
        """Wait for all workers."""
        return awaited

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Take the mean, in rank order; a worker that has ended its epoch counts with its last centre, c."""
        mean = mean_of(contributions)
        if self.absent:
            mean -= self.center
            mean *= np.float32(len(contributions) / (len(contributions) + self.absent))
            mean += self.center
        np.copyto(self.center, mean)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Algorithm):
    r"""Local SGD (Stich 2018, arXiv:1805.09767) and post-local SGD (Lin et al. 2018, arXiv:1808.07217).

    H local steps of the worker's own optimizer, then :math:`x^i \leftarrow \frac{1}{p}\sum_j x^j`
    (weighted by the workers' weights). Momentum and other local state is never exchanged. A round does not
    wait for workers that have left.

    Deviations: post-local SGD averages parameters, not gradients, after each step of its warm-up (the
    same where the local optimizer is plain SGD). With lag L the mean arrives L rounds late and is added to
    the progress made since, which is kept.

    Attributes:
        every: H, local steps per round.
        warmup: first steps that are averaged one by one.

    Example:
        >>> from nnlo_common import SGD
        >>> from nnlo_common.testing import train_virtually
        >>> pull = lambda x, rank: x - rank  # worker 1 wants 1, worker 2 wants 2
        >>> run = train_virtually(LocalSGD(every=2), pull, [0.0], workers=2, steps=2,
        ...                       local=lambda: SGD(0.5))
        >>> run.center
        array([1.125], dtype=float32)
    """

    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "worker"
    weighs: ClassVar[bool] = True
    trains_in_rounds: ClassVar[bool] = True
    sends: ClassVar[Literal["steps", "weights", "replaced"]] = "replaced"
    refused_wires: ClassVar[Mapping[str, str]] = {"topk": TOPK_OF_ROUNDS}

    every: int = option(10, "steps of a worker between exchanges", least=1)
    warmup: int = option(0, "number of first steps that are each averaged", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag and self.wire != "float32":
            self._refuse(
                f"wire={self.wire!r} with lag={self.lag} is not possible: a worker sends how far it has come "
                "from the last mean, which it does not have yet; leave one of them out"
            )

    def steps_until_move(self) -> int:
        """Return H, or 0 with a warm-up: what is left of an epoch goes on in the next."""
        return 0 if self.warmup else self.every

    def worker(self, size: int, workers: int) -> LocalSGDWorker:
        """Make the worker's half."""
        return LocalSGDWorker(every=self.every, warmup=self.warmup, pipeline=self.lag)

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> LocalSGDCenter:
        """Make the centre's half."""
        return LocalSGDCenter(center)
