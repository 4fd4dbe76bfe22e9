"""Steady: the settings of one process on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._agn import AGNWorker
from nnlo_common.algorithms._downpour import DownpourCenter
from nnlo_common.algorithms._gain import Gain, MeanGain, MemberNorms, products, sampled_places, worth_having
from nnlo_common.algorithms._paced import Pace, PacedOptimizer, SampledMetric
from nnlo_common.algorithms._retreat import Retreat
from nnlo_common.algorithms._rule import Algorithm, CenterRule, Contribution, GainReport, mean_of
from nnlo_common.algorithms._vector_optimizer import Steerable, Stretch, VectorOptimizer
from nnlo_common.base._block_threads import work_through
from nnlo_common.base._flat_vector import PartWork, Vector
from nnlo_common.base._options import option
from nnlo_common.base._state_tree import State, Stateful

__all__ = ["Steady", "SteadyCenter"]


class TogetherWorker(AGNWorker):
    """Push the mean of the gradients since the last fetch; begin each epoch where the last one has ended."""

    refreshes: ClassVar[bool] = True


class SteadyCenter(DownpourCenter):
    """c moves at the pace of W workers, each contribution scaled by the gain; replies look ahead.

    Attributes:
        gain: the running estimate of signal and noise.
        plain: one rank trains: the user's optimizer steps as it is.
        paced: what steps the centre if there are several and that is SGD, Adam or AdamW.
        living: the number of workers that live.
        members: the number of ranks of each.
        workers: the number that the delay of their gradients stands for.
        batches: the number of batches whose mean a contribution is.
        work: batches done and progress made, in batches, while several workers contributed.
    """

    takes_gradients: ClassVar[bool] = False  # it measures more of them itself
    saved = (
        *DownpourCenter.saved,
        *("gain", "mean_gain", "metric", "paced", "progress", "work", "largest", "retreat"),
    )

    def __init__(self, center: Vector, optimizer: Steerable, options: Steady, *, workers: int) -> None:
        super().__init__(center, optimizer)
        self.steered, self.options, self.batches = optimizer, options, options.every
        self.living = self.workers = self.members = 1
        self.attend(workers)
        self.places = sampled_places(center.size)
        self.work: list[float] = [0.0, 0.0]
        self.mean_gain = MeanGain()
        self.largest = 0.0
        stretches = optimizer.stretches(center.size, None)
        self.gain = Gain(self.places.size, brake=options.brake)
        self._follows_velocity = stretches is not None
        adaptive = any(one.adaptive for one in stretches or ())
        self.metric = SampledMetric(self.places.size if adaptive else 0)
        self._begin_as(plain=options.stale_as(workers) == 1)

    def _begin_as(self, *, plain: bool) -> None:
        self.plain = plain
        self.paced = PacedOptimizer(self.center.size, self.steered, plain=plain, sums=True)
        self.retreat = self._new_retreat()

    def _new_retreat(self) -> Retreat:
        """Make what goes back; where workers step together none does: no gradient is late."""
        never = self.plain or self.options.synchronous
        return Retreat(self.center.size, Gain(0, brake=0) if never else self.gain)

    def share(self, size: int) -> None:
        """Take the sampled coordinates of the whole gradient, which workers send: one gain for all parts."""
        if self.plain:
            return
        self.sampled = sampled_places(size).size
        self.gain = Gain(self.sampled, brake=self.options.brake)
        self.retreat = self._new_retreat()
        self.metric = SampledMetric(self.sampled if self.metric.square.size else 0)

    def attend(self, workers: int) -> None:
        """Note how many workers live.

        With a lag of L each gradient is as stale as with L + 1 times as many workers, so these count.
        """
        self.living = max(workers, 1)
        self.workers = self.options.stale_as(self.living)

    def in_groups(self, size: int) -> None:
        """Note that each contribution is the mean of so many ranks' gradients."""
        self.members, self.batches = size, self.options.every * size
        if self.plain and size > 1:
            self._begin_as(plain=False)

    @property
    def heavy(self) -> bool:
        """Whether it steps by Adam."""
        return self.paced.square.size > 0 or super().heavy

    def quorum(self, awaited: int) -> int:
        """Wait for all workers if they step together."""
        return awaited if self.options.synchronous else 1

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Step with the (only) contribution, or with the mean of all."""
        if self.plain:
            super().apply(contributions)
            self.progress += contributions[0].weight
            return
        move = (
            self._begin_together(contributions) if self.options.synchronous else self._begin(contributions[0])
        )
        if move is not None:
            work_through(move, self.center.size)
        for contribution in contributions[1:]:
            self.reply(contribution.vector)

    def apply_by_parts(self, contribution: Contribution) -> PartWork | None:
        """Return what steps a part, and makes the reply of it where that is ahead of the centre."""
        if self.plain:
            move = super().apply_by_parts(contribution)
            self.progress += contribution.weight if move is not None else 0.0
            return move
        by_parts = self._follows_velocity and not self.options.synchronous
        return self._begin(contribution) if by_parts else None

    @property
    def replies_center(self) -> bool:
        """Whether there is nothing to look ahead to."""
        return self.plain

    def reply(self, vector: Vector, part: slice = slice(None)) -> None:
        """Send the place where the centre will be when the worker's next gradient arrives."""
        if self.plain:
            super().reply(vector, part)
            return
        whole = slice(*part.indices(self.center.size)[:2])
        self.paced.look_ahead(self.center, vector, whole)

    def settle(self) -> None:
        """Leave the optimizer's state as it is with one process."""
        self.paced.settle()

    def state(self) -> State:
        """Return a copy of everything that the next commit depends on."""
        self.settle()
        return super().state()

    def _begin(self, contribution: Contribution) -> PartWork | None:
        """Take the gain of a contribution; return what steps a part of the centre with it.

        A contribution that was computed at a place where the training was lost moves nothing.
        """
        gradient = contribution.vector
        self.steered.follow(self.work[1])
        self.steered.prepare(gradient)
        stretches = self.steered.stretches(gradient.size, gradient)
        sample = self._sample_of(contribution)
        kind = self._kind(stretches)
        metric = None if kind is None else self.metric.factors(kind, sample)
        batches = self._batches(contribution.weight)
        if self.retreat.outdates(contribution.staleness):
            return self._stand(gradient, stretches, batches)
        self.retreat.keep(self.center, self.gain, workers=self.workers)
        shorter, scale = self.gain.see(sample, metric, workers=self.workers, batches=batches)
        if self.retreat.needed(shorter, self.gain, workers=self.workers):
            self.retreat.go_back(self.center, self.gain)
            self.paced.forget()
            return self._stand(gradient, stretches, batches)
        scale *= self.retreat.throttle
        if kind is not None:
            self.metric.see(sample, kind, shorter)
        self.progress += scale / batches * contribution.weight
        self._count(batches, scale)
        if stretches is not None:
            memory = self.options.remembered if self.workers > 1 else self.options.together(scale).memory
            pace = Pace(self.workers, scale, shorter, memory, self.gain.unease)
            return self.paced.begin(self.center, gradient, stretches, pace)
        if shorter < 1:
            np.multiply(gradient, np.float32(shorter), out=gradient)
        self.steered.step_scaled(self.center, gradient, scale)
        return None

    def _stand(
        self, gradient: Vector, stretches: Sequence[Stretch] | None, batches: float
    ) -> PartWork | None:
        """Return what moves no part of the centre, and makes the reply of it."""
        self._count(batches, 0.0)
        return None if stretches is None else partial(self.paced.look_ahead, self.center, gradient)

    def _begin_together(self, contributions: Sequence[Contribution]) -> PartWork | None:
        """Take the gain of contributions made together; return what steps a part with their mean."""
        self.steered.follow(self.work[1])
        stretches = self.steered.stretches(self.center.size, contributions[0].vector)
        samples = [self._sample_of(one).astype(np.float64) for one in contributions]
        kind = self._kind(stretches)
        weights = np.array([one.weight for one in contributions])
        mean = np.average(samples, axis=0, weights=weights)
        metric = np.ones(mean.size) if kind is None else self.metric.factors(kind, mean.astype(np.float32))
        squares = [products(metric * one, one) for one in samples]
        gain = self.mean_gain.see(squares, products(metric * mean, mean))
        gradient = mean_of(contributions)
        self.steered.prepare(gradient)
        if kind is not None:
            self.metric.see(mean.astype(np.float32), kind, 1.0)
        self.progress += gain * float(weights.mean())
        self._count(self.batches * len(contributions), self.batches * gain)
        if stretches is not None:
            return self.paced.begin(self.center, gradient, stretches, self.options.together(gain))
        self.steered.step_scaled(self.center, gradient, gain)
        return None

    def _sample_of(self, contribution: Contribution) -> Vector:
        return contribution.vector.take(self.places) if contribution.sample is None else contribution.sample

    def _count(self, done: float, made: float) -> None:
        self.work[0] += done
        self.work[1] += made

    def _kind(self, stretches: Sequence[Stretch] | None) -> Stretch | None:
        """Return the options of Adam, if that is what steps the centre."""
        return stretches[0] if stretches and stretches[0].adaptive else None

    def _batches(self, weight: float) -> float:
        """Return the number of batches of a contribution; those at an epoch's end may have fewer."""
        self.largest = max(self.largest, weight)
        return max(1.0, self.batches * weight / self.largest)

    def noise_in_samples(self) -> float | None:
        """Return the noise scale that the gain is made of."""
        found = self.mean_gain if self.options.synchronous else self.gain
        if self.plain or found.signal <= 0 or not self.largest:
            return None
        return found.noise / found.signal * self.largest

    def gain_report(self) -> GainReport | None:
        """Return how much work the workers have done together so far; None: there is one."""
        if self.plain:
            return None
        found = self.mean_gain if self.options.synchronous else self.gain
        told = gain_report(found, self.living * self.members, self.work)
        held, times = self.retreat.kept.nbytes, self.retreat.times
        return replace(told, shortened=self.gain.braked, retreats=times, held_bytes=held)


def gain_report(found: Gain | MeanGain, workers: int, work: Sequence[float]) -> GainReport:
    """Return how much work workers have done together.

    Args:
        found: the estimate.
        workers: their number.
        work: batches done, and progress made.
    """
    worth = worth_having(found.noise, found.signal) if found.signal > 0 else None
    return GainReport(workers=workers, batches=work[0], progress=work[1], worth_having=worth, shortened=0.0)


class SteadyGroup(Stateful):
    """Steps the parameters of all ranks of a training without servers, with the mean gradient times the gain.

    Attributes:
        norms: measures the ranks' gradients while their mean is made.
        progress: the samples of one process that all steps were worth.

    Args:
        size: the number of coordinates.
        optimizer: the user's.
        options: the algorithm's.
    """

    saved = ("gain", "metric", "paced", "progress", "work")

    def __init__(self, size: int, optimizer: Steerable, options: Steady) -> None:
        self._optimizer, self._options = optimizer, options
        self.norms = MemberNorms(sampled_places(size))
        stretches = optimizer.stretches(size, None)
        self._follows_velocity = stretches is not None
        adaptive = any(one.adaptive for one in stretches or ())
        self.gain, self.paced = MeanGain(), PacedOptimizer(size, optimizer)
        self.metric = SampledMetric(self.norms.places.size if adaptive else 0)
        self.progress, self.work, self._ranks = 0.0, [0.0, 0.0], 1

    def step(self, x: Vector, gradient: Vector, squares: Sequence[float], weight: float) -> None:
        """Make one step; every rank makes the same.

        Args:
            x: the parameters.
            gradient: the mean over the ranks, perhaps changed by the loop, as by clipping; its memory is
                used.
            squares: the squared norm of the gradient of each rank that had a batch.
            weight: the mean number of samples behind these.
        """
        self._optimizer.follow(self.work[1])
        self._optimizer.prepare(gradient)
        stretches = self._optimizer.stretches(x.size, gradient)
        final = self.norms.square(gradient)
        changed = final / self.norms.of_mean if self.norms.of_mean > 0 else 1.0
        gain = self.gain.see([one * changed for one in squares], final)
        self._ranks = max(self._ranks, len(squares))
        self.progress += gain * weight
        self.work[0] += len(squares)
        self.work[1] += gain
        if stretches is None:
            self._optimizer.step_scaled(x, gradient, gain)
            return
        kind = stretches[0] if stretches and stretches[0].adaptive else None
        if kind is not None:
            if self.norms.metric is None:
                self.gain = MeanGain()  # what was measured without the metric is no estimate in it
            self.metric.see(gradient[self.norms.places], kind, 1.0)
            self.norms.metric = self.metric.factors(kind)
        move = self.paced.begin(x, gradient, stretches, self._options.together(gain))
        work_through(move, x.size)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        super().load(state)
        stretches = self._optimizer.stretches(self.paced.velocity.size, None)
        if self.metric.steps and stretches and stretches[0].adaptive:
            self.norms.metric = self.metric.factors(stretches[0])

    def gain_report(self) -> GainReport:
        """Return how much work the ranks have done together so far."""
        return gain_report(self.gain, self._ranks, self.work)


@dataclass(frozen=True, kw_only=True)
class Steady(Algorithm):
    r"""The accuracy of one process with its settings, on any number of workers.

    Workers push gradients as they come, as with Downpour; the centre keeps three laws:

    *It looks ahead.* While a worker computes, W - 1 others move the centre. So the worker gets the place
    where the centre will be when its gradient arrives (DANA, Hakimi et al. 2019, arXiv:1907.11612), and the
    momentum counts
    rounds of all workers: with :math:`\nu = 1 - (1 - \mu') / W`,
    :math:`m \leftarrow \nu m + s g / W,\ c \leftarrow c - \eta m`, and the reply is :math:`c - \eta \mu' W
    m`.

    *It scales by the gain.* :math:`s = G / W` with
    :math:`G = (\sigma^2 + \gamma) / (\sigma^2 / W + \gamma)` (AdaScale, Johnson et al. 2020,
    arXiv:2007.05105), the noise :math:`\sigma^2` and the signal :math:`\gamma` measured from products of
    neighbouring contributions, in Adam's metric for Adam. Where gradients agree, W workers count as one;
    where noise rules, each counts in full. :math:`\mu'` forgets as fast as one process does for the same
    progress.

    *It counts progress.* A contribution of b samples is s b samples of progress, and an epoch ends when the
    progress
    of one epoch is made: samplers go on dealing until then. Schedules follow progress, too.

    With one worker the centre makes exactly the steps of the user's optimizer. Momentum is followed for SGD,
    Adam and AdamW; with any other optimizer the gain scales its learning rates, and the momentum is left as
    it is.

    Contributions longer than `brake` times the running root mean square are shortened to that. If they still
    grow to many times that, the learning rate is too high for gradients that arrive late: the centre goes
    back to where it was calm, and makes shorter steps for a while.

    Attributes:
        every: steps between exchanges; a contribution is the mean of their gradients.
        passes: "progress": an epoch ends when the progress of an epoch is made; "fixed": after one pass over
            the samples, for those whose time is fixed.
        synchronous: commits take the mean of all workers' contributions, with the gain as published.
        memory: a worker's own steps that the momentum remembers at least, however large the gain; None: 4,
            or 2 where workers step together.
        brake: see above; 0: none.

    Example:
        >>> from nnlo_common import SGD
        >>> from nnlo_common.testing import train_virtually
        >>> slope = lambda x, rank: 0 * x + 1  # gradients agree: two workers count as one
        >>> run = train_virtually(Steady(), slope, [0.0], workers=2, steps=2, optimizer=SGD(1.0))
        >>> run.center, run.servers[0].rule.progress
        (array([-2.], dtype=float32), 2.0)
    """

    weighs: ClassVar[bool] = True
    steps_groups: ClassVar[bool] = True
    steps_in_place: ClassVar[bool] = True
    one_optimizer: ClassVar[str] = (
        "its gain compares neighbouring gradients of one loss, and counts a sample once"
    )
    refused_wires: ClassVar[Mapping[str, str]] = {
        "topk": "its gain compares neighbouring gradients, which then have few numbers in common; use int8"
    }

    every: int = option(1, "steps of a worker between exchanges", least=1)
    passes: Literal["progress", "fixed"] = option(
        "progress", "what ends an epoch: its progress, or one pass over the samples"
    )
    synchronous: bool = option(default=False, help="commit the mean of all workers, who step together")
    memory: float | None = option(
        None, "least steps of a worker that the momentum remembers; else 4, or 2 together", least=0
    )
    brake: float = option(1.5, "most length of a gradient, in running root mean squares; 0: any", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.synchronous and self.lag:
            self._refuse(f"lag={self.lag} with synchronous=True is not possible: leave one of them out")

    @property
    def remembered(self) -> float:
        """The least that the momentum remembers, in a worker's own steps."""
        together = 2.0 if self.synchronous else 4.0
        return together if self.memory is None else self.memory

    def together(self, gain: float) -> Pace:
        """Return the pace of a step that all workers make together."""
        return Pace(1, gain, memory=2.0 if self.memory is None else self.memory)

    def group(self, size: int, optimizer: VectorOptimizer | None) -> SteadyGroup:
        """Make what steps all ranks of a training without servers."""
        return SteadyGroup(size, self._steerable(optimizer), self)

    def stale_as(self, workers: int) -> int:
        """Return the number of workers without a lag whose gradients are as stale."""
        return workers * (self.lag + 1)

    def counts_progress(self, ranks: int) -> bool:
        """Whether an epoch ends when the progress of one epoch is made."""
        return self.passes == "progress" and self.stale_as(ranks) > 1

    def sampled(self, size: int, ranks: int) -> npt.NDArray[np.int64] | None:
        """Return the coordinates that the gain is measured with."""
        return sampled_places(size) if self.stale_as(ranks) > 1 else None

    def worker(self, size: int, workers: int) -> AGNWorker:
        """Make the worker's half."""
        n, kind = self.every, TogetherWorker if self.synchronous else AGNWorker
        return kind(size, n_push=n, n_fetch=n, first_push=n - 1, pipeline=self.lag)

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> CenterRule:
        """Make the centre's half: with one worker Downpour's."""
        return SteadyCenter(center, self._steerable(optimizer), self, workers=workers)

    def _steerable(self, optimizer: VectorOptimizer | None) -> Steerable:
        inner = self._needs_optimizer(optimizer)
        if not isinstance(inner, Steerable):
            self._refuse(f"its steps must be scaled, but {type(inner).__name__} has no step_scaled()")
        return inner
