"""Trainings on threads as ranks: the ordinary loop, and how to run it and look at it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nnlo_common import Participant
from nnlo_common.protocol import Server
from nnlo_common.testing import InjectedFault, MemoryCluster
from tests.helpers.numpy_cases import gradient

__all__ = [
    "DyingMail",
    "HeldMail",
    "collect",
    "facts_end",
    "flat",
    "no_new_threads",
    "on_ranks",
    "ranks",
    "server_of",
    "train",
    "writers_left",
]


def collect() -> None:
    """Collect all garbage, also if another thread does so now: `gc.collect` alone does nothing then."""
    here, done = threading.get_ident(), threading.Event()

    def note(phase: str, info: dict[str, int]) -> None:
        if (phase, info["generation"], threading.get_ident()) == ("stop", 2, here):
            done.set()

    gc.callbacks.append(note)
    try:
        while not done.is_set():
            gc.collect()
    finally:
        gc.callbacks.remove(note)


def facts_end() -> None:
    """Wait until the facts of trainings that nothing refers to any more are written to their end."""
    collect()
    for thread in threading.enumerate():
        # Something may refer to another test's report for ever, as the traceback of one that has failed.
        writes = getattr(getattr(thread, "_target", None), "__self__", None)
        if thread.name == "nnlo-facts" and (writes is None or writes._ended.is_set() or writes._abandoned):
            thread.join()


def writers_left() -> int:
    """How many facts are still written, once all garbage is collected."""
    facts_end()
    return sum(thread.name == "nnlo-facts" for thread in threading.enumerate())


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Whatever goes wrong inside, no thread of a rank stays behind."""
    before = set(threading.enumerate())
    yield
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@contextmanager
def ranks(size: int) -> Iterator[MemoryCluster]:
    """A cluster that leaves no threads behind."""
    with no_new_threads(), MemoryCluster(size) as cluster:
        yield cluster


def on_ranks(
    size: int,
    program: Callable[[Any], Any],
    *,
    prepare: Callable[[MemoryCluster], object] = lambda cluster: None,
    timeout_s: float = 180,
) -> list[Any]:
    """What a program returns on each rank; `prepare` may give the cluster faults before it runs."""
    with MemoryCluster(size) as cluster:
        prepare(cluster)
        return cluster.run(program, timeout_s)


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    """A copy of all arrays, one after another."""
    return np.concatenate([array.ravel() for array in arrays])


def server_of(me: Participant) -> Server | None:
    """The protocol's server on a rank that serves."""
    return me._member and me._member.server


def train(
    me: Participant,
    batches: int | list[int],
    *,
    before_step: Callable[[int], object] = lambda step: None,
    after_epoch: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Train with the gradient of `cases.py`, an epoch for each entry of `batches`; what each epoch showed."""
    step, seen = 0, []
    for count in [batches] if isinstance(batches, int) else batches:
        for _ in me.batches(range(count)):
            before_step(step)
            value, start = gradient(flat(me.point), me.rank, step), 0
            for part in me.gradients:
                part.flat[:] = value[start : start + part.size]
                start += part.size
            me.step()
            step += 1
        seen.append(after_epoch())
    return seen


class DyingMail:
    """A letter box whose rank dies for good with the third letter of a kind, or another, sent or received."""

    def __init__(self, world, kind, left=3, died=None):
        self.mail, self.world, self.kind, self.left = type(world).mail(world), world, kind, left
        self.died = died or threading.Event()
        self.close = self.mail.close

    def send(self, peer, text):
        self.count(text)
        self.mail.send(peer, text)

    def receive(self, timeout_s=None):
        self.count("")
        letter = self.mail.receive(timeout_s)
        if isinstance(letter, tuple):
            self.count(letter[1])
        return letter

    def count(self, text):
        self.left -= is_of(self.kind, text)
        if self.left <= 0:
            self.died.set()
            raise InjectedFault(f"rank {self.world.rank} dies")


class MortalMail:
    """A letter box whose rank dies with its letter of that number, before it is sent or after."""

    def __init__(self, world, left, *, after=False):
        self.mail, self.world, self.left, self.after = type(world).mail(world), world, left, after
        self.close = self.mail.close

    def send(self, peer, text):
        self.left -= 1
        if self.left == 0 and self.after:
            self.mail.send(peer, text)
        self.die_if_due()
        self.mail.send(peer, text)

    def receive(self, timeout_s=None):
        letter = self.mail.receive(timeout_s)
        self.left -= letter is not None
        self.die_if_due()
        return letter

    def die_if_due(self):
        if self.left <= 0:
            raise InjectedFault(f"rank {self.world.rank} dies")


class HeldMail:
    """A letter box that holds back the second letter of a kind until another rank has died.

    On a busy machine one block, or one search rank, could otherwise do all the work before the other has had
    as many letters as it is to die with.
    """

    def __init__(self, world, kind, died):
        self.mail, self.kind, self.died, self.seen = type(world).mail(world), kind, died, 0
        self.send, self.close = self.mail.send, self.mail.close

    def receive(self, timeout_s=None):
        letter = self.mail.receive(timeout_s)
        if isinstance(letter, tuple):
            self.seen += is_of(self.kind, letter[1])
            assert self.seen < 2 or self.died.wait(30), "the other rank has not died"
        return letter


def is_of(kind, text):
    """Whether a letter is of a kind."""
    return f'"kind": "{kind}"' in text
