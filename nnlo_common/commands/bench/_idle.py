"""Benchmark of a waiting server: its processor time, and the latency of its next reply."""

from __future__ import annotations

import os
import time
from statistics import median

import numpy as np

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.cluster.transport._mpi4py import World
from nnlo_common.cluster.transport._mpi_world import MPIWorld

__all__ = ["run"]

WAITS = 5


def run(world: World, seconds: float) -> None:
    """Let the server wait `seconds` in all, in a few waits, and time the first reply after each."""
    if world.rank == 0:
        print(f"{world.library}; load {os.getloadavg()[0]:.2f} before")
    latencies = []
    with Participant(Downpour(), [np.zeros(16, "f4")], optimizer=SGD(0.1), world=MPIWorld(world)) as me:
        busy_s, start_s = time.process_time(), time.perf_counter()
        for _ in me.batches(range(WAITS)):
            time.sleep(seconds / WAITS)
            asked_s = time.perf_counter()
            me.step()
            latencies.append(time.perf_counter() - asked_s)
        busy_s = time.process_time() - busy_s
        waited_s = time.perf_counter() - start_s
        me.say(f"server: waited {waited_s:.1f} s with {100 * busy_s / waited_s:.2f} % of a core")
    if latencies:
        print(
            f"worker: reply to a 64-byte gradient after {WAITS} waits of {seconds / WAITS:.1f} s: "
            f"median {median(latencies) * 1e6:.0f} us, highest {max(latencies) * 1e6:.0f} us",
            flush=True,
        )
