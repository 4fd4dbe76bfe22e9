"""Paced optimizer: SGD, Adam and AdamW on a clock W times as slow, which also say where the centre will be.

W workers commit one after the other, so a momentum that counted commits would forget W times too fast. Here
each commit is a W-th of a step: with mu the momentum of one process, s the scale of the gain and

    nu = 1 - (1 - mu) / W

one commit of SGD is

    m <- nu m + s g / W;  c <- c - eta m;  the worker gets  c - eta mu W m

which is where the centre will be when this worker's next gradient arrives (DANA's look-ahead, Hakimi et al.
2019, arXiv:1907.11612, with one vector in place of one for each worker: the slow clock's m stands for the
mean of theirs). Adam is the same with its quotient, and s on the step in place of the gradient, which it
would normalize away.

A step that makes the progress of several steps of one process shall also forget as fast as they do, or
phases in which the loss falls exponentially are slowed down by inertia. With a gain of G a worker's step
remembers

    1 / (1 - mu') = (1 / (1 - mu)) / G + memory (1 - 1 / G)

steps of its own, and at most as many as the user's momentum; the gradient's weight (1 - mu') / (1 - mu)
keeps the whole effect of each gradient.

m means the same for any W, so workers may come and go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._vector_optimizer import Steerable, Stretch
from nnlo_common.base._block_threads import Scratch, cached_blocks, longest_block
from nnlo_common.base._flat_vector import PartWork, Vector, zeroed
from nnlo_common.base._state_tree import Stateful

__all__ = ["Pace", "PacedOptimizer", "SampledMetric", "momentum_at"]

# Values in a block: six operands of four bytes stay in a second-level cache, and calls are few.
_BLOCK = 1 << 16


class Pace(NamedTuple):
    """Pace of one commit.

    Attributes:
        workers: the number of workers that commit in turn.
        scale: gain / workers: the progress of this commit, in steps of one process.
        shorter: a factor on the gradient: the brake.
        memory: a worker's own steps that the momentum remembers at least, however large the gain.
        whole: how far it goes back to remembering as many as the user's momentum, from 0 to 1.
    """

    workers: int
    scale: float
    shorter: float = 1.0
    memory: float = 4.0
    whole: float = 0.0


def momentum_at(momentum: float, pace: Pace) -> float:
    """Return the momentum of a worker's steps, shorter where a step makes more progress.

    Example:
        >>> [round(momentum_at(0.9, Pace(8, gain / 8)), 3) for gain in (1, 4, 8)]
        [0.9, 0.818, 0.789]
    """
    gain, whole = max(1.0, pace.scale * pace.workers), 1 / (1 - momentum)
    remembered = min(whole, max(1.0, whole / gain + pace.memory * (1 - 1 / gain)))
    return 1 - 1 / (remembered + pace.whole * (whole - remembered))


class _Factors(NamedTuple):
    """The numbers of a commit for one stretch.

    m <- forget m + take g + pull x;  with Adam v too, and d the quotient;  x <- keep x - rate d;  ahead: x -
    rate lead d.
    """

    stretch: Stretch
    forget: float
    take: float
    pull: float
    keep: float
    rate: float
    lead: float
    epsilon: float


class PacedOptimizer(Stateful):
    """Steps one shard of the centre at the pace of W workers.

    Attributes:
        velocity: m, of all stretches.
        square: Adam's v; empty for SGD.
        steps: commits so far.
        bias: the product of all nu so far, for Adam's correction.

    Both vectors are the user's optimizer's own state: it is told to keep that in them, saves it, and steps
    with it where one worker is left.

    Args:
        size: the number of coordinates.
        optimizer: the user's.
        plain: one worker steps it as it is.
    """

    saved = ("steps", "bias")

    def __init__(self, size: int, optimizer: Steerable, *, plain: bool = False) -> None:
        stretches = () if plain else optimizer.stretches(size, None) or ()
        adam = any(one.adaptive for one in stretches)
        heavy = adam or any(one.momentum for one in stretches)
        self.velocity: Vector = zeroed(4 * size if heavy else 0).view(np.float32)
        self.square: Vector = zeroed(4 * size if adam else 0).view(np.float32)
        self.steps, self.bias, self._optimizer = 0, 1.0, optimizer
        self._bind()
        self._work = Scratch(longest_block(size, _BLOCK))
        self._size = size
        self._factors: list[tuple[slice, _Factors | None]] = [(slice(0, size), None)]

    def _bind(self) -> None:
        """Let the optimizer keep its state here; go on from the steps that it has made elsewhere."""
        if not self.velocity.size:
            return
        steps = self._optimizer.keep_in(self.velocity, self.square)
        if steps > self.steps:  # of one process
            (one, *_) = self._optimizer.stretches(self.velocity.size, None) or ()
            self.steps, self.bias = steps, one.momentum**steps

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the optimizer has loaded its own."""
        super().load(state)
        self._bind()

    def forget(self) -> None:
        """Forget the velocity, as at the start."""
        self.velocity.fill(0)
        self.bias = 1.0
        self._factors = [(slice(0, self._size), None)]

    def begin(self, x: Vector, gradient: Vector, stretches: Sequence[Stretch], pace: Pace) -> PartWork:
        """Begin a commit; return what moves a part of `x` and makes that part of `gradient` the reply."""
        self._bind()
        self.steps += 1
        self._optimizer.count(self.steps)
        self._factors = list(self._covering(x.size, stretches, pace))

        def move(part: slice) -> None:
            for place, factors in self._within(part):
                self._move(x[place], gradient[place], place, factors)

        return move

    def look_ahead(self, x: Vector, out: Vector, part: slice) -> None:
        """Write the place where `x` will be, as of the last commit, into a part of `out`."""
        for place, factors in self._within(part):
            if factors is None or not factors.lead:
                np.copyto(out[place], x[place])
            else:
                ahead = self._rows(place)[1]
                np.multiply(self._direction(place, factors), factors.rate, out=ahead)
                # In the order of `_move`, whose bits these are.
                np.subtract(x[place], np.multiply(ahead, factors.lead, out=ahead), out=out[place])

    def _covering(
        self, size: int, stretches: Sequence[Stretch], pace: Pace
    ) -> Iterator[tuple[slice, _Factors | None]]:
        """Yield the factors of all stretches in order; None for what no stretch moves."""
        at, bias = 0, self.bias
        for one in stretches:
            if at < one.place.start:
                yield slice(at, one.place.start), None
            factors, bias = self._numbers(one, pace)
            yield one.place, factors
            at = one.place.stop
        if at < size:
            yield slice(at, size), None
        self.bias = bias

    def _numbers(self, one: Stretch, pace: Pace) -> tuple[_Factors, float]:
        workers, scale = pace.workers, pace.scale
        momentum = momentum_at(one.momentum, pace)
        forget, rate = 1 - (1 - momentum) / workers, one.learning_rate
        decay = 0.0 if one.decoupled else one.weight_decay
        keep = 1 - rate * one.weight_decay * scale if one.decoupled else 1.0
        # With one worker left nobody else moves the centre meanwhile.
        lead = momentum * workers if workers > 1 else 0.0
        if one.adaptive:
            bias = self.bias * forget
            correction = math.sqrt(1 - one.beta2**self.steps)
            step = rate * scale * correction / (1 - bias)
            epsilon = one.epsilon * (1.0 if one.epsilon_outside else correction)
            return _Factors(one, forget, pace.shorter, decay, keep, step, lead, epsilon), bias
        weight = scale * (1 - momentum) / (1 - one.momentum) / workers if one.momentum else scale
        numbers = (forget, pace.shorter * weight, decay * weight, keep, rate, lead, 0.0)
        return _Factors(one, *numbers), self.bias

    def _within(self, part: slice) -> Iterator[tuple[slice, _Factors | None]]:
        """Yield the blocks of a part with their factors."""
        for place, factors in self._factors:
            both = slice(max(place.start, part.start), min(place.stop, part.stop))
            for block in cached_blocks(both, _BLOCK):
                yield block, factors

    def _rows(self, place: slice) -> npt.NDArray[np.float32]:
        return self._work.rows[:, : place.stop - place.start]

    def _move(self, x: Vector, g: Vector, place: slice, factors: _Factors | None) -> None:
        if factors is None:
            np.copyto(g, x)
            return
        one, (first, second) = factors.stretch, self._rows(place)
        sign = -1.0 if one.maximize else 1.0
        if factors.take * sign != 1.0:
            np.multiply(g, sign * factors.take, out=g)
        if factors.pull:
            np.add(g, np.multiply(x, factors.pull, out=first), out=g)
        if factors.keep != 1.0:
            np.multiply(x, factors.keep, out=x)
        if not one.adaptive and not one.momentum:
            np.subtract(x, np.multiply(g, factors.rate, out=first), out=x)
            np.copyto(g, x)
            return
        m = self.velocity[place]
        if one.adaptive:
            v = self.square[place]
            np.multiply(v, one.beta2, out=v)
            # The square of one vector is faster than a product of two.
            np.multiply(g, math.sqrt(1 - one.beta2), out=first)
            np.add(v, np.square(first, out=first), out=v)
            np.multiply(g, 1 - factors.forget, out=g)
        np.add(np.multiply(m, factors.forget, out=m), g, out=m)
        step = np.multiply(
            self._direction(place, factors), factors.rate, out=first if one.adaptive else second
        )
        np.subtract(x, step, out=x)
        if factors.lead:
            np.subtract(x, np.multiply(step, factors.lead, out=step), out=g)
        else:
            np.copyto(g, x)

    def _direction(self, place: slice, factors: _Factors) -> Vector:
        """Return d of a block: m, or Adam's quotient."""
        m = self.velocity[place]
        if not factors.stretch.adaptive:
            return m
        root = np.sqrt(self.square[place], out=self._rows(place)[0])
        return np.divide(m, np.add(root, factors.epsilon, out=root), out=root)


class SampledMetric(Stateful):
    """Adam's metric at the sampled coordinates: what the products of gradients are measured with.

    Each server of a sharded centre keeps it by itself, from the samples that it gets.

    Args:
        size: the number of sampled coordinates.
    """

    saved = ("square", "steps")

    def __init__(self, size: int) -> None:
        self.square: Vector = np.zeros(size, np.float32)
        self.steps = 0

    def factors(self, stretch: Stretch, sample: Vector | None = None) -> npt.NDArray[np.float64]:
        """Return a factor for each product of coordinates.

        Args:
            stretch: Adam's options.
            sample: the gradient that is measured, which is then in the mean square, as in Adam's own step;
                else a coordinate whose gradients were 0 so far would outweigh all others. None: only what
                was seen before, and 0 for such a coordinate.
        """
        factors, steps = self.square.astype(np.float64), self.steps
        if sample is not None:
            seen = sample.astype(np.float64)
            np.multiply(factors, stretch.beta2, out=factors)
            np.add(factors, np.multiply(seen * (1 - stretch.beta2), seen, out=seen), out=factors)
            steps += 1
        unseen = factors == 0 if sample is None else None
        if steps:
            np.divide(factors, 1 - stretch.beta2**steps, out=factors)
        np.add(np.sqrt(factors, out=factors), stretch.epsilon, out=factors)
        np.divide(1.0, factors, out=factors)
        if unseen is not None:
            factors[unseen] = 0.0
        return factors

    def see(self, sample: Vector, stretch: Stretch, shorter: float) -> None:
        """Take in a gradient's coordinates."""
        self.steps += 1
        seen = np.multiply(sample, np.float32(shorter))
        np.multiply(self.square, np.float32(stretch.beta2), out=self.square)
        self.square += np.float32(1 - stretch.beta2) * seen * seen
