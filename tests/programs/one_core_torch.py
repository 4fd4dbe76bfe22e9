"""A training of ranks that all compute on one core, and write down their facts."""

from __future__ import annotations

import os
import sys
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import torch  # noqa: E402

import nnlo_torch as nt  # noqa: E402

model = torch.nn.Linear(3, 1)
optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
report = nt.Report(optimizer, sys.argv[1])
for _ in range(3):
    for x in optimizer.epoch([torch.ones(4, 3)] * 7):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        optimizer.step()
    report.epoch()
optimizer.close()
