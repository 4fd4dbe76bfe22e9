"""Rehearsal: exchanges at full size in one process, timed: what they take a worker and a server.

The machines of the protocol run as in a training, with the algorithm's own rules on vectors of the model's
size. Only the way of the messages is left out: that is the link's, and measured by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._rule import GroupRule
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._arguments import whole_number
from nnlo_common.base._flat_vector import FlatVector
from nnlo_common.protocol import Action, Activity, Compute, Message, Received, Send, Worker
from nnlo_common.testing._schedules import PendingRequest
from nnlo_common.testing._training import VirtualRanks
from nnlo_common.testing._virtual import VirtualCluster, bytes_of

__all__ = ["ExchangeTimes", "rehearse"]

# With one worker some algorithms do less: nobody else has moved the centre.
_WORKERS = 2
_TIMED = _WORKERS  # the last one: when it has warmed up, so have the others
# Exchanges that find their memory, and that are counted.
_WARM, _COUNTED = 2, 4
# Numbers that fill the caches of a core, as a model's step does between two exchanges.
_BETWEEN = 1 << 21
# Vectors of more numbers fit no cache, so that times grow with the size: a tenth of a second an exchange.
_LARGEST = 4_000_000

_Owner: TypeAlias = Literal["worker", "server", "none"]


class ExchangeTimes(NamedTuple):
    """What an exchange takes, without its messages.

    Attributes:
        served_s: seconds of a server for a contribution to the whole centre, and for its reply.
        handled_s: seconds of a worker: from the gradient to the message, from the reply to the parameters.
        together_s: seconds of each rank's step where all make it together, without a server; 0: that of the
            script's optimizer.
        served_least_s, handled_least_s: of the first two, what it takes however small the model is: with
            several servers that comes for each.

    Example:
        >>> ExchangeTimes(served_s=0.002, handled_s=0.003).served_s
        0.002
    """

    served_s: float
    handled_s: float
    together_s: float = 0.0
    served_least_s: float = 0.0
    handled_least_s: float = 0.0


def rehearse(
    algorithm: Algorithm, parameters: int, *, optimizer: VectorOptimizer | None = None
) -> ExchangeTimes:
    """Time a server's and a worker's part in the exchanges of an algorithm, in this process.

    Args:
        algorithm: with its options.
        parameters: the numbers of the model. More than four million are timed as so many, and reckoned up.
        optimizer: a core optimizer, not stepped yet; for algorithms that step the centre with it.

    Raises:
        ConfigurationError: the algorithm needs an optimizer.

    Example:
        >>> from nnlo_common import EASGD
        >>> times = rehearse(EASGD(every=10), 100_000)
        >>> 0 < times.served_s < 1 and 0 < times.handled_s < 1
        True
    """
    size = min(whole_number("parameters", parameters, 1), _LARGEST)
    times = _rehearsed(algorithm, size, optimizer)
    least = _rehearsed(algorithm, 1, optimizer)
    together = algorithm.group(size, deepcopy(optimizer))
    together_s = 0.0 if together is None else _steps_together_s(together, size)
    served_s, handled_s, together_s = (
        one * parameters / size for one in (times.served_s, times.handled_s, together_s)
    )
    return ExchangeTimes(
        served_s, handled_s, together_s, min(least.served_s, served_s), min(least.handled_s, handled_s)
    )


def _rehearsed(algorithm: Algorithm, size: int, optimizer: VectorOptimizer | None) -> ExchangeTimes:
    """Return what exchanges of this size take."""
    cluster = _Rehearsal(algorithm, size, deepcopy(optimizer))
    cluster.run()
    return cluster.times


def _steps_together_s(rule: GroupRule, size: int) -> float:
    """Return how long a rank takes to step with the mean gradient of all."""
    x, gradient = np.zeros((2, size), np.float32)
    taken = []
    for _ in range(_WARM + _COUNTED):
        gradient.fill(1e-3)
        begin_s = perf_counter()
        rule.step(x, gradient, [1.0] * _WORKERS, 1.0)
        taken.append(perf_counter() - begin_s)
    return median(taken[_WARM:])


class _Stopwatch:
    """The time of each of several owners, of whom one at a time works."""

    def __init__(self) -> None:
        self.seconds: dict[_Owner, float] = dict.fromkeys(("worker", "server", "none"), 0.0)
        self.owner: _Owner = "none"
        self._since_s = perf_counter()

    def hand_to(self, owner: _Owner) -> None:
        """Let time pass for this owner from now on."""
        now_s = perf_counter()
        self.seconds[self.owner] += now_s - self._since_s
        self.owner, self._since_s = owner, now_s

    @contextmanager
    def of(self, owner: _Owner) -> Iterator[None]:
        """Let time pass for this owner in the block."""
        before = self.owner
        self.hand_to(owner)
        try:
            yield
        finally:
            self.hand_to(before)


class _Rehearsal(VirtualCluster):
    """A virtual cluster of a server and two workers that notes whose time passes.

    Attributes:
        times: what was measured, once it has run.
    """

    def __init__(self, algorithm: Algorithm, size: int, optimizer: VectorOptimizer | None) -> None:
        ranks = VirtualRanks(algorithm, FlatVector.of([np.zeros(size, np.float32)]), 1, _WORKERS)
        steps = optimizer if algorithm.optimizer_runs == "center" or algorithm.outer_optimizer else None
        every: int = max(int(getattr(algorithm, "every", 1) or 1), 1)
        self._warm, self._steps = _WARM * every, (_WARM + _COUNTED) * every
        self._gradients = np.random.default_rng(0).standard_normal(size, np.float32)
        self._between = np.zeros(_BETWEEN, np.float32)
        self._watch, self._served, self.times = _Stopwatch(), 0, ExchangeTimes(0.0, 0.0)
        workers = {one.rank: one for one in ranks.make_workers(None)}
        programs = {rank: self._program(one) for rank, one in workers.items()}
        super().__init__(ranks.make_servers(steps), workers, programs)

    def _program(self, worker: Worker) -> Activity:
        yield from worker.join()
        yield from worker.begin_epoch()
        for step in range(self._steps):
            if step == self._warm and worker.rank == _TIMED:
                self._watch.seconds = dict.fromkeys(self._watch.seconds, 0.0)
                self._served = 0
            yield Compute()
            with self._watch.of("none"):
                self._between.fill(step)
                np.multiply(self._gradients, np.float32(1e-3), out=worker.gradient.vector)
            yield from worker.step()
        if worker.rank == _TIMED:
            self._watch.hand_to("worker")  # until now
            seconds = self._watch.seconds
            self.times = ExchangeTimes(seconds["server"] / max(self._served, 1), seconds["worker"] / _COUNTED)
        yield from worker.leave()

    def _advance(self, rank: int) -> None:
        with self._watch.of(_owner(rank)):
            super()._advance(rank)

    def _serve(self, chosen: PendingRequest) -> None:
        _, event = self._channels[chosen.shard, chosen.worker][0]
        self._served += bool(bytes_of(event.message))
        with self._watch.of("server"):
            super()._serve(chosen)

    def _deliver(self, shard: int, reply: Send) -> None:
        with self._watch.of("server"):  # who still fills the reply; the worker takes it after that
            super()._deliver(shard, reply)

    def _work_on(self, rank: int, event: Received) -> None:
        self._watch.hand_to(_owner(rank))
        super()._work_on(rank, event)

    def _perform_worker(self, rank: int, actions: Sequence[Action]) -> None:
        with self._watch.of(_owner(rank)):
            super()._perform_worker(rank, actions)

    def _carried(self, message: Message) -> Any:
        with self._watch.of("none"):
            return super()._carried(message)


def _owner(rank: int) -> _Owner:
    return "worker" if rank == _TIMED else "none"
