"""The simulated cluster: workers and a centre that go through the messages of a training in a given order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.equations.network import Array, Batch, gradient, initial
from tests.equations.parts import Algorithm, Life, Request, Worker

__all__ = ["OrderError", "Replay"]


class OrderError(AssertionError):
    """A worker has sent something that the algorithm does not send there."""


class Centre:
    """The centre c and those who wait for it.

    Attributes:
        c: the parameters.
        commits: c after each commit.
        epochs: c at the moment when all workers had ended an epoch.
    """

    def __init__(self, algorithm: Algorithm, workers: Sequence[Worker]) -> None:
        self.algorithm, self.workers = algorithm, workers
        self.c: Array = initial().astype(np.float64)
        self.clock = 0
        self.commits: list[Array] = []
        self.epochs: list[Array] = []
        self.left: set[int] = set()
        self._waiting: list[Request] = []

    def take(self, request: Request) -> None:
        """Take the next message."""
        match request.kind:
            case "EPOCH":
                self.workers[request.sender].epochs += 1
                request.answer(None, self.clock)
                self._commit()
                while all(w.epochs > len(self.epochs) for w in self.workers):
                    self.epochs.append(self.c)
            case "PULL":
                self._tell(request, self.c)
            case _:
                self._waiting.append(request)
                self._commit()

    def leave(self, worker: int) -> None:
        """Wait for a worker no more."""
        self.left.add(worker)
        self._commit()

    def _commit(self) -> None:
        while self._waiting:
            for request in [one for one in self._waiting if self._late(one)]:
                self._waiting.remove(request)
                self._tell(request, self.c)
            earliest = min((w.epochs for w in self.workers if w.number not in self.left), default=0)
            behind = [w.number for w in self.workers if w.number not in self.left and w.epochs == earliest]
            heads: dict[int, Request] = {}
            for request in self._waiting:
                if request.sender in behind or not self.algorithm.waits:
                    heads.setdefault(request.sender, request)
            needed = self.algorithm.quorum(len(behind))
            if not heads or len(heads) < needed:
                return
            chosen = sorted(list(heads.values())[:needed], key=lambda request: request.sender)
            absent = sum(w.epochs > earliest for w in self.workers)
            self._waiting = [request for request in self._waiting if request not in chosen]
            self.c, replies = self.algorithm.commit(self.c, chosen, absent, self.clock)
            self.clock += 1
            self.commits.append(self.c)
            self._reply(chosen, replies)

    def _late(self, request: Request) -> bool:
        oldest = self.algorithm.oldest
        return oldest is not None and self.clock - request.pulled_at > oldest

    def _reply(self, chosen: Sequence[Request], replies: Sequence[Array]) -> None:
        for request, reply in zip(chosen, replies, strict=True):
            self._tell(request, None if request.kind == "PUSH" else reply)

    def _tell(self, request: Request, reply: Array | None) -> None:
        wire = self.algorithm.wire
        if wire is not None and reply is not None:
            reply = wire.down(request.sender, reply)
        request.answer(reply, self.clock)


class Replay:
    """Runs an algorithm with the messages of the workers in the order that is given.

    Attributes:
        workers: with what their gradients saw, and what they were after each execution.
        centre: with all commits.

    Args:
        algorithm: what is simulated.
        data: the batches of an epoch, for each worker.
        epochs: how many.
        together: batches in an execution (Keras's steps_per_execution).
        weights: of the workers in a mean, in place of their samples.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: Sequence[Sequence[Batch]],
        *,
        epochs: int,
        together: int = 1,
        weights: Sequence[float] = (),
    ) -> None:
        self._algorithm, self._data, self._epochs, self._together = algorithm, data, epochs, together
        self._weights = weights
        self._left: bool | None = None  # whether any worker has steps in the end that it has not contributed
        self.workers = [Worker(number, initial().astype(np.float64)) for number in range(len(data))]
        self.centre = Centre(algorithm, self.workers)
        self._lives = [self._life(w) for w in self.workers]
        self._next: list[Request | None] = [None for _ in self.workers]
        self._over = [False for _ in self.workers]
        self._go_on()

    def run(self, order: Sequence[tuple[int, str]]) -> None:
        """Go through the messages.

        Raises:
            OrderError: the algorithm sends something else there, or more, or less.
        """
        for number, (worker, kind) in enumerate(order):
            due = self._next[worker]
            where = f"message {number}, from worker {worker} after its step {self.workers[worker].steps}"
            if due is None or due.kind != kind:
                expected = "no message" if due is None else due.kind
                raise OrderError(f"{where}: {expected} was expected, and {kind} has come")
            self._next[worker] = None
            if self._weights:
                due.weight = self._weights[worker]
            self.centre.take(due)
            self._go_on()
        missing = {w: request.kind for w, request in enumerate(self._next) if request is not None}
        if missing or not all(self._over):
            raise OrderError(f"the training was over before these messages by worker: {missing}")

    def _go_on(self) -> None:
        """Let every worker compute until it wants to send something or waits for a reply."""
        moved = True
        while moved:
            moved = False
            for number, life in enumerate(self._lives):
                if self._next[number] is None and not self._over[number]:
                    steps = self.workers[number].steps
                    try:
                        self._next[number] = next(life)
                    except StopIteration:
                        self._over[number] = True
                        self.centre.leave(number)
                    moved |= self._over[number] or self._next[number] is not None
                    moved |= self.workers[number].steps != steps

    def _life(self, w: Worker) -> Life:
        while self._algorithm.capacity(self.centre.clock) <= w.number:
            yield None
        w.x, w.pulled_at = self.centre.c.copy(), self.centre.clock
        if self._algorithm.wire is not None:
            self._algorithm.wire.begin(w.number, self.centre.c)
        self._algorithm.start(w)
        for epoch in range(self._epochs):
            if epoch and self._algorithm.refreshes:
                w.open.clear()
                while min(other.epochs for other in self.workers) < epoch:
                    yield None
                w.x, w.pulled_at = self.centre.c.copy(), self.centre.clock
            yield from self._epoch(w)
        while min(other.epochs for other in self.workers) < self._epochs:
            yield None
        if self._left is None:
            self._left = any(other.samples for other in self.workers)
        if self._left:
            yield from self._algorithm.end_training(w)

    def _epoch(self, w: Worker) -> Life:
        w.in_epoch = 0
        batches = self._data[w.number]
        for start in range(0, len(batches), self._together):
            execution = batches[start : start + self._together]
            w.before = w.x.copy()
            for batch in execution:
                point = self._algorithm.point(w)
                w.seen.append(point)
                w.steps += 1
                w.in_epoch += 1
                w.samples += len(batch)
                self._algorithm.move(w, gradient(point, batch))
            yield from self._algorithm.exchange(w, len(execution))
            w.after.append(self._algorithm.point(w))
            w.ends.append(w.steps)
        yield from self._algorithm.end_epoch(w)
        while not all(request.answered for request in w.open):
            yield None
        yield Request("EPOCH", sender=w.number)
