"""A simulated worker and what all algorithms have in common; see `simulation`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.equations.network import Array
from tests.equations.optimizers import Optimizer
from tests.equations.wires import Wire

__all__ = ["Algorithm", "Committed", "Life", "Request", "Worker", "passed"]


@dataclass(eq=False)
class Request:
    """What a worker asks of the centre.

    Attributes:
        kind: EXCHANGE, PUSH, PULL, LOCK or EPOCH.
        payload: the vector that travels; of a LOCK the function that makes the update of the centre.
        sender: the worker.
        weight: its share in a mean.
        pulled_at: the commits that the centre had made when the worker took it last.
        sent: the worker's parameters when it asked.
        answered: whether the reply has come.
        reply: what it holds, if anything.
        clock: the commits of the centre with it.
    """

    kind: str
    payload: Any = None
    sender: int = -1
    weight: float = 1.0
    pulled_at: int = 0
    sent: Array | None = None
    answered: bool = False
    reply: Array | None = None
    clock: int = 0

    def answer(self, reply: Array | None, clock: int) -> None:
        self.answered, self.clock = True, clock
        self.reply = None if reply is None else reply.copy()


@dataclass(eq=False)
class Worker:
    """A worker: its parameters x and whatever its algorithm keeps in `own`.

    Attributes:
        steps: gradients since the training began.
        in_epoch: gradients since the epoch began.
        samples: in the gradients since the last contribution.
        before: x when the execution (of one or several steps) began.
        open: requests whose reply is not absorbed.
        seen: where each gradient was taken.
        after: the weights after each execution.
        ends: how many steps were done then.
    """

    number: int
    x: Array
    steps: int = 0
    in_epoch: int = 0
    samples: int = 0
    pulled_at: int = 0
    epochs: int = 0
    before: Array = field(default_factory=lambda: np.zeros(0))
    open: list[Request] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    seen: list[Array] = field(default_factory=list)
    after: list[Array] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


Committed = tuple[Array, list[Array]]  # the new centre, and the reply to each request
Life = Iterator[Request | None]  # a request that is to be sent next; None: it waits for a reply


def passed(before: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return now // every > before // every


class Algorithm:
    """What is common to all: replies are absorbed `lag` requests late, in order.

    Args:
        optimizer: makes the user's optimizer.
        workers: how many there are.
        lag: exchanges that may be under way while the worker goes on (Kurth et al. 2018, arXiv:1810.01993).
    """

    waits = False  # a commit waits for others; then one of an earlier epoch comes first
    refreshes = False  # each epoch begins at the centre that the last one has ended with
    oldest: int | None = None  # staler contributions are dropped

    def __init__(self, optimizer: Callable[[], Optimizer], workers: int, *, lag: int = 0) -> None:
        self.optimizer, self.workers, self.lag = optimizer, workers, lag
        self.wire: Wire | None = None  # all numbers travel as they are
        self.stepped = optimizer()  # at the centre

    # The worker.

    def start(self, w: Worker) -> None:
        """Begin at the centre, where x is already."""

    def point(self, w: Worker) -> Array:
        """Where the next gradient is taken, which is what the model holds between steps."""
        return w.x

    def move(self, w: Worker, g: Array) -> None:
        """Make a step with a gradient."""
        raise NotImplementedError

    def exchange(self, w: Worker, done: int) -> Life:
        """Exchange after an execution of `done` steps, if that is due."""
        raise NotImplementedError

    def end_epoch(self, w: Worker) -> Life:
        """Do what is left to do in an epoch."""
        yield from ()

    def end_training(self, w: Worker) -> Life:
        """Do what is left to do after the last epoch, if any worker has steps that it has not contributed."""
        yield from ()

    def ask(self, w: Worker, kind: str, payload: Any = None) -> Life:
        """Send a request; absorb what has to be absorbed by then."""
        request = Request(kind, payload, w.number, pulled_at=w.pulled_at, sent=w.x.copy())
        if payload is not None:
            request.weight, w.samples = w.samples, 0
            if self.wire is not None:
                request.payload = self.wire.up(w.number, payload)
        w.open.append(request)
        yield request
        while len(w.open) > self.lag:
            yield from self.settle(w)

    def settle(self, w: Worker) -> Life:
        """Absorb the oldest reply."""
        while not w.open[0].answered:
            yield None
        first = w.open.pop(0)
        if first.reply is not None:
            self.absorb(w, first, first.reply)
            w.pulled_at = first.clock

    def absorb(self, w: Worker, request: Request, reply: Array) -> None:
        """x <- c."""
        w.x = reply.copy()

    # The centre.

    def quorum(self, behind: int) -> int:
        """How many contributions make a commit when `behind` workers are in the earliest epoch."""
        return 1

    def capacity(self, clock: int) -> int:
        """How many workers may train."""
        return self.workers

    def commit(self, c: Array, requests: Sequence[Request], absent: int, clock: int) -> Committed:
        """The new centre, and the reply to each request."""
        raise NotImplementedError
