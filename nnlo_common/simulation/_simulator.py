"""Simulator: servers and workers as they are, in virtual time with measured costs; it guesses nothing.

The virtual cluster of `nnlo_common.testing` runs the machines of the protocol with the algorithm's own rules
on a few numbers, and time passes as it was measured. So everything that waits in a real training waits here:
for a busy server, for the slowest of a round, for a reply that a lag has not hidden.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._gain import sampled_places
from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.base._arguments import is_number, whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector
from nnlo_common.protocol import Action, Activity, Compute, Kind, Received, Send, Worker
from nnlo_common.testing._schedules import ByTime, PendingRequest
from nnlo_common.testing._training import VirtualRanks
from nnlo_common.testing._virtual import VirtualCluster

__all__ = [
    "Costs",
    "Draw",
    "Durations",
    "Forecast",
    "Ranks",
    "gain_of",
    "simulate",
]

# -- durations, as they were measured, and the costs of a training that are made of them ----------------

#: A function that draws a duration in seconds.
Draw: TypeAlias = Callable[[random.Random], float]

#: Bytes of a number in a message.
FLOAT32 = 4


class Durations:
    """How long something takes: measured seconds, of which one is drawn at random each time.

    Args:
        seconds: one number, or as many as were measured; or a function that draws one.

    Raises:
        ConfigurationError: there are none, or one is below 0 or not finite.

    Example:
        >>> measured = Durations([0.010, 0.010, 0.013])
        >>> round(measured.mean, 4), round(measured.quantile(1.0), 4)
        (0.011, 0.013)
        >>> measured.draw(random.Random(1)) in (0.010, 0.013)
        True
    """

    def __init__(self, seconds: float | Sequence[float] | Draw) -> None:
        self._drawn: Draw | None = None
        if callable(seconds):
            self._drawn, draws = seconds, random.Random(0)
            self._measured = [seconds(draws) for _ in range(1000)]  # for its mean and quantiles
        else:
            self._measured = [seconds] if is_number(seconds) else [*seconds]  # type: ignore[misc]
        wrong = [one for one in self._measured if not (is_number(one) and 0 <= one < math.inf)]
        if wrong or not self._measured:
            found = repr(wrong[0]) if wrong else "none"
            raise ConfigurationError(
                f"durations must be seconds, one or several finite numbers of at least 0; there is {found}"
            )
        self._measured.sort()

    def draw(self, random_numbers: random.Random) -> float:
        """Draw one."""
        if self._drawn is not None:
            return self._drawn(random_numbers)
        return random_numbers.choice(self._measured)

    @property
    def mean(self) -> float:
        """The mean, in seconds."""
        return sum(self._measured) / len(self._measured)

    def quantile(self, share: float) -> float:
        """Return the duration that this share of all does not exceed."""
        return self._measured[min(int(share * len(self._measured)), len(self._measured) - 1)]

    def __repr__(self) -> str:
        return f"Durations({len(self._measured)} with the mean {self.mean:.3g} s)"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """An algorithm, and the ranks that run it.

    Attributes:
        algorithm: with its options.
        workers: how many train; a group of ranks is one.
        servers: how many hold the centre, each an equal part of it; 0: none, all ranks are one group.
        group_size: the ranks of each worker.

    Example:
        >>> from nnlo_common import EASGD
        >>> Ranks.of(EASGD(every=10), 16, servers=2, group_size=7)
        Ranks(algorithm=EASGD(lag=0, ...), workers=2, servers=2, group_size=7)
    """

    algorithm: Algorithm
    workers: int = 1
    servers: int = 1
    group_size: int = 1

    def __post_init__(self) -> None:
        whole_number("workers", self.workers, 1)
        whole_number("servers", self.servers, 0)
        whole_number("group_size", self.group_size, 1)
        if not self.servers and self.workers > 1:
            raise ConfigurationError(
                f"servers=0 with workers={self.workers} is not possible: without a server all ranks are one "
                "group; use workers=1 and group_size for the ranks"
            )
        if self.servers:
            self.algorithm.check(self.workers, self.servers)

    @classmethod
    def of(
        cls, algorithm: Algorithm, ranks: int, *, servers: int = 1, group_size: int | None = None
    ) -> Ranks:
        """Return so many ranks, arranged as wrappers do it.

        Raises:
            ConfigurationError: they cannot be arranged like this.
        """
        if not servers:
            return cls(algorithm=algorithm, servers=0, group_size=ranks)
        size = group_size or 1
        workers, rest = divmod(ranks - servers, size)
        if workers < 1 or rest:
            raise ConfigurationError(
                f"{ranks} ranks with servers={servers} leave {ranks - servers} to train, which makes no "
                f"whole number of workers of {size}; use another number of ranks"
            )
        return cls(algorithm=algorithm, workers=workers, servers=servers, group_size=size)

    @property
    def training(self) -> int:
        """The ranks that compute gradients."""
        return self.workers * self.group_size

    @property
    def size(self) -> int:
        """All ranks."""
        return self.servers + self.training

    @property
    def alone(self) -> bool:
        """Whether one rank trains by itself."""
        return self.size == 1

    @property
    def collects(self) -> bool:
        """Whether each rank collects the gradient of each step in one vector."""
        return not self.alone and (self.group_size > 1 or self.algorithm.optimizer_runs != "worker")

    @property
    def together(self) -> int:
        """The batches whose gradients count as one step, as Steady's gain takes it.

        A gradient that is as stale as with more workers counts as if there were these (lag), and a
        contribution of several steps is the mean of their gradients (every). Algorithms whose workers step by
        themselves are taken as their number of ranks: the best that they can do.
        """
        if not self.servers or self.algorithm.optimizer_runs != "center":
            return self.training
        every: Any = getattr(self.algorithm, "every", 1)
        return int(self.training * max(every or 1, 1) * (self.algorithm.lag + 1))

    def __repr__(self) -> str:
        name = type(self.algorithm).__name__
        return (
            f"Ranks(algorithm={name}(lag={self.algorithm.lag}, ...), workers={self.workers}, "
            f"servers={self.servers}, group_size={self.group_size})"
        )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a training costs, as measured.

    A server does one thing at a time: it receives a contribution, steps its part of the centre, and replies;
    the time of a long message is that of the rank that receives it. A worker reads ahead, so that a batch
    takes the longer one of its step and its reading. Times are those of a rank that has a core to itself.

    Attributes:
        step: of a worker's batch: forward, backward, and its own optimizer.
        optimizer_s: seconds of the optimizer in that, which workers spare where the centre has one.
        wrapped_s: seconds of what wraps the optimizer, in each step of a rank that trains with others.
        collect_s: seconds until the gradient of a step is in one vector, for those who send gradients.
        parameters: the numbers of the model.
        commit: of a server for a contribution to the whole centre, without the messages.
        handle: of a worker for an exchange: making the contribution, and taking the reply; of a rank without
            a server: making its gradient one of all, beside their sum.
        commit_least_s, handle_least_s: of these two, what they take however short the vectors are: with
            several servers that comes for each.
        copied_s: of `commit`, what it takes to copy the centre for a reply: spared where each rank has a
            core, as workers of the server's host then read it where it lies.
        together_s: seconds of a rank's step with `Steady` without a server, in place of its optimizer's; 0:
            as long as that.
        read: of a batch; None: batches are there.
        latency_s: of a message without content.
        bytes_per_s: of a long message.
        wire_bytes: of a number on its way.
        reduce_s: seconds for so many ranks to add up their gradients; None: a ring of `bytes_per_s`.
        reduce_waits: how often so many ranks wait for each other in that; None: as in a ring.
        slow: how many times as long a worker takes, by its number from 0; others take 1.
        cores: that all ranks share, where they are on one host; None: each has one to itself.
        apart: batches are computed elsewhere than on cores, on a device of each rank.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> costs = Costs(step=0.05, parameters=1_000_000, commit=0.001)
        >>> costs.message_s(costs.parameters)  # 4 MB at 10 GB/s, after 20 us
        0.00042
    """

    step: Durations | float | Sequence[float]
    parameters: int
    optimizer_s: float = 0.0
    wrapped_s: float = 0.0
    collect_s: float = 0.0
    commit: Durations | float | Sequence[float] = 0.0
    handle: Durations | float | Sequence[float] = 0.0
    commit_least_s: float = 0.0
    handle_least_s: float = 0.0
    copied_s: float = 0.0
    together_s: float = 0.0
    read: Durations | float | Sequence[float] | None = None
    latency_s: float = 2e-5
    bytes_per_s: float = 1e10
    wire_bytes: int = FLOAT32
    reduce_s: Callable[[int], float] | None = None
    reduce_waits: Callable[[int], int] | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    cores: int | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        whole_number("parameters", self.parameters, 1)
        if self.cores is not None:
            whole_number("cores", self.cores, 1)
        whole_number("wire_bytes", self.wire_bytes, 1)
        for name in ("step", "commit", "handle", "read"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Durations):
                object.__setattr__(self, name, Durations(value))
        for name, value, least in (
            ("latency_s", self.latency_s, 0.0),
            ("optimizer_s", self.optimizer_s, 0.0),
            ("wrapped_s", self.wrapped_s, 0.0),
            ("collect_s", self.collect_s, 0.0),
            ("commit_least_s", self.commit_least_s, 0.0),
            ("handle_least_s", self.handle_least_s, 0.0),
            ("copied_s", self.copied_s, 0.0),
            ("together_s", self.together_s, 0.0),
            ("bytes_per_s", self.bytes_per_s, 1.0),
            *((f"slow[{worker}]", factor, 1e-9) for worker, factor in self.slow.items()),
        ):
            if not (is_number(value) and value >= least):
                raise ConfigurationError(
                    f"{name}={value!r} is not possible: use a number of at least {least}"
                )

    def batch_s(
        self, draws: random.Random, worker: int = 0, *, steps: bool = True, besides_s: float = 0.0
    ) -> float:
        """Draw how long a rank takes for a batch.

        Args:
            draws: random numbers.
            worker: its number.
            steps: whether its own optimizer steps.
            besides_s: what it takes besides, as it trains with others.
        """
        step, read = self._of("step"), self._of("read")
        drawn = step.draw(draws)
        own = drawn if steps else max(drawn - self.optimizer_s, 0.0)
        own = (own + besides_s) * self.slow.get(worker, 1.0)
        return own if self.read is None else max(own, read.draw(draws))

    def besides_s(self, ranks: Ranks) -> float:
        """Return what each step of a rank takes besides, as it trains with others."""
        return 0.0 if ranks.alone else self.wrapped_s + self.collect_s * ranks.collects

    @property
    def batch_mean_s(self) -> float:
        """The mean time of a batch, if no worker is slow."""
        read = self._of("read").mean if self.read is not None else 0.0
        return max(self._of("step").mean, read)

    @property
    def served_mean_s(self) -> float:
        """The mean time of one server for a contribution to the whole centre."""
        return self._of("commit").mean + self.parameters * self.wire_bytes / self.bytes_per_s

    def message_s(self, numbers: float) -> float:
        """Return how long a message with so many numbers takes."""
        return self.latency_s + numbers * self.wire_bytes / self.bytes_per_s

    def served_s(self, draws: random.Random, numbers: float, *, copies: bool = True) -> float:
        """Draw how long a server takes for a contribution of so many numbers, from when it comes."""
        spared_s = 0.0 if copies else self.copied_s * numbers / self.parameters
        seconds = self._share_s("commit", self.commit_least_s, draws, numbers)
        return self.received_s(numbers) + max(seconds - spared_s, 0.0)

    def handled_s(self, draws: random.Random, numbers: float) -> float:
        """Draw how long a worker takes for one of the two long messages of an exchange, when it is there."""
        return self._share_s("handle", self.handle_least_s, draws, numbers) / 2

    def received_s(self, numbers: float, *, streams: bool = False) -> float:
        """Return how long a rank takes to receive so many numbers.

        Args:
            numbers: their number.
            streams: they come while the server still makes the rest of them.
        """
        seconds = numbers * self.wire_bytes / self.bytes_per_s
        meanwhile_s = self._of("commit").mean * numbers / self.parameters if streams else 0.0
        return max(seconds - meanwhile_s, 0.0)

    def gathered_s(self, draws: random.Random) -> float:
        """Draw how long a rank without a server takes to make its gradient one of all, beside their sum."""
        return self._of("handle").draw(draws)

    def _share_s(self, name: str, least_s: float, draws: random.Random, numbers: float) -> float:
        """Draw what is taken for so many of all numbers."""
        drawn = self._of(name).draw(draws)
        return drawn - max(drawn - least_s, 0.0) * (1 - numbers / self.parameters)

    def reduced_s(self, ranks: int) -> float:
        """Return how long so many ranks take to add up their gradients."""
        if ranks < 2:
            return 0.0
        if self.reduce_s is not None:
            return self.reduce_s(ranks)
        return _turns(ranks) * self.message_s(self.parameters / ranks)

    def waits(self, ranks: int) -> int:
        """Return how often so many ranks wait for each other in a step: also before and after their sum."""
        if ranks < 2:
            return 0
        return _MEETINGS + (self.reduce_waits or _turns)(ranks)

    def _of(self, name: str) -> Durations:
        found = getattr(self, name)
        return found if isinstance(found, Durations) else Durations(0.0)


def _turns(ranks: int) -> int:
    """Return the messages of a rank in a ring."""
    return 2 * (ranks - 1)


# -- servers and workers as they are, in virtual time ---------------------------------------------------

# Numbers of a shard of the centre in the simulation.
_NUMBERS = 2
# Where ranks share cores, one that waits naps, so it sees a message so much later:
# cluster/transport/_backoff.py, with what the system takes to wake it. Before it naps it polls, which takes
# the core from others: cluster/transport/_mpi.py.
_NAP_S, _POLLED_S = 75e-6, 1e-4
# What the ranks of a group tell each other in a step, beside the sum.
_MEETINGS = 2
# How much longer a worker's part takes where all cores are busy, and shared: others have used its caches.
# Measured: 1.7 times the time of a core for a sum of four ranks with 48 on two cores.
_COLD = 0.7
# Ranks that share cores: repeat until times change by less than this, at most so often.
_ALIKE, _MOST_REPEATS = 0.01, 12


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
    shared = _SharedCores()
    found = _Simulation(ranks, costs, steps, seed, shared).prediction()
    if costs.cores is not None and _crowding(ranks.size, costs) > 1:
        for _ in range(_MOST_REPEATS):
            if not shared.share(costs.cores):
                break
            found = _Simulation(ranks, costs, steps, seed, shared).prediction()
    return found


def _in_step(ranks: Ranks, costs: Costs, steps: int, seed: int) -> Forecast:
    """Simulate ranks that make each step together, without a server."""
    draws = [random.Random(f"{seed} {member}") for member in range(ranks.training)]
    paces, computed_s = list[float](), 0.0
    added_s = costs.reduced_s(ranks.training) + _polled_s(ranks.training, costs) * costs.waits(ranks.training)
    stepped_s = costs.together_s if ranks.training > 1 and ranks.algorithm.steps_groups else 0.0
    besides_s = costs.besides_s(ranks)
    for _ in range(steps):
        batches_s = [
            costs.batch_s(own, member, steps=not stepped_s, besides_s=besides_s) + stepped_s
            for member, own in enumerate(draws)
        ]
        # As with a server, each makes its contribution and takes what comes of all, but after the others.
        handled_s = costs.gathered_s(draws[0]) if ranks.training > 1 else 0.0
        longest_s = max(batches_s) if costs.apart else _together_s(batches_s, costs)
        seconds = longest_s + (added_s + handled_s) * _crowding(ranks.training, costs)
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


def _crowding(working: int, costs: Costs) -> float:
    """Return how many times as long each of so many ranks takes that work at the same time."""
    return 1.0 if costs.cores is None else max(working / costs.cores, 1.0)


def _polled_s(working: int, costs: Costs) -> float:
    """Return how long each of so many ranks polls when it waits, and takes a core that others need."""
    return _POLLED_S if _crowding(working, costs) > 1 else 0.0


def _together_s(seconds: Sequence[float], costs: Costs) -> float:
    """Return how long it takes until all have done their work that begin together and share the cores."""
    passed_s, done_s = 0.0, 0.0
    for number, own_s in enumerate(sorted(seconds)):
        passed_s += (own_s - done_s) * _crowding(len(seconds) - number, costs)
        done_s = own_s
    return passed_s


class _SharedCores:
    """When ranks work, so that those that share cores hold up each other.

    Attributes:
        crowded: how many times as long workers, and servers, take as with a core to themselves.
        cold: how many times as long a worker's part in an exchange, or in a sum, takes of a core.
    """

    def __init__(self) -> None:
        self.crowded, self.cold = {"worker": 1.0, "server": 1.0}, 1.0
        self._spans: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def note(self, who: str, number: int, begin_s: float, seconds: float) -> None:
        """Take in that one of the workers, or servers, works for so long."""
        if seconds > 0:
            self._spans.setdefault((who, number), []).append((begin_s, begin_s + seconds))

    def share(self, cores: int) -> bool:
        """Find how much longer they take, from when they have worked; return whether that is news.

        A core's time is shared alike by those that work at the same time. Who takes longer meets more others,
        so the simulation is repeated until it finds what it was given.
        """
        found = {rank: np.array(sorted(spans)) for rank, spans in self._spans.items()}
        spans = np.concatenate([*found.values()])
        times = spans.ravel()
        order = np.argsort(times, kind="stable")
        times, working = times[order], np.cumsum(np.tile([1, -1], len(spans))[order])
        pace = np.minimum(1.0, cores / np.maximum(working, 1))
        got = np.concatenate([[0.0], np.cumsum(np.diff(times) * pace[:-1])])
        busy = np.minimum(working[:-1], cores) @ np.diff(times) / max(cores * (times[-1] - times[0]), 1e-12)
        shared = min(max(len(found) / cores - 1, 0), 1)
        before, self.cold = {**self.crowded, "cold": self.cold}, 1 + _COLD * float(busy) * shared
        for who in self.crowded:
            own = np.concatenate([np.zeros((0, 2)), *(one for rank, one in found.items() if rank[0] == who)])
            if len(own):
                done = np.interp(own[:, 1], times, got) - np.interp(own[:, 0], times, got)
                self.crowded[who] = float((own[:, 1] - own[:, 0]).sum() / done.sum())
        self._spans = {}
        found_now = {**self.crowded, "cold": self.cold}
        return any(abs(found_now[name] - before[name]) > _ALIKE * before[name] for name in before)


class _Timed(ByTime):
    """First come, first served, with measured durations."""

    def __init__(self, ranks: Ranks, costs: Costs, seed: int, shared: _SharedCores) -> None:
        super().__init__(seed)
        self._ranks, self._costs, self._shared = ranks, costs, shared
        # Each rank has numbers of its own, so that layouts are compared with the same durations.
        self._of_members = [random.Random(f"{seed} {member}") for member in range(ranks.training)]
        self._of_servers = random.Random(seed)
        # A message of the simulation stands for one of so many numbers.
        self._numbers = costs.parameters / (_NUMBERS * FLOAT32 * ranks.servers)
        self._polled_s = _polled_s(ranks.size, costs)
        self._nap_s = _NAP_S if self._polled_s else 0.0
        self.clock_s: Mapping[int, float] = {}
        self.computed_s: dict[int, float] = {}
        self.served_total_s = 0.0
        self.serves, self.server, self.serves_from_s = Kind.JOIN, 0, 0.0  # the request in hand
        self.lends = False  # whether replies are the centre
        self.receives, self.streams = False, False  # whether it is a reply; whether it comes as it is made

    def compute_s(self, rank: int) -> float:
        """Draw the time of one gradient: of the slowest rank of a group, with the sum of all."""
        members = self._members_of(rank)
        steps = self._ranks.algorithm.optimizer_runs != "center"
        besides_s = self._costs.besides_s(self._ranks)
        alone = [
            self._costs.batch_s(self._of_members[member], member, steps=steps, besides_s=besides_s)
            for member in members
        ]
        self.computed_s[rank] = self.computed_s.get(rank, 0.0) + sum(alone) / len(alone)
        crowded, begin_s = self._shared.crowded["worker"], self.clock_s[rank]
        taken = alone if self._costs.apart else [crowded * seconds for seconds in alone]
        size = self._ranks.group_size
        added_s = (
            crowded
            * self._shared.cold
            * (self._costs.reduced_s(size) + self._polled_s * self._costs.waits(size))
        )
        for member, seconds in zip(members, taken, strict=True):
            self._shared.note("worker", member, begin_s, 0.0 if self._costs.apart else seconds)
            self._shared.note("worker", member, begin_s + max(taken), added_s)
        return max(taken) + added_s

    def communicate_s(self, size: int) -> float:
        """Return the time of a message between a server's and a worker's hands."""
        behind = self.receives and self._ranks.algorithm.lag  # what a worker waits for it receives itself
        received_s = self._costs.received_s(self._numbers_of(size)) if behind else 0.0
        return self._costs.latency_s + self._nap_s + received_s

    def handle_s(self, rank: int, size: int) -> float:
        """Draw the time of a worker for one of the two long messages of an exchange."""
        if not size:
            return 0.0
        numbers = self._numbers_of(size)
        seconds = self._costs.handled_s(self._of_servers, numbers)
        if self.receives:
            seconds += self._polled_s
        if self.receives and not self._ranks.algorithm.lag:  # else a thread does it beside the batches
            seconds += self._costs.received_s(numbers, streams=self.streams and not self._polled_s)
        seconds *= self._shared.crowded["worker"] * self._shared.cold
        self._shared.note("worker", self._members_of(rank)[0], self.clock_s[rank], seconds)
        return seconds

    def serve_s(self, size: int) -> float:
        """Draw the time of a contribution, with its reply."""
        if self.serves is Kind.SAMPLE:  # a hundredth of the gradient, which is only kept
            sampled = sampled_places(self._costs.parameters).size
            seconds = sampled * self._costs.wire_bytes / self._costs.bytes_per_s
        else:
            numbers = self._numbers_of(size)
            copies = not self.lends or self._polled_s > 0
            seconds = self._costs.served_s(self._of_servers, numbers, copies=copies) if size else 0.0
            seconds += self._polled_s if size else 0.0
        seconds *= self._shared.crowded["server"]
        self._shared.note("server", self.server, self.serves_from_s, seconds)
        self.served_total_s += seconds
        return seconds

    def _members_of(self, rank: int) -> range:
        """Return the ranks of a worker among all that train, its lead first."""
        first = (rank - self._ranks.servers) * self._ranks.group_size
        return range(first, first + self._ranks.group_size)

    def _numbers_of(self, size: int) -> float:
        """Return the numbers of a message: a whole shard, whatever comes with it in the simulation."""
        return min(size, _NUMBERS * FLOAT32) * self._numbers


class _TimedCluster(VirtualCluster):
    """A virtual cluster that finds the request that arrived first without a look at all others."""

    def __init__(self, *args: Any, schedule: _Timed, **options: Any) -> None:
        self._arrivals: list[tuple[float, int, int, Kind]] = []
        self._timed = schedule
        super().__init__(*args, schedule=schedule, **options)
        schedule.clock_s = self._clock_s

    def _perform_worker(self, rank: int, actions: Sequence[Action]) -> None:
        self._timed.receives = False
        super()._perform_worker(rank, actions)
        for action in actions:
            if isinstance(action, Send):
                shard = action.message.shard
                arrival_s = self._channels[shard, rank][-1][0]
                heapq.heappush(self._arrivals, (arrival_s, shard, rank, action.message.kind))

    def _work_on(self, rank: int, event: Received) -> None:
        if event.message.kind is not Kind.SAMPLE:
            super()._work_on(rank, event)

    def _deliver(self, shard: int, reply: Send) -> None:
        self._timed.receives, self._timed.streams = True, reply.fill is not None
        super()._deliver(shard, reply)

    def _choose(self) -> PendingRequest | None:
        if not self._arrivals:
            return None
        arrival_s, shard, worker, kind = heapq.heappop(self._arrivals)
        self._timed.serves, self._timed.server = kind, shard
        self._timed.serves_from_s = max(arrival_s, self._free_s[shard])
        return PendingRequest(shard, worker, kind, arrival_s)


class _Simulation:
    """One simulated training.

    Args:
        ranks: the algorithm and its ranks.
        costs: what was measured.
        steps: to count.
        seed: of the durations.
        shared: the cores, and how much longer ranks take beside each other.
    """

    def __init__(self, ranks: Ranks, costs: Costs, steps: int, seed: int, shared: _SharedCores) -> None:
        start = FlatVector.of([np.zeros(_NUMBERS, np.float32) for _ in range(ranks.servers)])
        cell = VirtualRanks(ranks.algorithm, start, ranks.servers, ranks.workers)
        center = ranks.algorithm.optimizer_runs == "center" or ranks.algorithm.outer_optimizer
        self._ranks, self._steps = ranks, steps
        # Whole rounds of exchanges before the count, and in it.
        every: int = max(int(getattr(ranks.algorithm, "every", 1) or 1), 1)
        self._warm = every * max(math.ceil(steps / 5 / every), 1)
        self._counted = every * max(math.ceil(steps / every), 2)
        self._times: dict[int, list[float]] = {rank: [] for rank in cell.ranks}
        workers, servers = cell.make_workers(None), cell.make_servers(SGD(0.0) if center else None)
        for server in servers:
            server.by_parts = True  # as in a training
        self._schedule = _Timed(ranks, costs, seed, shared)
        self._schedule.lends = all(server.rule.replies_center for server in servers)
        self._cluster = _TimedCluster(
            servers,
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
            steps, at_s = np.arange(len(ends) + 1), [0.0, *ends]
            count += float(np.interp(last, at_s, steps) - np.interp(first, at_s, steps))
        yield count, last - first


def _parts(values: list[float]) -> list[list[float]]:
    size = max(len(values) // 5, 1)
    return [values[first : first + size] for first in range(0, len(values), size)]


def _pace_range(seconds: list[float]) -> tuple[float, float]:
    """Return the lowest and the highest pace of some durations of a batch."""
    paces = [1 / one if one else math.inf for one in seconds]
    return (min(paces), max(paces)) if paces else (math.inf, math.inf)
