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
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnlo_common.algorithms._vector_optimizer import Steerable, Stretch
from nnlo_common.base._block_threads import Scratch, cached_blocks, longest_block
from nnlo_common.base._flat_vector import PartWork, Vector, zeroed
from nnlo_common.base._state_tree import Stateful

__all__ = ["Pace", "PacedOptimizer", "SampledMetric", "momentum_at"]

# Values in a block: four vectors of it stay in a second-level cache, and calls are few.
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

    g <- grow (take g + pull x);  M <- fade M + g;  with Adam V <- fade_square V + (grow_square g)^2 too, and
    d is the quotient, else m;  x <- keep x - rate d;  ahead: x - rate lead d.
    """

    stretch: Stretch
    take: float
    pull: float
    fade: float
    grow: float
    fade_square: float
    grow_square: float
    keep: float
    rate: float
    lead: float
    epsilon: float


class PacedOptimizer(Stateful):
    """Steps one shard of the centre at the pace of W workers.

    Attributes:
        velocity: M, of all stretches.
        square: Adam's V; empty for SGD.
        units: M times the first is m, and V times the second is v.
        steps: commits so far.
        bias: the product of all nu so far of each stretch, for Adam's correction.

    Both vectors are the user's optimizer's own state: it is told to keep that in them, saves it, and steps
    with it where one worker is left.

    A gradient that is added as it is needs no pass to multiply it: with sums in place of means, M = m / (1 -
    nu) and V = v / (1 - beta2), a step of Adam passes 12 times over the vector in place of 14.

    Args:
        size: the number of coordinates.
        optimizer: the user's.
        plain: one worker steps it as it is.
        sums: keep sums; else m and v themselves.
    """

    saved = ("steps", "bias")

    def __init__(self, size: int, optimizer: Steerable, *, plain: bool = False, sums: bool = False) -> None:
        stretches = () if plain else optimizer.stretches(size, None) or ()
        adam, heavy = any(one.adaptive for one in stretches), any(map(_moves, stretches))
        self.velocity: Vector = zeroed(4 * size if heavy else 0).view(np.float32)
        self.square: Vector = zeroed(4 * size if adam else 0).view(np.float32)
        self.units, self._others = (1.0, 1.0), (1.0, 1.0)
        self._starts = [one.place.start for one in stretches]
        self.steps, self.bias, self._optimizer = 0, [1.0] * len(self._starts), optimizer
        self._bind()
        self._work = Scratch(longest_block(size, _BLOCK))
        self._size, self._sums = size, sums
        self._factors: list[tuple[slice, _Factors | None]] = [(slice(0, size), None)]

    def _bind(self) -> None:
        """Let the optimizer keep its state here; go on from the steps that it has made elsewhere."""
        if not self.velocity.size:
            return
        steps = self._optimizer.keep_in(self.velocity, self.square)
        if steps > self.steps:  # of one process
            every = self._optimizer.stretches(self.velocity.size, None) or ()
            self.steps, self.bias = steps, [one.momentum**steps for one in every]

    def settle(self) -> None:
        """Make m and v of the sums: the optimizer's state may be looked at until the next commit."""
        self._others, self.units = self.units, (1.0, 1.0)
        self._leave(slice(0, self._size))

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the optimizer has loaded its own."""
        super().load(state)
        if len(self.bias) != len(self._starts):  # of one process
            self.bias = [1.0] * len(self._starts)
        self.units = (1.0, 1.0)
        self._bind()

    def forget(self) -> None:
        """Forget the velocity, as at the start."""
        self.velocity.fill(0)
        self.bias = [1.0] * len(self._starts)
        self._factors = [(slice(0, self._size), None)]

    def begin(self, x: Vector, gradient: Vector, stretches: Sequence[Stretch], pace: Pace) -> PartWork:
        """Begin a commit; return what moves a part of `x` and makes that part of `gradient` the reply."""
        if not self.velocity.size and any(map(_moves, stretches)):  # a schedule has set a momentum
            self.velocity = zeroed(4 * self._size).view(np.float32)
        self._bind()
        self.steps += 1
        self._optimizer.count(self.steps)
        before, self.units = self.units, self._new_units(stretches, pace)
        self._others = (before[0] / self.units[0], before[1] / self.units[1])
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
                step = self._row(place)
                self._step(step, place, factors)
                # In the order of `_move`, whose bits these are.
                np.subtract(x[place], np.multiply(step, factors.lead, out=step), out=out[place])

    def _new_units(self, stretches: Sequence[Stretch], pace: Pace) -> tuple[float, float]:
        """Return the units with which gradients of the first stretch are added as they are."""
        first = next(filter(_moves, stretches), None)
        if not self._sums or first is None:
            return self.units
        return _share(first, pace), 1 - first.beta2 if first.adaptive else 1.0

    def _covering(
        self, size: int, stretches: Sequence[Stretch], pace: Pace
    ) -> Iterator[tuple[slice, _Factors | None]]:
        """Yield the factors of all stretches in order; None for what no stretch moves."""
        at, forget, moved = 0, 1.0, dict[int, float]()
        for one in stretches:
            if at < one.place.start:
                yield slice(at, one.place.start), None
            forget = 1 - (1 - momentum_at(one.momentum, pace)) / pace.workers
            whole = bisect_right(self._starts, one.place.start) - 1
            bias = moved[whole] = self.bias[whole] * forget
            yield one.place, self._numbers(one, pace, forget, bias)
            at = one.place.stop
        if at < size:
            yield slice(at, size), None
        # The steps are counted where there is no gradient, too.
        self.bias = [moved.get(whole, bias * forget) for whole, bias in enumerate(self.bias)]

    def _numbers(self, one: Stretch, pace: Pace, forget: float, bias: float) -> _Factors:
        momentum, rate = momentum_at(one.momentum, pace), one.learning_rate
        keep = 1 - rate * one.weight_decay * pace.scale if one.decoupled else 1.0
        grow, grow_square, epsilon = _share(one, pace), 1.0, 0.0
        if one.adaptive:
            correction = math.sqrt(1 - one.beta2**self.steps)
            rate *= pace.scale * correction / (1 - bias)
            epsilon = one.epsilon * (1.0 if one.epsilon_outside else correction)
            grow_square = math.sqrt((1 - one.beta2) / self.units[1]) * self.units[0] / grow
        if not _moves(one):  # the gradient is the direction
            rate *= grow
        return _Factors(
            one,
            take=-pace.shorter if one.maximize else pace.shorter,
            pull=0.0 if one.decoupled else one.weight_decay,
            fade=forget * self._others[0],
            grow=grow / self.units[0],
            fade_square=one.beta2 * self._others[1],
            grow_square=grow_square,
            keep=keep,
            rate=rate,
            # With one worker left nobody else moves the centre meanwhile.
            lead=momentum * pace.workers if pace.workers > 1 else 0.0,
            epsilon=epsilon,
        )

    def _within(self, part: slice) -> Iterator[tuple[slice, _Factors | None]]:
        """Yield the blocks of a part with their factors."""
        for place, factors in self._factors:
            both = slice(max(place.start, part.start), min(place.stop, part.stop))
            for block in cached_blocks(both, _BLOCK):
                yield block, factors

    def _row(self, place: slice) -> Vector:
        return self._work.rows[0, : place.stop - place.start]

    def _move(self, x: Vector, g: Vector, place: slice, factors: _Factors | None) -> None:
        if factors is None:
            self._leave(place)
            np.copyto(g, x)
            return
        # All in the memory of the gradient: a fifth vector in the cache makes it slower by a tenth.
        one = factors.stretch
        _times(g, factors.take)
        if factors.pull:
            np.add(g, np.multiply(x, factors.pull, out=self._row(place)), out=g)
        _times(x, factors.keep)
        if _moves(one):
            _times(g, factors.grow)
            m = self.velocity[place]
            np.add(np.multiply(m, factors.fade, out=m), g, out=m)
            if one.adaptive:
                _times(g, factors.grow_square)
                v = self.square[place]
                # The square of one vector is faster than a product of two.
                np.add(np.multiply(v, factors.fade_square, out=v), np.square(g, out=g), out=v)
        self._step(g, place, factors)
        np.subtract(x, g, out=x)
        if factors.lead:
            np.subtract(x, np.multiply(g, factors.lead, out=g), out=g)
        else:
            np.copyto(g, x)

    def _step(self, out: Vector, place: slice, factors: _Factors) -> None:
        """Write the step of a block into `out`, which is the gradient if nothing else moves it."""
        if not _moves(factors.stretch):
            np.multiply(out, factors.rate, out=out)
            return
        m, (unit_m, unit_v) = self.velocity[place], self.units
        if factors.stretch.adaptive:
            unit_v = math.sqrt(unit_v)
            root = np.sqrt(self.square[place], out=out)
            m = np.divide(m, np.add(root, factors.epsilon / unit_v, out=root), out=root)
        np.multiply(m, factors.rate * unit_m / unit_v, out=out)

    def _leave(self, place: slice) -> None:
        """Leave m and v as they are, in their new units."""
        for vector, factor in zip((self.velocity, self.square), self._others, strict=True):
            if vector.size:
                _times(vector[place], factor)


def _moves(one: Stretch) -> bool:
    """Return whether it steps by m."""
    return one.adaptive or one.momentum > 0


def _share(one: Stretch, pace: Pace) -> float:
    """Return the factor of a gradient in m; for SGD with the scale of the step in it."""
    momentum = momentum_at(one.momentum, pace)
    if one.adaptive:
        return (1 - momentum) / pace.workers
    whole = (1 - momentum) / (1 - one.momentum) / pace.workers if one.momentum else 1.0
    return pace.scale * whole


def _times(vector: Vector, factor: float) -> None:
    if factor != 1.0:
        np.multiply(vector, factor, out=vector)


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

    def factors(self, stretch: Stretch, sample: Vector | None = None) -> Vector:
        """Return a factor for each product of coordinates.

        Args:
            stretch: Adam's options.
            sample: the gradient that is measured, which is then in the mean square, as in Adam's own step;
                else a coordinate whose gradients were 0 so far would outweigh all others. None: only what
                was seen before, and 0 for such a coordinate.
        """
        square, steps = self.square, self.steps
        if sample is not None:
            square, steps = self._with(sample, stretch), steps + 1
        # 1 / (sqrt(v / c^2) + epsilon) is c / (sqrt(v) + epsilon c).
        correction = math.sqrt(1 - stretch.beta2**steps) if steps else 1.0
        factors = np.sqrt(square)
        np.divide(correction, np.add(factors, stretch.epsilon * correction, out=factors), out=factors)
        if sample is None:
            factors[square == 0] = 0.0
        return factors

    def see(self, sample: Vector, stretch: Stretch, shorter: float) -> None:
        """Take in a gradient's coordinates."""
        self.steps += 1
        self._with(sample, stretch, shorter, out=self.square)

    def _with(
        self, sample: Vector, stretch: Stretch, shorter: float = 1.0, out: Vector | None = None
    ) -> Vector:
        """Return the mean square with a gradient in it."""
        seen = np.multiply(sample, shorter * math.sqrt(1 - stretch.beta2))
        square = np.multiply(self.square, stretch.beta2, out=out)
        return np.add(square, np.square(seen, out=seen), out=square)
