"""Run every case of `cases.py`, log the order of events, and leave each rank's parameters behind."""

import sys
import time
from pathlib import Path

import numpy as np

from nnlo_common import Participant
from tests.helpers.numpy_cases import CASES, EPOCHS, LONG_CASES, STEPS, gradient, initial

folder, servers = Path(sys.argv[1]), int(sys.argv[2])
for name, case in {**CASES, **LONG_CASES}.items():
    optimizer = case.optimizer and case.optimizer()
    with Participant(
        case.algorithm,
        initial(long=case.long),
        optimizer=optimizer,
        servers=servers,
        log_order=folder / f"{name}.json",
    ) as me:
        jitter = np.random.default_rng(me.rank)
        step, steps = 0, []
        for _ in range(EPOCHS):
            steps.append(-step)
            # Shares of STEPS / EPOCHS for everybody, and one more for some: uneven on purpose.
            for _ in me.batches(range(STEPS // EPOCHS * (me.size - servers) + 1)):
                point = np.concatenate([part.ravel() for part in me.point])
                value, start = gradient(point, me.rank, step), 0
                for part in me.gradients:
                    part.flat[:] = value[start : start + part.size]
                    start += part.size
                time.sleep(jitter.uniform(0, 1e-3))  # mixes the ranks up
                me.step()
                step += 1
            steps[-1] += step
    vector = np.concatenate([part.ravel() for part in me.parameters])
    np.savez(folder / f"{name}.rank{me.rank}.npz", vector=vector, steps=steps)
