"""A training that writes its facts and its timeline; a worker may kill the job in the second epoch.

The clocks of node2 and node3 of the tests' hosts, which really share one, are set wrong.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from functools import partial

import torch

WRONG_S = {"node2": 7.0, "node3": -3.0}.get(socket.gethostname(), 0.0)
time.time = partial(lambda now_s: now_s() + WRONG_S, time.time)

import nnlo_torch as nt  # noqa: E402 - it reads the clock that it finds

folder, kind = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Linear(300, 50)
optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
report = nt.Report(optimizer, folder, timeline=True, every_s=0.1)
for epoch in range(3):
    for number, x in enumerate(optimizer.epoch([torch.ones(8, 300)] * 15)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if kind == "killed" and epoch == 1 and number == 7 and optimizer.role == "worker 1":
            time.sleep(1.5)  # until the threads have written what there is
            os.kill(os.getpid(), signal.SIGKILL)
    report.epoch(optimizer.mean({"loss": float(epoch)}))
if kind == "measured":
    held = torch.ones(50_000_000)  # 200 MB
    until_s = time.process_time() + 3
    while time.process_time() < until_s:
        held.add_(1)
optimizer.close()
if kind == "measured":  # what Python and torch take to end, half a second, comes after the last fact
    sys.modules["mpi4py.MPI"].Finalize()
    os._exit(0)
