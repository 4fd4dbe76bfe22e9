"""Durations, as they were measured, and the costs of a training that are made of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nnlo_common.algorithms import Algorithm
from nnlo_common.base._arguments import is_number, whole_number
from nnlo_common.base._errors import ConfigurationError

__all__ = ["Costs", "Draw", "Durations", "Ranks"]

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

    A server does one thing at a time: it receives a contribution, steps its part of the centre, and replies.
    A worker reads ahead, so that a batch takes the longer one of its step and its reading.

    Attributes:
        step: of a worker's batch: forward, backward, and its own optimizer.
        parameters: the numbers of the model.
        commit: of a server for a contribution to the whole centre, without the messages.
        handle: of a worker for an exchange: making the contribution, and taking the reply.
        read: of a batch; None: batches are there.
        latency_s: of a message without content.
        bytes_per_s: of a long message.
        wire_bytes: of a number on its way.
        reduce_s: seconds for so many ranks to add up their gradients; None: a ring of `bytes_per_s`.
        slow: how many times as long a worker takes, by its number from 0; others take 1.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> costs = Costs(step=0.05, parameters=1_000_000, commit=0.001)
        >>> costs.message_s(costs.parameters)  # 4 MB at 10 GB/s, after 20 us
        0.00042
    """

    step: Durations | float | Sequence[float]
    parameters: int
    commit: Durations | float | Sequence[float] = 0.0
    handle: Durations | float | Sequence[float] = 0.0
    read: Durations | float | Sequence[float] | None = None
    latency_s: float = 2e-5
    bytes_per_s: float = 1e10
    wire_bytes: int = FLOAT32
    reduce_s: Callable[[int], float] | None = None
    slow: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole_number("parameters", self.parameters, 1)
        whole_number("wire_bytes", self.wire_bytes, 1)
        for name in ("step", "commit", "handle", "read"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Durations):
                object.__setattr__(self, name, Durations(value))
        for name, value, least in (
            ("latency_s", self.latency_s, 0.0),
            ("bytes_per_s", self.bytes_per_s, 1.0),
            *((f"slow[{worker}]", factor, 1e-9) for worker, factor in self.slow.items()),
        ):
            if not (is_number(value) and value >= least):
                raise ConfigurationError(
                    f"{name}={value!r} is not possible: use a number of at least {least}"
                )

    def batch_s(self, draws: random.Random, worker: int = 0) -> float:
        """Draw how long a rank takes for a batch."""
        step, read = self._of("step"), self._of("read")
        own = step.draw(draws) * self.slow.get(worker, 1.0)
        return own if self.read is None else max(own, read.draw(draws))

    @property
    def batch_mean_s(self) -> float:
        """The mean time of a batch, if no worker is slow."""
        read = self._of("read").mean if self.read is not None else 0.0
        return max(self._of("step").mean, read)

    @property
    def served_mean_s(self) -> float:
        """The mean time of one server for a contribution to the whole centre."""
        return self._of("commit").mean + 2 * self.parameters * self.wire_bytes / self.bytes_per_s

    def message_s(self, numbers: float) -> float:
        """Return how long a message with so many numbers takes."""
        return self.latency_s + numbers * self.wire_bytes / self.bytes_per_s

    def served_s(self, draws: random.Random, numbers: float) -> float:
        """Draw how long a server takes for a contribution of so many numbers, with both messages."""
        share = numbers / self.parameters
        return self._of("commit").draw(draws) * share + 2 * numbers * self.wire_bytes / self.bytes_per_s

    def handled_s(self, draws: random.Random) -> float:
        """Draw how long a worker takes for an exchange."""
        return self._of("handle").draw(draws)

    def reduced_s(self, ranks: int) -> float:
        """Return how long so many ranks take to add up their gradients."""
        if ranks < 2:
            return 0.0
        if self.reduce_s is not None:
            return self.reduce_s(ranks)
        turns = 2 * (ranks - 1)
        return turns * self.message_s(self.parameters / ranks)

    def _of(self, name: str) -> Durations:
        found = getattr(self, name)
        return found if isinstance(found, Durations) else Durations(0.0)
