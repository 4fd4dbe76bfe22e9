"""Synchronous SGD with backup workers: one optimizer step with the mean of the first N gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nnlo_common.algorithms._downpour import DownpourWorker
from nnlo_common.algorithms._noise_scale import Coordinates, NoiseScale
from nnlo_common.algorithms._rule import Algorithm, CenterRule, Contribution, mean_of
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import plural
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._options import option

__all__ = ["Synchronous", "SynchronousCenter", "SynchronousWorker"]


class SynchronousWorker(DownpourWorker):
    """Push every raw gradient, take the new centre; begin an epoch where all workers ended the last."""

    refreshes = True


class SynchronousCenter(CenterRule):
    """c <- Optimizer(c, mean of the first N gradients taken at c); drop later ones.

    Attributes:
        noise_scale: the gradient noise scale, from every commit of several equal batches at one centre; in
            samples if the contributions' weights are numbers of samples.
    """

    saved = ("center", "clock", "optimizer", "noise_scale")

    def __init__(
        self, center: Vector, optimizer: VectorOptimizer, *, needed: int, max_staleness: int = 0
    ) -> None:
        super().__init__(center)
        self.optimizer, self.needed, self.max_staleness = optimizer, needed, max_staleness
        self.noise_scale, self._coordinates = NoiseScale(), Coordinates(center.size)

    def quorum(self, awaited: int) -> int:
        """Wait for N contributions, or for all if fewer than N workers are left."""
        return min(self.needed, awaited)

    def noise_in_samples(self) -> float | None:
        """Return the gradient noise scale, once a commit has shown it."""
        return self.noise_scale.value if self.noise_scale.count else None

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Step with the mean."""
        weights = {contribution.weight for contribution in contributions}
        ages = {contribution.staleness for contribution in contributions}
        comparable = len(contributions) > 1 and len(weights) == len(ages) == 1
        some = self._coordinates
        samples = [some.of(contribution.vector) for contribution in contributions] if comparable else []
        mean = mean_of(contributions)
        if comparable:
            small, large = some.mean_square(samples), some.mean_square([some.of(mean)])
            self.noise_scale.observe(small, large, batch=weights.pop(), workers=len(contributions))
        self.optimizer.step(self.center, mean)


@dataclass(frozen=True, kw_only=True)
class Synchronous(Algorithm):
    r"""Synchronous SGD with backup workers (Chen et al. 2016, arXiv:1604.00981, algorithms 3 and 4).

    Of p workers the first N = p - backup gradients of a step make the commit
    :math:`c \leftarrow \mathrm{Optimizer}(c, \frac{1}{N}\sum_i g^i(c))`: the mean, not the sum, so that
    p workers with batches of B are one process with batches of N B. A later gradient was taken at an older
    centre; the server drops it and its worker gets the new centre. The mean is taken in rank order, so that
    the order of arrival never changes a bit. It is weighted by the weights that workers send: the plug-ins
    send numbers of samples, so it is the mean over all samples.

    When workers leave, the backup shrinks first; after that a step waits for all remaining workers. It never
    waits for a worker that has left.

    Deviation: a worker contributes at most once to a step (TensorFlow's tokens let a fast worker take
    two minibatches). With lag L gradients up to L commits old count as fresh.

    Attributes:
        backup: how many of the slowest workers need not be waited for.

    Example:
        >>> from nnlo_common import SGD
        >>> from nnlo_common.testing import train_virtually
        >>> run = train_virtually(Synchronous(), lambda x, rank: x, [1.0], workers=3, steps=2,
        ...                       optimizer=SGD(0.5))
        >>> run.center, run.servers[0].rule.clock
        (array([0.25], dtype=float32), 2)
    """

    weighs: ClassVar[bool] = True
    steps_together: ClassVar[bool] = True
    tied_to_workers: ClassVar[str] = (
        "each step is the mean over the workers' batches; another number of workers changes the batch size"
    )

    backup: int = option(0, "number of slowest workers that a commit does not wait for", least=0)

    def check(self, workers: int, servers: int) -> None:
        """Refuse a backup of all workers, and a backup with several servers.

        Each server takes its own first N gradients. With several servers each could get fewer than N, because
        the other workers wait elsewhere, and all would wait for ever.
        """
        if self.backup >= workers:
            self._refuse(
                f"backup={self.backup} of {plural(workers, 'worker')} leaves none to wait for; "
                f"use backup <= {workers - 1} or start more workers"
            )
        if self.backup and servers > 1:
            self._refuse(f"backup={self.backup} works with one server, not with {servers}; use servers=1")

    def worker(self, size: int, workers: int) -> SynchronousWorker:
        """Make the worker's half: push every raw gradient, take the new centre."""
        return SynchronousWorker(size, pipeline=self.lag)

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> SynchronousCenter:
        """Make the centre's half."""
        return SynchronousCenter(
            center, self._needs_optimizer(optimizer), needed=workers - self.backup, max_staleness=self.lag
        )
