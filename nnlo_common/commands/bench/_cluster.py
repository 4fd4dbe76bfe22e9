"""Benchmark of the virtual cluster: 64 workers, 10 000 commits, 100 000 parameters, one process."""

from __future__ import annotations

import os
import time

import numpy as np

from nnlo_common import SGD, Downpour
from nnlo_common.testing import ByTime, train_virtually

__all__ = ["run"]

WORKERS, COMMITS, PARAMETERS = 64, 10_000, 100_000


def run() -> None:
    """Train a quadratic in virtual time and print the real time."""
    curvature = np.linspace(0.1, 1.0, PARAMETERS, dtype=np.float32)
    start_s = time.perf_counter()
    done = train_virtually(
        Downpour(),
        lambda x, rank: curvature * x,
        np.ones(PARAMETERS, np.float32),
        workers=WORKERS,
        steps=[COMMITS // WORKERS + (index < COMMITS % WORKERS) for index in range(WORKERS)],
        optimizer=SGD(0.01),
        schedule=ByTime(seed=1),
    )
    seconds = time.perf_counter() - start_s
    server = done.servers[0]
    stale = sum(k * n for k, n in server.staleness.items()) / server.rule.clock
    print(
        f"{WORKERS} workers, {server.rule.clock} commits of {PARAMETERS} parameters: {seconds:.1f} s "
        f"({server.rule.clock / seconds:.0f} commits/s; {done.seconds:.0f} s of virtual time; mean staleness "
        f"{stale:.1f}; load {os.getloadavg()[0]:.2f})"
    )
