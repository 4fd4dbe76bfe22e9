"""Gradient energy matching: all workers together move with the energy of one momentum SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.algorithms._rule import (
    Algorithm,
    Ask,
    CenterRule,
    Contribution,
    GradientSum,
    WorkerRule,
)
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._options import FROM_OPTIMIZER, option

__all__ = ["GEM", "GEMCenter", "GEMWorker"]


class GEMWorker(WorkerRule):
    """Lock and pull c; scale the step so that |c + u - s| does not exceed the proxy's |m|; commit u."""

    saved = ("clock", "gathered", "began", "steps", "sum", "proxy", "stale", "delayed")

    def __init__(self, size: int, options: GEM) -> None:
        super().__init__()
        self.options = options
        self.began = self.steps = 0  # first batch of the count by `every`; steps of GEM done
        self._stepping = False
        self.sum = GradientSum(size if options.every > 1 else 0)
        self.proxy: Vector = np.zeros(size, np.float32)
        self.stale: Vector = np.zeros(size, np.float32)
        self.delayed = np.zeros((options.lag, size), np.float32)  # the last gradients, step t at t % lag
        self._delta: Vector = np.zeros(size, np.float32)
        self._rate: Vector = np.zeros(size, np.float32)
        self._update: Vector = np.zeros(size, np.float32)

    def begin(self, parameters: Vector, center: Vector) -> None:
        """Start from the centre; if primed, count it as the one that gradients are stale against."""
        super().begin(parameters, center)
        if self.options.primed:
            np.copyto(self.stale, center)

    def observe(self, parameters: Vector, gradient: Vector) -> None:
        """g is the mean of the last `every` gradients; d <- -eta g; m <- mu m + d."""
        if self.given_sums or self.options.every == 1:
            self._step(gradient)
        else:
            self.sum.add(gradient)
            if self._completes_a_step:
                self._step(self.sum.take())

    def due(self) -> Ask | None:
        """Ask for the lock in every step that has a gradient to apply."""
        return self._ask() if self._completes_a_step else None

    def rest(self, gradient: Vector) -> Ask | None:
        """Make a step with the mean of the remaining gradients."""
        if not self.gathered:
            return None
        self._step(gradient if self.given_sums else self.sum.take())
        ask = self._ask()
        self._end_step()
        return ask

    def begin_epoch(self) -> None:
        """Restart the count by `every`."""
        self.began = self.clock

    def advance(self) -> None:
        """End a step."""
        self._stepping |= self._completes_a_step and not self.given_sums
        super().advance()
        self._end_step()

    @property
    def _completes_a_step(self) -> bool:
        return (self.clock + 1 - self.began) % self.options.every == 0

    def _ask(self) -> Ask | None:
        if self.steps >= self.options.lag:
            return Ask.LOCK
        return Ask.OBSERVE if self.given_sums else None

    def _end_step(self) -> None:
        self.steps += self._stepping
        self._stepping = False

    def _step(self, gradient: Vector) -> None:
        """Take the sum of the gathered gradients into the proxy."""
        self._stepping, steps, self.gathered = True, self.gathered, 0
        if steps > 1:
            np.divide(gradient, np.float32(steps), out=gradient)
        if self.options.lag:
            slot = self.delayed[self.steps % self.options.lag]
            np.multiply(slot, np.float32(-self.options.learning_rate), out=self._delta)
            np.copyto(slot, gradient)
            if self.steps < self.options.lag:
                return
        else:
            np.multiply(gradient, np.float32(-self.options.learning_rate), out=self._delta)
        self.proxy *= np.float32(self.options.momentum)
        self.proxy += self._delta

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:
        """Refuse: the contribution is the commit under the lock."""
        raise NotImplementedError("GEM answers a lock with a commit; it has no other contribution")

    def commit(self, parameters: Vector, center: Vector) -> Vector:
        """pi <- clip((kappa |m| - |c - s|) / (|d| + eps)); u <- pi d; s <- c; x <- c + u."""
        rate, update = self._rate, self._update
        np.subtract(center, self.stale, out=update)
        np.abs(update, out=update)
        np.abs(self.proxy, out=rate)
        rate *= np.float32(self.options.kappa)
        rate -= update
        np.abs(self._delta, out=update)
        update += np.float32(self.options.epsilon)
        rate /= update
        if self.options.clip is not None:
            np.clip(rate, 0, np.float32(self.options.clip), out=rate)
        np.multiply(rate, self._delta, out=update)
        np.copyto(self.stale, center)
        np.copyto(parameters, center)
        if self.options.gradient_at == "update":
            parameters += update
        return update


class GEMCenter(CenterRule):
    """c <- c + u."""

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Add the (only) commit."""
        for contribution in contributions:
            self.center += contribution.vector


@dataclass(frozen=True, kw_only=True)
class GEM(Algorithm):
    r"""Gradient energy matching (Hermans and Louppe 2018, arXiv:1805.08469, algorithm 1, equation 27).

    Each worker keeps a proxy, the momentum SGD that a single process would run:
    :math:`d = -\eta g,\ m \leftarrow \mu m + d`. With c the centre now and s the centre that the gradient
    is stale against, it commits :math:`u = \pi d` where
    :math:`\pi = (\kappa |m| - |c - s|) / (|d| + \epsilon)` per coordinate, clipped to [0, clip]: the
    moves of the other workers are subtracted from this worker's share, so that
    :math:`|c + u - s| \le \max(|c - s|, \kappa |m|)`.

    Pull and commit are one transaction: the server handles no other worker in between.

    Deviations from algorithm 1, all as the authors ran it: pi is clipped to [0, 5] (without the clip
    several workers diverge on a noisy quadratic); s is primed with the first centre pulled (otherwise the
    first |c - s| is |c| and the first commit is lost wherever |c| >= kappa |m|); the next gradient is taken
    at the worker's own c + u (gradient_at="update"). epsilon is added to |d|, never inside the absolute
    value. Where d = 0 nothing moves.

    "Stable whenever the proxy is" does not hold in general: with h=1, mu=0.9, kappa=1 the collective
    diverges at eta=2.5 although the proxy alone is stable up to 3.8. kappa above 1 is even less stable.

    lag delays the gradients that enter the proxy; it hides no round trip, because the worker must not hold
    the lock while it computes.

    Attributes:
        every: the gradient of a step is the mean of those of so many batches; what is left of them at the end
            of an epoch makes a step, too.
        learning_rate: eta of the proxy.
        momentum: mu of the proxy.
        kappa: how much energy, in units of the proxy's, the collective may have.
        clip: upper bound of pi; None does not clip at all (for study only).
        epsilon: keeps pi finite.
        primed: begin with the first centre as the one that gradients are stale against; see above. False is
            for study only.
        gradient_at: "update": at the worker's own c + u; "center": at the pulled c, as printed.
        lag: steps that gradients are delayed by; see above.

    Example:
        >>> from nnlo_common.testing import train_virtually
        >>> slope = lambda x, rank: 0 * x - 1
        >>> run = train_virtually(GEM(learning_rate=1.0), slope, [0.0], workers=1, steps=3)
        >>> run.center.round(5)  # 1 + 0.9 + 1.81
        array([3.71], dtype=float32)
    """

    optimizer_runs: ClassVar[Literal["center", "worker", "nowhere"]] = "nowhere"

    made_of: ClassVar[Literal["", "momentum", "nesterov"]] = "momentum"
    one_optimizer: ClassVar[str] = "its momentum moves all parameters in each step"
    refused_wires: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("bfloat16", "float16", "int8", "topk"),
        "its commit is scaled to the centre that it has just pulled, and a rounded one would exceed the "
        "energy that it may have; leave it out",
    )

    every: int = option(1, "batches whose gradients are averaged for one step", least=1)
    # Wrappers put the learning rate into the gradient.
    learning_rate: float = option(0.01, "learning rate of the proxy", absent=FROM_OPTIMIZER, fixed=1.0)
    momentum: float = option(0.9, "momentum of the proxy", least=0, below=1, absent=FROM_OPTIMIZER)
    kappa: float = option(1.0, "limit of the collective's energy, in units of the proxy's")
    clip: float | None = option(5.0, "upper bound of pi, how much larger than the gradient's a step may be")
    # A smaller epsilon rounds to 0 in float32 and allows 0/0.
    epsilon: float = option(1e-16, "keeps pi finite", least=1e-30, absent="for study")
    primed: bool = option(True, "take the first centre as the first stale centre")
    gradient_at: Literal["update", "center"] = option(
        "update", "where the next gradient is taken", absent="for study"
    )
    lag: int = option(0, "delay of the gradients, in steps", least=0)

    def worker(self, size: int, workers: int) -> GEMWorker:
        """Make the worker's half."""
        return GEMWorker(size, self)

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> GEMCenter:
        """Make the centre's half."""
        return GEMCenter(center)

    def alone(self, optimizer: VectorOptimizer | None) -> VectorOptimizer:
        """Return the optimizer of a rank that trains alone: the user's, or else the proxy."""
        return optimizer or SGD(self.learning_rate, momentum=self.momentum)
