"""Replies that are worked out while they travel: the same bits as replies that are worked out first."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from nnlo_common import EASGD, Downpour, DynSGD, FlatVector, Frame, LocalSGD
from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._optimizers import SGD, Adam, RMSprop
from nnlo_common.protocol import Kind, Message, Received, Send, Server, Shard, Worker, decode, encode

F4, SIZE = np.float32, 70_007  # more than two blocks, and no multiple of one


class Foreign:
    """An optimizer that steps all at once, as those of the frameworks do."""

    learning_rate = 0.1

    def step(self, x: Any, gradient: Any) -> None:
        x -= F4(0.1) * gradient * np.abs(x)


CASES = {
    "EASGD": (EASGD(every=1, alpha=0.3), None),
    "SGD": (Downpour(), SGD(0.1, weight_decay=0.01)),
    "momentum": (Downpour(), SGD(0.1, momentum=0.9, nesterov=True)),
    "Adam": (Downpour(), Adam(0.1)),
    "foreign": (Downpour(), Foreign()),
    "DynSGD": (DynSGD(), RMSprop(0.1)),
}


class Pair:
    """A server and two workers, message by message."""

    def __init__(self, algorithm: Algorithm, optimizer: Any, *, in_parts: bool) -> None:
        start = np.random.default_rng(7).normal(size=SIZE).astype(F4)
        self.server = Server(algorithm.center(start, 2, copy.deepcopy(optimizer)), [1, 2])
        self.server.in_parts = in_parts
        self.workers = {}
        for rank in (1, 2):
            x, g = FlatVector.of([start * 0]), FlatVector.of([start * rank])
            shard = Shard(0, 0, slice(0, SIZE))
            self.workers[rank] = Worker(rank, algorithm, x, g, [shard], workers=2)

    def ask(self, rank: int, activity: Any) -> Send:
        """Let the server handle a worker's request, and return its reply."""
        request = next(activity).message
        frame = Frame(SIZE)
        if request.vector is not None:
            np.copyto(frame.vector, request.vector)
        (reply,) = self.server.handle(Received(decode(frame, encode(request, frame)), frame))
        assert reply.rank == rank
        return reply

    def join(self) -> None:
        for rank, worker in self.workers.items():
            activity = worker.join()
            reply = self.ask(rank, activity)
            worker.deliver(Received(reply.message, reply.frame))
            list(activity)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_a_reply_that_was_worked_out_first(name: str) -> None:
    plain, parted = (Pair(*CASES[name], in_parts=one) for one in (False, True))
    for pair in (plain, parted):
        pair.join()
    for turn in range(7):
        rank = (1, 2, 2, 1, 1, 2, 1)[turn]
        activities = [pair.workers[rank].step() for pair in (plain, parted)]
        expected, reply = (pair.ask(rank, one) for pair, one in zip((plain, parted), activities, strict=True))
        assert expected.parts is None
        assert expected.message[:10] == reply.message[:10]  # all but the vector
        ready = 0
        for numbers in reply.parts:
            assert numbers > ready
            ready = numbers  # the transport may send these now, so they are final
            assert np.array_equal(reply.message.vector[:ready], expected.message.vector[:ready])
        assert ready == SIZE
        cuts = [0, 11, 11, 32_769, SIZE]  # an empty part, too
        parts = (slice(start, stop) for start, stop in pairwise(cuts))
        plain.workers[rank].deliver(Received(expected.message, expected.frame))
        parted.workers[rank].deliver(Received(reply.message, reply.frame, parts))
        for activity in activities:
            list(activity)
        assert np.array_equal(plain.server.rule.center, parted.server.rule.center)
        for own in (1, 2):
            left, right = (pair.workers[own].parameters.vector for pair in (plain, parted))
            assert np.array_equal(left, right)
    assert plain.server.staleness == parted.server.staleness
    assert plain.server.rule.clock == parted.server.rule.clock == 7


def test_what_more_than_the_reply_depends_on_is_worked_out_first() -> None:
    pair = Pair(*CASES["SGD"], in_parts=True)
    activity = pair.workers[1].join()
    reply = pair.ask(1, activity)
    pair.workers[1].deliver(Received(reply.message, reply.frame))
    list(activity)
    seen = []
    pair.server.after_commit = lambda: seen.append(pair.server.rule.center[0])
    reply = pair.ask(1, pair.workers[1].step())
    assert reply.parts is None
    assert seen == [reply.message.vector[0]]


def test_a_worker_in_rounds_waits_for_the_whole_reply() -> None:
    """Its rule may look at all numbers at once."""
    pair = Pair(LocalSGD(every=1), None, in_parts=True)
    pair.join()
    worker = pair.workers[1]
    next(worker.step(lambda: None))
    vector, taken = np.full(SIZE, 3, F4), []

    def parts():
        for stop in (5, SIZE):
            taken.append(worker.parameters.vector.max())
            yield slice(0, stop)

    reply = Message(Kind.CENTER, 0, 1, 1, vector=vector)
    before = worker.parameters.vector.max()
    worker.deliver(Received(reply, Frame(SIZE), parts()))
    assert taken == [before, before]
    assert (worker.parameters.vector == 3).all()
