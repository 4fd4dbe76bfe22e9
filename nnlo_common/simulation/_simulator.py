"""Simulator: servers and workers as they are, in virtual time; what it does not know it does not guess.

The virtual cluster of `nnlo_common.testing` runs the machines of the protocol with the algorithm's own rules
on a few numbers, and time passes as it was measured. So everything that waits in a real training waits here:
for a busy server, for the slowest of a round, for a reply that a lag has not hidden.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnlo_common.algorithms._gain import sampled_places
from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector
from nnlo_common.protocol import Action, Activity, Compute, Kind, Received, Send, Worker
from nnlo_common.simulation._costs import FLOAT32, Costs, Ranks
from nnlo_common.testing._schedules import ByTime, PendingRequest
from nnlo_common.testing._training import VirtualRanks
from nnlo_common.testing._virtual import VirtualCluster

__all__ = ["Forecast", "gain_of", "simulate"]

# Numbers of a shard of the centre in the simulation.
_NUMBERS = 2


def gain_of(workers: float, noise: float) -> float:
    """Return the number of workers whose work so many do together (AdaScale).

    Args:
        workers: their number.
        noise: the variance of a batch's gradient over the square of its mean: noise scale over batch size.

    Example:
        >>> gain_of(4, noise=0.0), gain_of(4, noise=math.inf), round(gain_of(4, noise=4.0), 3)
        (1.0, 4, 2.5)
    """
    return workers if math.isinf(noise) else (noise + 1) / (noise / workers + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How a training would go.

    Attributes:
        ranks: its ranks.
        batches_per_s: of all workers together.
        efficiency: the share of their time in which workers compute.
        busy: the share of its time in which the busiest server works.
        spread: the same pace in each of several parts of the simulated time, from the lowest to the highest.

    Example:
        >>> from nnlo_common import Downpour
        >>> costs = Costs(step=0.05, parameters=1_000_000, commit=0.001, latency_s=0, bytes_per_s=1e12)
        >>> run = simulate(Ranks(algorithm=Downpour(), workers=4), costs, steps=20)
        >>> round(run.batches_per_s, 1), round(run.efficiency, 2)
        (78.4, 0.98)
    """

    ranks: Ranks
    batches_per_s: float
    efficiency: float
    busy: float
    spread: tuple[float, float]

    def progress_per_s(self, noise: float) -> float:
        """Return the batches of one process that a second is worth, where each step counts by its gain.

        Args:
            noise: the noise scale over the size of a batch; infinite: every batch counts in full.
        """
        together = self.ranks.together
        return self.batches_per_s * gain_of(together, noise) / together

    def seconds_to(self, batches: float, noise: float) -> float:
        """Return how long a training takes that takes one process so many batches.

        Args:
            batches: of one process, until a loss is reached.
            noise: the noise scale over the size of a batch.
        """
        return batches / self.progress_per_s(noise)


def simulate(ranks: Ranks, costs: Costs, *, steps: int = 60, seed: int = 0) -> Forecast:
    """Let a training pass in virtual time, and return its pace.

    Args:
        ranks: the algorithm and its ranks.
        costs: what was measured.
        steps: batches of each rank that are counted; a fifth as many come before, so that queues fill.
        seed: of the durations that are drawn.

    Raises:
        ConfigurationError: the algorithm refuses these ranks, or has a tree of servers.

    Example:
        >>> from nnlo_common import Synchronous
        >>> costs = Costs(step=1.0, parameters=10, slow={0: 3.0})
        >>> run = simulate(Ranks(algorithm=Synchronous(), workers=4), costs)
        >>> round(run.batches_per_s, 2)  # all wait for the slow one
        1.33
    """
    whole_number("steps", steps, 1)
    if ranks.algorithm.tree():
        raise ConfigurationError(
            f"{type(ranks.algorithm).__name__} with sub-servers is not simulated; leave sub_servers out"
        )
    if not ranks.servers:
        return _in_step(ranks, costs, steps, seed)
    return _Simulation(ranks, costs, steps, seed).prediction()


def _in_step(ranks: Ranks, costs: Costs, steps: int, seed: int) -> Forecast:
    """Simulate ranks that make each step together, without a server."""
    draws = [random.Random(f"{seed} {member}") for member in range(ranks.training)]
    paces, computed_s = list[float](), 0.0
    for _ in range(steps):
        batches_s = [costs.batch_s(own, member) for member, own in enumerate(draws)]
        seconds = max(batches_s) + costs.reduced_s(ranks.training)
        computed_s += sum(batches_s) / len(batches_s)
        paces.append(seconds)
    whole_s = sum(paces)
    parts = [sum(part) / len(part) for part in _parts(paces)]
    return Forecast(
        ranks=ranks,
        batches_per_s=ranks.training * steps / whole_s if whole_s else math.inf,
        efficiency=computed_s / whole_s if whole_s else 1.0,
        busy=0.0,
        spread=_pace_range([part / ranks.training for part in parts]),
    )


class _Timed(ByTime):
    """First come, first served, with measured durations."""

    def __init__(self, ranks: Ranks, costs: Costs, seed: int) -> None:
        super().__init__(seed)
        self._ranks, self._costs = ranks, costs
        # Each rank has numbers of its own, so that layouts are compared with the same durations.
        self._of_members = [random.Random(f"{seed} {member}") for member in range(ranks.training)]
        self._of_servers = random.Random(seed)
        # A message of the simulation stands for one of so many numbers.
        self._numbers = costs.parameters / (_NUMBERS * FLOAT32 * ranks.servers)
        self.computed_s: dict[int, float] = {}
        self.served_total_s = 0.0
        self.serves = Kind.JOIN  # the kind of the request in hand

    def compute_s(self, rank: int) -> float:
        """Draw the time of one gradient: of the slowest rank of a group, with the sum of all."""
        first = (rank - self._ranks.servers) * self._ranks.group_size
        members = range(first, first + self._ranks.group_size)
        seconds = [self._costs.batch_s(self._of_members[member], member) for member in members]
        self.computed_s[rank] = self.computed_s.get(rank, 0.0) + sum(seconds) / len(seconds)
        return max(seconds) + self._costs.reduced_s(self._ranks.group_size)

    def communicate_s(self, size: int) -> float:
        """Return the time of a message between a server's and a worker's hands."""
        # An exchange has two long messages; the worker works before the first and after the second.
        return self._costs.latency_s + (self._costs.handled_s(self._of_servers) / 2 if size else 0.0)

    def serve_s(self, size: int) -> float:
        """Draw the time of a contribution, with its reply."""
        if self.serves is Kind.SAMPLE:  # a hundredth of the gradient, which is only kept
            sampled = sampled_places(self._costs.parameters).size
            seconds = sampled * self._costs.wire_bytes / self._costs.bytes_per_s
        else:
            # Whole contributions of a simulation have as many numbers as a shard, whatever comes with them.
            numbers = min(size, _NUMBERS * FLOAT32) * self._numbers
            seconds = self._costs.served_s(self._of_servers, numbers) if size else 0.0
        self.served_total_s += seconds
        return seconds


class _TimedCluster(VirtualCluster):
    """A virtual cluster that finds the request that arrived first without a look at all others."""

    def __init__(self, *args: Any, schedule: _Timed, **options: Any) -> None:
        self._arrivals: list[tuple[float, int, int, Kind]] = []
        self._timed = schedule
        super().__init__(*args, schedule=schedule, **options)

    def _perform_worker(self, rank: int, actions: Sequence[Action]) -> None:
        super()._perform_worker(rank, actions)
        for action in actions:
            if isinstance(action, Send):
                shard = action.message.shard
                arrival_s = self._channels[shard, rank][-1][0]
                heapq.heappush(self._arrivals, (arrival_s, shard, rank, action.message.kind))

    def _travel_s(self, event: Received) -> float:
        short = event.message.kind is Kind.SAMPLE
        return self._timed.communicate_s(0) if short else super()._travel_s(event)

    def _choose(self) -> PendingRequest | None:
        if not self._arrivals:
            return None
        arrival_s, shard, worker, kind = heapq.heappop(self._arrivals)
        self._timed.serves = kind
        return PendingRequest(shard, worker, kind, arrival_s)


class _Simulation:
    """One simulated training.

    Args:
        ranks: the algorithm and its ranks.
        costs: what was measured.
        steps: to count.
        seed: of the durations.
    """

    def __init__(self, ranks: Ranks, costs: Costs, steps: int, seed: int) -> None:
        start = FlatVector.of([np.zeros(_NUMBERS, np.float32) for _ in range(ranks.servers)])
        cell = VirtualRanks(ranks.algorithm, start, ranks.servers, ranks.workers)
        center = ranks.algorithm.optimizer_runs == "center" or ranks.algorithm.outer_optimizer
        self._ranks, self._steps = ranks, steps
        # Whole rounds of exchanges before the count, and in it.
        every: int = max(int(getattr(ranks.algorithm, "every", 1) or 1), 1)
        self._warm = every * max(math.ceil(steps / 5 / every), 1)
        self._counted = every * max(math.ceil(steps / every), 2)
        self._times: dict[int, list[float]] = {rank: [] for rank in cell.ranks}
        workers = cell.make_workers(None)
        self._schedule = _Timed(ranks, costs, seed)
        self._cluster = _TimedCluster(
            cell.make_servers(SGD(0.0) if center else None),
            {worker.rank: worker for worker in workers},
            {worker.rank: self._program(worker) for worker in workers},
            schedule=self._schedule,
        )

    def _program(self, worker: Worker) -> Activity:
        yield from worker.join()
        yield from worker.begin_epoch()
        for _ in range(self._warm + self._counted):
            yield Compute()
            yield from worker.step()
            self._times[worker.rank].append(self._cluster.elapsed_s(worker.rank))
        yield from worker.leave()

    def prediction(self) -> Forecast:
        """Run it."""
        self._cluster.run()
        # While all train: from the last one's first counted step to the first one's end.
        begin_s = max(times[self._warm - 1] for times in self._times.values())
        end_s = min(times[-1] for times in self._times.values())
        if end_s <= begin_s:  # one is so slow that the others end before it has warmed up
            begin_s, end_s = 0.0, min(times[-1] for times in self._times.values())
        size = self._ranks.group_size
        parts = list(_cut(begin_s, end_s, self._times))
        made = sum(count for count, _ in parts) * size
        seconds = end_s - begin_s
        whole_s = sum(times[-1] for times in self._times.values())
        computed_s = sum(self._schedule.computed_s.values())
        longest_s = max(times[-1] for times in self._times.values())
        served_s = self._schedule.served_total_s / self._ranks.servers
        return Forecast(
            ranks=self._ranks,
            batches_per_s=made / seconds if seconds else math.inf,
            efficiency=min(computed_s / whole_s, 1.0) if whole_s else 1.0,
            busy=min(served_s / longest_s, 1.0) if longest_s else 0.0,
            spread=_pace_range([each_s / (count * size) for count, each_s in parts if count]),
        )


def _cut(begin_s: float, end_s: float, times: Mapping[int, list[float]]) -> Iterator[tuple[float, float]]:
    """Yield the steps of each of five parts of a time, parts of a step included, and how long it is."""
    for number in range(5):
        first = begin_s + (end_s - begin_s) * number / 5
        last = begin_s + (end_s - begin_s) * (number + 1) / 5
        count = 0.0
        for ends in times.values():
            steps = np.arange(1, len(ends) + 1)
            count += float(np.interp(last, ends, steps) - np.interp(first, ends, steps))
        yield count, last - first


def _parts(values: list[float]) -> list[list[float]]:
    size = max(len(values) // 5, 1)
    return [values[first : first + size] for first in range(0, len(values), size)]


def _pace_range(seconds: list[float]) -> tuple[float, float]:
    """Return the lowest and the highest pace of some durations of a batch."""
    paces = [1 / one if one else math.inf for one in seconds]
    return (min(paces), max(paces)) if paces else (math.inf, math.inf)
