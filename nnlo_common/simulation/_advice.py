"""Advice: what a probe's measurements mean for the ranks, the batch, the layout and the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._easgd import EASGD
from nnlo_common.algorithms._gain import worth_having
from nnlo_common.algorithms._noise_scale import NoiseEstimate
from nnlo_common.algorithms._steady import Steady
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.simulation._probe import ProbeFacts
from nnlo_common.simulation._rehearsal import ExchangeTimes
from nnlo_common.simulation._simulator import Costs, Durations, Forecast, Ranks, gain_of, simulate

__all__ = ["Advice", "AdvisedLayout", "CurvePoint"]

#: Numbers of workers on the curve of time against core-hours.
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECTIONS = (
    *("What to do", "How many workers", "Layouts", "Batch", "Memory", "float16"),
    "What this probe cannot know",
)
#: Numbers of ranks for which a layout is sought.
RANKS = (4, 16, 64)
_MANY = 64
# Workers are worth having while each rank does half of what one process does alone.
_WORTH = 0.5
_LARGER = 1.25  # the same of a larger batch
_WORTH_PACKING = 1.2  # the same of smaller messages
_PACKED_S = 4e-9  # to pack or unpack a number, on a worker and on a server: docs/wire.md
_LOST, _KEPT = 0.1, 0.01  # shares of a layer that float16 may flush to zero: without a word, and scaled
_MIB = 1 << 20
# What MPI takes of a rank for a message, and what else an exchange takes on a server and on a worker besides
# its vectors: docs/speed.md, one exchange.
_RECEIVED_S, _SERVED_S, _HANDLED_S = 1.5e-5, 1.5e-5, 2e-5
# What the wrapper of a framework takes in the loop, in each step and with each exchange: docs/speed.md, a
# training.
_STEPPED_S, WRAPPED_S = 1e-4, 2e-4
# Numbers that the ranks of a host add up at once: training/_all_reduce.py.
_PIECE = 1 << 18
# A common network where none was measured: 20 us, 25 Gbit/s.
_LATENCY_S, _NETWORK = 2e-5, 3e9
_LARGEST_BATCH = 64  # times the batch, as far as is looked
# A worker's own copies of the model on its way, and a server's for each of the first workers that it hears.
_WORKER_COPIES, _SERVER_COPIES, _MOST_WAITING = 2, 1, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedLayout:
    """A layout, as the simulator found it.

    Attributes:
        ranks: the algorithm and its ranks.
        prediction: of the simulator.
        speed: how many times as fast as one process it reaches a loss, from the noise scale.
        low, high: the same with the ends of the noise scale's range.
    """

    ranks: Ranks
    prediction: Forecast
    speed: float
    low: float
    high: float

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        ranks, rule = self.ranks, self.ranks.algorithm
        found: dict[str, Any] = {}
        if ranks.servers != 1:
            found["servers"] = ranks.servers
        if ranks.servers and ranks.group_size > 1:
            found["group_size"] = ranks.group_size
        for name in ("every", "lag"):
            value, default = getattr(rule, name, None), getattr(type(rule), name, None)
            if value is not None and value != default:
                found[name] = value
        return found

    @property
    def flags(self) -> str:
        """The line to copy, behind `mpiexec`."""
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in self.options.items())
        name = type(self.ranks.algorithm).__name__.lower()
        return f"mpiexec -n {self.ranks.size} nnlo train ... --mode {name}{options}"

    @property
    def call(self) -> str:
        """The same for a script."""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{type(self.ranks.algorithm).__name__}(optimizer{options})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A number of workers on the curve of time against core-hours.

    Attributes:
        workers: that train.
        layout: the best one for them.
        time: until the loss of one process, in its time; with the ends of the range.
        core_hours: in those of one process.
    """

    workers: int
    layout: AdvisedLayout
    time: float
    low: float
    high: float
    core_hours: float


def _with_exchanges(costs: Costs, times: ExchangeTimes, *, packing: float = 0.0) -> Costs:
    """Return costs with what exchanges take: as timed, and what MPI, wrappers and packing take besides."""
    return replace(
        costs,
        commit=times.served_s + _RECEIVED_S + packing,
        handle=times.handled_s + 2 * _RECEIVED_S + WRAPPED_S + packing,
        commit_least_s=times.served_least_s + _RECEIVED_S,
        handle_least_s=times.handled_least_s + 2 * _RECEIVED_S,
        together_s=times.together_s,
    )


class Advice:
    """What a probe means, in words; every number has a range, and what a probe cannot know is said.

    Attributes:
        facts: what was measured.

    Args:
        facts: of the probe.
        wrappers: the package whose wrappers are named.

    Example:
        >>> from nnlo_common.simulation._advice import example_facts  # those of no probe
        >>> advice = Advice(example_facts(noise_scale=8000, batch=100))
        >>> print(advice.noise)
        8000 samples (6400 to 10000)
        >>> advice.section("float16")
        ["float16 would flush 0 % of the gradients' values to zero: it needs no loss scale."]
    """

    def __init__(self, facts: ProbeFacts, *, wrappers: str = "") -> None:
        self.facts, self._wrappers = facts, wrappers

    # -- numbers --------------------------------------------------------------------------------------

    @cached_property
    def noise(self) -> NoiseEstimate:
        """The noise scale at the end of the probe: the critical batch now."""
        return self.facts.noise[-1]

    @cached_property
    def costs(self) -> Costs:
        """What a training costs, for the simulator; `costs_of` knows an algorithm's exchanges, too."""
        facts = self.facts
        copies = facts.copy_bytes_per_s / 2
        within = facts.within_bytes_per_s or copies
        latency_s, bytes_per_s = facts.link or (
            _LATENCY_S,
            within if facts.one_host else min(copies, _NETWORK),
        )
        got = self._got

        def shared_s(ranks: int) -> float:
            """Return what a sum in memory takes that all ranks of a host see."""
            passes = min(ranks, 3)  # there, and of a few ranks to add up; of more to add a part, and back
            return passes * self._copied_s + shared_waits(ranks) * latency_s

        def shared_waits(ranks: int) -> int:
            """Return how often a rank waits for the others in that."""
            return math.ceil(facts.parameters / _PIECE) * (1 if ranks <= 3 else 2)

        costs = Costs(
            step=Durations([got * seconds for seconds in facts.steps_s[facts.batch]]),
            read=Durations(list(facts.read_s)) if facts.read_s else None,
            parameters=facts.parameters,
            optimizer_s=got * facts.optimizer_s,
            wrapped_s=_STEPPED_S,
            collect_s=self._copied_s,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            copied_s=4 * facts.parameters / facts.copy_bytes_per_s if facts.one_host else 0.0,
            reduce_s=shared_s if facts.one_host else None,
            reduce_waits=shared_waits if facts.one_host else None,
            slow={rank: factor for rank, factor in enumerate(facts.slow) if factor > 1},
        )
        return _with_exchanges(costs, self._reckoned)

    def costs_of(self, algorithm: Algorithm, *, packing: float = 0.0) -> Costs:
        """Return what a training with this algorithm costs: its exchanges as they were tried, if they were.

        Args:
            algorithm: with its options.
            packing: seconds to pack or unpack a message, of a worker and of a server.
        """
        facts, tried = self.facts, self.facts.exchanges.get(algorithm)
        times = self._reckoned if tried is None else ExchangeTimes(*(self._got * one for one in tried))
        if algorithm.optimizer_runs == "center" and not algorithm.steps_groups:
            # The core's optimizer was timed, and the script's steps the centre.
            slower_s = self._got * max(facts.optimizer_s - facts.commit_s, 0.0)
            times = ExchangeTimes(times.served_s + slower_s, *times[1:])
        return _with_exchanges(self.costs, times, packing=packing)

    @property
    def _got(self) -> float:
        """The part of a core that each rank had: more ranks than cores may have tried it together."""
        facts = self.facts
        return min(1.0, facts.cores / len(facts.slow)) if facts.one_host and facts.cores else 1.0

    @property
    def _reckoned(self) -> ExchangeTimes:
        """What an exchange would take that was not tried: its vectors, and what it takes without them."""
        least_s = (_SERVED_S, _HANDLED_S)
        return ExchangeTimes(self.facts.commit_s + _SERVED_S, 2 * self._copied_s + _HANDLED_S, 0.0, *least_s)

    @property
    def _copied_s(self) -> float:
        """What it takes to copy as many numbers as the model has, in a training."""
        facts = self.facts
        if facts.collect_s is None:
            return 4 * facts.parameters / facts.copy_bytes_per_s
        return self._got * facts.collect_s

    @cached_property
    def alone(self) -> Forecast:
        """One process."""
        return simulate(Ranks(algorithm=Steady(), servers=0), self.costs, steps=200)

    def layout(self, ranks: Ranks) -> AdvisedLayout:
        """Return a layout as the simulator sees it."""
        steps = max(4, min(60, 800 // ranks.training))
        prediction = simulate(ranks, self.costs_of(ranks.algorithm), steps=steps)
        batch, one = self.facts.batch, self.alone.batches_per_s
        speeds = [
            prediction.progress_per_s(scale / batch) / one
            for scale in (self.noise.scale, self.noise.low, self.noise.high)
        ]
        return AdvisedLayout(
            ranks=ranks, prediction=prediction, speed=speeds[0], low=min(speeds), high=max(speeds)
        )

    @cached_property
    def curve(self) -> list[CurvePoint]:
        """Time against core-hours, for 1 to 256 workers."""
        found = []
        for workers in WORKERS:
            if workers == 1:
                ranks = self.alone.ranks
                best = AdvisedLayout(ranks=ranks, prediction=self.alone, speed=1.0, low=1.0, high=1.0)
            else:
                best = self._best(self._with_workers(workers))
            found.append(
                CurvePoint(
                    workers=workers,
                    layout=best,
                    time=1 / best.speed,
                    low=1 / best.high,
                    high=1 / best.low,
                    core_hours=best.ranks.size / best.speed,
                )
            )
        return found

    def _with_workers(self, workers: int) -> Iterator[Ranks]:
        # So many need the most servers; to simulate fewer would take seconds.
        for servers in (0, *self._servers[-1:]) if workers >= _MANY else (0, *self._servers):
            for rule in (Steady(), Steady(every=4)):
                if servers * 4 <= max(workers, 4) and (servers or rule == Steady()):
                    yield Ranks.of(rule, servers + workers, servers=servers)

    def _best(self, ranks: Iterable[Ranks]) -> AdvisedLayout:
        """Return the fastest layout; of two that are equally fast the one with fewer options."""
        best: AdvisedLayout | None = None
        worth = 0.0
        for one in sorted(ranks, key=self._most, reverse=True):
            if self._most(one) < worth:
                break  # no other can be faster
            layout = self.layout(one)
            value = layout.speed * (1 - 0.01 * len(layout.options))
            if value > worth:
                best, worth = layout, value
        assert best is not None  # there is one at least
        return best

    def _most(self, ranks: Ranks) -> float:
        """Return a speed that a layout cannot exceed: of its steps, and of its servers."""
        costs = self.costs_of(ranks.algorithm)
        step_s = max(costs.batch_mean_s - costs.optimizer_s, 0.0)  # they were measured at different times
        batch_s = step_s + self.costs.reduced_s(ranks.group_size)
        pace = ranks.training / batch_s if batch_s else math.inf
        if ranks.servers:
            every: int = getattr(ranks.algorithm, "every", 1)
            served_s = costs.served_mean_s / ranks.servers
            pace = min(pace, ranks.group_size * every / served_s if served_s else math.inf)
        together, noise = ranks.together, self.noise.scale / self.facts.batch
        return pace * gain_of(together, noise) / together / self.alone.batches_per_s * 1.1

    @cached_property
    def workers_worth_having(self) -> int:
        """The most workers of the curve at which each rank does half of what one process does alone."""
        ranks = {point.workers: point.layout.ranks.size for point in self.curve}
        worth = [one.workers for one in self.curve if 1 / one.time >= _WORTH * ranks[one.workers]]
        return max(worth, default=1)

    @cached_property
    def layouts(self) -> dict[int, AdvisedLayout]:
        """The best layout for each of some numbers of ranks."""
        return {ranks: self._best(self.candidates(ranks)) for ranks in RANKS}

    @cached_property
    def on_this_host(self) -> AdvisedLayout | None:
        """The best layout whose ranks share this host's cores; None: there are enough, or it is not known."""
        cores = self.facts.cores
        wanted = max(one.layout.ranks.size for one in self.curve if one.workers <= self.workers_worth_having)
        if cores is None or wanted <= cores:
            return None
        here = Advice(replace(self.facts, one_host=True, link=None))
        here.costs = replace(here.costs, cores=cores)
        most = [workers for workers in WORKERS if 1 < workers <= cores][-2:]
        candidates = [ranks for workers in most for ranks in here._with_workers(workers)]
        return here._best([here.alone.ranks, *candidates])

    @property
    def _servers(self) -> tuple[int, ...]:
        # Several on one host share its memory, so that they are no faster.
        return (1,) if self.facts.one_host else (1, 2, 4)

    def candidates(self, ranks: int) -> Iterator[Ranks]:
        """Yield the layouts of Steady that are compared."""
        for rule in (Steady(), Steady(lag=1), Steady(every=4)):
            for servers in self._servers:
                for group in (1, 4):
                    if 2 * servers <= ranks and not (ranks - servers) % group and ranks - servers >= group:
                        try:
                            yield Ranks.of(rule, ranks, servers=servers, group_size=group)
                        except ConfigurationError:  # the algorithm refuses this one
                            continue
        yield Ranks.of(Steady(), ranks, servers=0)

    # -- batches and memory ---------------------------------------------------------------------------

    @cached_property
    def step_fit(self) -> tuple[float, float]:
        """Seconds of a step: those of any batch, and those of a sample."""
        return _line({size: float(np.median(times)) for size, times in self.facts.steps_s.items()})

    @cached_property
    def memory_fit(self) -> tuple[float, float]:
        """Bytes of a training in one process: those of any batch, and those of a sample."""
        return _line({size: float(peak) for size, peak in self.facts.peak_bytes.items()})

    @cached_property
    def largest_batch(self) -> int | None:
        """The largest batch that fits into the memory that was left; None: unknown."""
        base, each = self.memory_fit
        left, largest = self.facts.left_bytes, max(self.facts.peak_bytes, default=self.facts.batch)
        if self.facts.too_large is not None:
            return largest
        if left is None or each <= 0:
            return None
        start = min(self.facts.peak_bytes.values(), default=0)
        return min(max(int((start + left - base) / each), largest), _LARGEST_BATCH * self.facts.batch)

    def batch_speed(self, batch: int, scale: float) -> float:
        """Return how many times the progress in a second of one process another batch makes."""
        base_s, each_s = self.step_fit
        read_s = float(np.median(self.facts.read_s)) / self.facts.batch if self.facts.read_s else 0.0

        def pace(size: int) -> float:
            seconds = max(base_s + each_s * size, read_s * size)
            return size / seconds / (1 + size / scale) if scale > 0 else 1 / seconds

        return pace(batch) / pace(self.facts.batch)

    @cached_property
    def best_batch(self) -> tuple[int, float, float]:
        """The batch of one process with the most progress in a second, how much, and at least how much."""
        most = min(self.largest_batch or math.inf, self.facts.samples or math.inf)
        sizes = [self.facts.batch]
        while sizes[-1] * 2 <= min(most, _LARGEST_BATCH * self.facts.batch):
            sizes.append(sizes[-1] * 2)
        best = max(sizes, key=lambda size: self.batch_speed(size, self.noise.scale))
        return best, self.batch_speed(best, self.noise.scale), self.batch_speed(best, self.noise.low)

    def worker_bytes(self, batch: int | None = None) -> float:
        """Return the memory of a worker."""
        base, each = self.memory_fit
        return base + each * (batch or self.facts.batch) + _WORKER_COPIES * 4 * self.facts.parameters

    def server_bytes(self, workers: int, servers: int = 1) -> float:
        """Return the memory of a server: a process with the model, its optimizer, and what workers send."""
        copies = _SERVER_COPIES * min(workers, _MOST_WAITING) + self.facts.slots
        return self.facts.start_bytes + copies * 4 * self.facts.parameters / servers

    # -- float16 --------------------------------------------------------------------------------------

    @cached_property
    def flushed(self) -> float:
        """The share of the gradients' values that float16 would flush to zero."""
        return self._lost(1.0)

    @cached_property
    def loss_scale(self) -> float | None:
        """The smallest loss scale that rescues every layer without an overflow; None: there is none."""
        histograms = self.facts.histograms.values()
        largest = max((one.largest for one in histograms), default=0)
        for power in range(max(16 - largest, 1)):
            if max((one.lost(2.0**power) for one in histograms), default=0.0) <= _KEPT:
                return 2.0**power
        return None

    def _lost(self, scale: float) -> float:
        histograms = self.facts.histograms.values()
        whole = sum(one.size for one in histograms)
        return sum(one.lost(scale) * one.size for one in histograms) / max(whole, 1)

    # -- words ----------------------------------------------------------------------------------------

    @cached_property
    def verdicts(self) -> list[str]:
        """What to do, the most important first."""
        return [*self._of_reading(), *self._of_batch(), *self._of_workers(), *self._of_cores()]

    def _of_reading(self) -> Iterator[str]:
        facts = self.facts
        if not facts.read_s:
            return
        read_s, step_s = float(np.median(facts.read_s)), float(np.median(facts.steps_s[facts.batch]))
        if read_s > step_s:
            yield (
                f"reading a batch takes {_ms(read_s)}, longer than the step ({_ms(step_s)}): cache the files "
                "on a local disk (--cache, stage_to=), or start more ranks that read, as each reads its own "
                "part"
            )

    def _of_batch(self) -> Iterator[str]:
        best, speed, surely = self.best_batch
        if best > self.facts.batch and speed >= _LARGER and surely >= 1.1:
            rate = gain_of(best / self.facts.batch, self.noise.scale / self.facts.batch)
            yield (
                f"a larger batch: {best} in place of {self.facts.batch} makes {speed:.1f} times the progress "
                f"in a second on one rank (at least {surely:.1f}), with {rate:.1f} times the learning rate "
                "for SGD"
            )

    def _of_workers(self) -> Iterator[str]:
        worth = self.workers_worth_having
        if worth == 1:
            best = min(self.curve, key=lambda one: one.time)
            yield (
                "one worker: with more, each rank does less than half of its work, and none of them makes "
                f"it more than {1 / best.time:.1f} times as fast; {self._why_one()}"
            )
        else:
            point = next(one for one in self.curve if one.workers == worth)
            yield (
                f"up to {worth} workers: {1 / point.time:.1f} times as fast as one process "
                f"({1 / point.high:.1f} to {1 / point.low:.1f}), by {point.layout.call}"
            )

    def _of_cores(self) -> Iterator[str]:
        """Say what this host is good for, where it has fewer cores than ranks are worth having."""
        cores, here = self.facts.cores, self.on_this_host
        if here is None:
            return
        many = "1 core" if cores == 1 else f"{cores} cores"
        text = f"these numbers give each rank a core of its own, and this host has {many}"
        if here.ranks.training == 1:
            yield f"{text}: here one process is as fast as several"
        else:
            yield (
                f"{text}: here {here.ranks.training} workers are {here.speed:.1f} times as fast as one "
                f"process ({here.low:.1f} to {here.high:.1f}), by {here.call}"
            )

    def _why_one(self) -> str:
        if self.noise.scale < 2 * self.facts.batch:
            return "the gradients of two batches say nearly the same"
        return (
            "the exchange of this model takes as long as a step saves: exchange less often, or use larger "
            "steps"
        )

    def lines(self) -> dict[str, list[str]]:
        """Return the advice, by heading."""
        return {title: self.section(title) for title in SECTIONS}

    def section(self, title: str) -> list[str]:
        """Return the sentences under a heading."""
        made = {
            "What to do": lambda: self.verdicts,
            "How many workers": self._workers_lines,
            "Layouts": self._layout_lines,
            "Batch": self._batch_lines,
            "Memory": self._memory_lines,
            "float16": self._float16_lines,
            "What this probe cannot know": self._unknown_lines,
        }
        return [*made[title]()]

    def _workers_lines(self) -> Iterator[str]:
        noise, batch = self.noise, self.facts.batch
        many = [worth_having(scale / batch, 1.0) for scale in (noise.scale, noise.low, noise.high)]
        yield (
            f"The critical batch is {noise} now: steps with fewer samples in all gain with each worker, "
            "steps with more waste samples."
        )
        yield (
            f"With batches of {batch}, {_count(many[0])} workers ({_count(many[1])} to {_count(many[2])}) "
            "each do half of the work of one alone, by their gradients; with messages and servers on this "
            f"machine, {self.workers_worth_having} are worth having."
        )
        first = self.facts.noise[0]
        if noise.scale > 0 and first.scale > 0 and math.isfinite(noise.scale + first.scale):
            change = noise.scale / first.scale
            yield (
                f"Within the probe it went from {first} to {noise}, to {change:.1f} times as much: it mostly "
                "rises as the loss falls, so later more workers are worth having."
            )
        for point in self.curve:
            yield (
                f"{point.workers} workers ({point.layout.ranks.size} ranks): {1 / point.time:.2f} times as "
                f"fast as one ({1 / point.high:.2f} to {1 / point.low:.2f}), {point.core_hours:.2f} times "
                "the core-hours."
            )

    def _layout_lines(self) -> Iterator[str]:
        for ranks, one in self.layouts.items():
            low, high = one.prediction.spread
            yield (
                f"{ranks} ranks: {one.flags} (in a script {one.call}): {one.prediction.batches_per_s:.4g} "
                f"batches a second ({low:.4g} to {high:.4g}), {one.speed:.1f} times as fast as one process "
                f"({one.low:.1f} to {one.high:.1f})."
            )
        own = self.layout(Ranks.of(EASGD(every=10), RANKS[1]))
        best = self.layouts[RANKS[1]]
        ratio = own.prediction.batches_per_s / best.prediction.batches_per_s
        yield (
            f"With exchanges every 10 batches (EASGD) {RANKS[1]} ranks would train on {ratio:.2f} "
            "times as many batches in the same time; what each is worth for the loss is not measured."
        )
        yield from self._wire_lines(own)

    def _wire_lines(self, own: AdvisedLayout) -> Iterator[str]:
        """Say what smaller messages would bring, where the link between hosts is the limit."""
        facts, size = self.facts, RANKS[1]
        if facts.link is None or facts.one_host:
            return
        packing = _PACKED_S * facts.parameters
        rule = EASGD(every=10)
        packed = replace(self.costs_of(rule, packing=packing), wire_bytes=1)
        ranks = Ranks.of(rule, size)
        found = simulate(ranks, packed, steps=max(4, 800 // ranks.training)).batches_per_s
        times = found / own.prediction.batches_per_s
        if times > _WORTH_PACKING:
            best = self.layouts[size].prediction.batches_per_s
            yield (
                f'Over this link wire="int8" makes messages a quarter as long: with it EASGD would train on '
                f"{times:.1f} times as many batches, {found / best:.1f} times as many as the layout above. "
                "Nothing chooses it for you."
            )

    def _batch_lines(self) -> Iterator[str]:
        facts = self.facts
        for size, times in facts.steps_s.items():
            low, middle, high = np.quantile(times, (0.1, 0.5, 0.9))
            yield (
                f"A step with {size} samples takes {_ms(middle)} ({_ms(low)} to {_ms(high)}): "
                f"{size / middle:.0f} samples a second."
            )
        best, speed, surely = self.best_batch
        if best > facts.batch:
            yield (
                f"On one rank {best} samples make the most progress in a second, {speed:.2f} times that of "
                f"{facts.batch} (at least {surely:.2f})."
            )
        if facts.samples is not None:
            together = facts.batch * self.workers_worth_having
            yield (
                f"The root of the {facts.samples} samples is {math.sqrt(facts.samples):.0f}, a common first "
                f"guess for the samples of a step; {self.workers_worth_having} workers have {together}."
            )

    def _memory_lines(self) -> Iterator[str]:
        facts = self.facts
        largest = self.largest_batch
        peak = facts.peak_bytes.get(facts.batch)
        if peak is not None:
            yield (
                f"One process takes {_mb(peak)} with batches of {facts.batch} on {facts.device}, as measured."
            )
        yield (
            f"A worker will take about {_mb(self.worker_bytes())}, a server of 15 workers about "
            f"{_mb(self.server_bytes(15))} (each within 15 %)."
        )
        if facts.too_large is not None:
            yield f"Batches of {facts.too_large} did not fit; {largest} did."
        elif largest is not None:
            more = "at least " if largest == _LARGEST_BATCH * facts.batch else "about "
            yield (
                f"Batches of up to {more}{largest} fit into the memory that was left, for one rank on this "
                f"host."
            )
        left = facts.left_bytes
        if left is not None and self.worker_bytes() > left + min(facts.peak_bytes.values(), default=0):
            yield (
                "A worker does not fit beside what else is in this memory: this is a case for a smaller "
                "model or batch, or for model parallelism, which nnlo does not do."
            )

    def _float16_lines(self) -> Iterator[str]:
        worst = max(self.facts.histograms, key=lambda name: self.facts.histograms[name].lost(), default="")
        share = self.facts.histograms[worst].lost() if worst else 0.0
        if share <= _LOST:
            yield (
                f"float16 would flush {_percent(self.flushed)} of the gradients' values to zero: it needs "
                f"no loss scale."
            )
            return
        text = (
            f"float16 would flush {_percent(self.flushed)} of the gradients' values to zero, most of them of "
            f"{worst} ({_percent(share)})"
        )
        if self.loss_scale is None:
            yield f"{text}, and no loss scale rescues them without an overflow elsewhere: use bfloat16."
        else:
            yield (
                f"{text}; a loss scale of {self.loss_scale:.0f} (2^{math.log2(self.loss_scale):.0f}) rescues "
                "them without an overflow."
            )

    def _unknown_lines(self) -> Iterator[str]:
        facts = self.facts
        yield "The noise scale of later epochs: probe again from a checkpoint (--from) to see it."
        if facts.one_host:
            yield "The network: all ranks were on one host. Start the probe on two, or give --link."
        elif facts.link is None:
            yield (
                "The network: it was taken to have 20 us and 3 GB/s. Start the probe on two hosts "
                "(mpiexec), or give what nnlo doctor measures there as --link."
            )
        yield "How much accuracy is lost by algorithms whose workers step by themselves, such as EASGD."
        if not facts.validated:
            yield "The time of validation: there are no samples to validate with."
        yield "Underflow within the layers: gradients of parameters were looked at, taken in float32."

    def __str__(self) -> str:
        """All of it, as text."""
        facts = self.facts
        head = f"{facts.parameters:,} parameters, {facts.framework} on {facts.device}".replace(",", " ", 1)
        parts = [head]
        for title, lines in self.lines().items():
            parts += ["", title, *(f"* {line}" for line in lines)]
        return "\n".join(parts)

    def as_data(self) -> dict[str, Any]:
        """Return the numbers, for a file of JSON."""
        noise = [{"scale": one.scale, "low": one.low, "high": one.high} for one in self.facts.noise]
        return {
            "framework": self.facts.framework,
            "device": self.facts.device,
            "parameters": self.facts.parameters,
            "batch": self.facts.batch,
            "noise_scale": noise,
            "messages": {
                "latency_s": self.costs.latency_s,
                "bytes_per_s": self.costs.bytes_per_s,
                "measured": bool(self.facts.link or self.facts.within_bytes_per_s),
            },
            "workers_worth_having": self.workers_worth_having,
            "curve": [
                {
                    "workers": one.workers,
                    "ranks": one.layout.ranks.size,
                    "options": one.layout.options,
                    "time": one.time,
                    "low": one.low,
                    "high": one.high,
                    "core_hours": one.core_hours,
                }
                for one in self.curve
            ],
            "layouts": {
                str(ranks): {
                    "call": one.call,
                    "line": one.flags,
                    "batches_per_s": one.prediction.batches_per_s,
                    "speed": one.speed,
                }
                for ranks, one in self.layouts.items()
            },
            "step_s": {str(size): [*times] for size, times in self.facts.steps_s.items()},
            "peak_bytes": {str(size): peak for size, peak in self.facts.peak_bytes.items()},
            "worker_bytes": self.worker_bytes(),
            "server_bytes": self.server_bytes(15),
            "start_bytes": self.facts.start_bytes,
            "largest_batch": self.largest_batch,
            "best_batch": self.best_batch[0],
            "flushed": self.flushed,
            "loss_scale": self.loss_scale,
            "advice": self.lines(),
        }


def _line(values: Mapping[int, float]) -> tuple[float, float]:
    """Return the best line through values by size: what any size has, and what each sample adds."""
    sizes, found = np.array(list(values), float), np.array(list(values.values()))
    if len(sizes) < 2:
        return (0.0, float(found[0] / sizes[0])) if len(sizes) else (0.0, 0.0)
    # By relative errors, so that the smallest size counts as much as the largest.
    system = np.stack([np.ones_like(sizes), sizes], 1) / found[:, None]
    (base, each), *_ = np.linalg.lstsq(system, np.ones_like(sizes), rcond=None)
    if base < 0:
        return 0.0, float(np.mean(found / sizes))
    if each < 0:
        return float(np.median(found)), 0.0
    return float(base), float(each)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _mb(size: float) -> str:
    return f"{size / _MIB:.0f} MiB"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _count(value: float) -> str:
    return "any number of" if math.isinf(value) else f"{value:.0f}" if value < 1000 else f"{value:.2g}"


def example_facts(
    *, noise_scale: float = 4000.0, batch: int = 100, step_s: float = 0.05, parameters: int = 1_000_000
) -> ProbeFacts:
    """Return facts of a probe that was not made, for examples and tests."""
    range_ = NoiseEstimate(
        scale=noise_scale, low=0.8 * noise_scale, high=1.25 * noise_scale, signal=1.0, noise=1.0, batch=batch
    )
    sizes: Sequence[int] = [max(round(batch * factor), 1) for factor in (0.25, 0.5, 1, 2, 4)]
    return ProbeFacts(
        framework="none",
        device="cpu",
        batch=batch,
        samples=60_000,
        layers=[("dense", parameters)],
        slots=1,
        validated=True,
        steps_s={size: [step_s * size / batch] * 5 for size in sizes},
        read_s=[step_s / 100] * 5,
        peak_bytes={size: 200_000_000 + 100_000 * size for size in sizes},
        start_bytes=180_000_000,
        left_bytes=4_000_000_000,
        too_large=None,
        commit_s=1e-3,
        copy_bytes_per_s=8e9,
        noise=[range_, range_],
        histograms={},
    )
