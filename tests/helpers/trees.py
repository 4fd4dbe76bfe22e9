"""Elastic trees as plain NumPy, told only of the order of commits on each server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nnlo_common.base._flat_vector import Vector
from nnlo_common.protocol import Server

__all__ = [
    "BRANCHES",
    "HALF",
    "START",
    "TREE",
    "WORKERS",
    "TreeNumbers",
    "assert_as_replayed",
    "commits_of",
    "numbers_of",
    "replayed",
]

HALF = np.float32(0.5)
BRANCHES = ((1, 2, 3), (4, 5, 6, 7))  #: the ranks of both branches among 8 ranks, the sub-server first
WORKERS = 5  #: that of 8 ranks train
START = np.array([1.5, -2.0, 0.3], np.float32)
TREE: Mapping[str, Any] = {"every": 3, "sub_servers": 2, "sub_every": 5, "sub_alpha": 0.35}


@dataclass(frozen=True)
class TreeNumbers:
    """The parameters at the end of a training: the top's, of each sub-server and of each worker, by rank."""

    top: Vector
    subs: dict[int, Vector]
    workers: dict[int, Vector]


def commits_of(server: Server) -> list[int]:
    """Return a list that gets the rank of each later commit on a server."""
    commits: list[int] = []
    apply = server.rule.apply

    def telling(contributions: Sequence[object]) -> None:
        commits.extend(one.rank for one in contributions)
        apply(contributions)

    server.rule.apply = telling
    return commits


def numbers_of(commits: Mapping[int, Sequence[int]], steps: int, *, times: int = 1) -> TreeNumbers:
    """Return the numbers of the tree of the tests: 8 ranks, `TREE` and `START`.

    Args:
        commits: the ranks of the commits on each server, in order.
        steps: the steps of each worker.
        times: how often the parameters are repeated.
    """
    return replayed(
        commits,
        BRANCHES,
        np.tile(START, times),
        every=TREE["every"],
        sub_every=TREE["sub_every"],
        alphas={0: TREE["sub_alpha"], 1: 0.9 / 3, 4: 0.9 / 4},
        steps={rank: steps for _, *ranks in BRANCHES for rank in ranks},
    )


def assert_as_replayed(folder: Path, times: int) -> None:
    """Compare what `tests/programs/tree.py` has saved with the numbers of the tree, bit for bit."""
    ranks = [np.load(folder / f"{rank}.npz") for rank in range(8)]
    commits = {rank: ranks[rank]["commits"].tolist() for rank in (0, *(sub for sub, *_ in BRANCHES))}
    expected = numbers_of(commits, 2 * 170 // WORKERS, times=times)
    np.testing.assert_array_equal(ranks[0]["own"][: 3 * times], expected.top)
    for rank, vector in (*expected.subs.items(), *expected.workers.items()):
        np.testing.assert_array_equal(ranks[rank]["own"][: 3 * times], vector, err_msg=f"rank {rank}")
    for sub in expected.subs:
        np.testing.assert_array_equal(ranks[sub]["model"], expected.top)


def replayed(
    commits: Mapping[int, Sequence[int]],
    branches: Sequence[Sequence[int]],
    start: Vector,
    *,
    every: int,
    sub_every: int,
    alphas: Mapping[int, float],
    steps: Mapping[int, int],
) -> TreeNumbers:
    """Return the numbers of a tree whose workers step to x - 0.25 (x - rank), before they exchange.

    All products are with powers of two, so that a framework's fused operations give the same bits.

    Args:
        commits: the ranks of the commits on each server, in order.
        branches: the ranks of each branch, its sub-server first; 0 is the top server.
        start: the parameters at the start of all.
        every: steps of a worker between exchanges.
        sub_every: exchanges of a sub-server's workers between two with the top.
        alphas: the moving rate of each server.
        steps: the steps of each worker.
    """
    top, made = start.copy(), dict.fromkeys(commits, 0)
    subs = {sub: start.copy() for sub, *_ in branches}
    workers = {rank: start.copy() for _, *ranks in branches for rank in ranks}
    left = dict(steps)

    def step(rank: int, times: int) -> None:
        for _ in range(times):
            workers[rank] = workers[rank] - HALF * (HALF * (workers[rank] - np.float32(rank)))
        left[rank] -= times

    def exchange(sub: int, until: int) -> None:
        for rank in commits[sub][made[sub] : until]:
            step(rank, every)
            move = np.float32(alphas[sub]) * (workers[rank] - subs[sub])
            workers[rank], subs[sub] = workers[rank] - move, subs[sub] + move
        made[sub] = until

    for sub in commits[0]:
        exchange(sub, made[sub] + sub_every)
        move = np.float32(alphas[0]) * (subs[sub] - top)
        top, subs[sub] = top + move, subs[sub] - move
    for sub, *_ in branches:
        assert len(commits[sub]) - made[sub] < sub_every, "a sub-server exchanges as often as it should"
        exchange(sub, len(commits[sub]))
    for rank, rest in tuple(left.items()):
        assert 0 <= rest < every, "a worker exchanges as often as it should"
        step(rank, rest)
    return TreeNumbers(top, subs, workers)
