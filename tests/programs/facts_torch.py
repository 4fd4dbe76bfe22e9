"""A training that writes its facts and its timeline; a worker may kill the job in the second epoch."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

import torch

import nnlo_torch as nt

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
        if kind == "killed" and epoch == 1 and number == 7 and optimizer.role == "worker 0":
            time.sleep(1.5)  # until the threads have written what there is
            os.kill(os.getpid(), signal.SIGKILL)
    report.epoch(optimizer.mean({"loss": float(epoch)}))
if kind == "measured":
    held = torch.ones(30_000_000)  # 120 MB
    until_s = time.process_time() + 1.5
    while time.process_time() < until_s:
        held.add_(1)
optimizer.close()
used = resource.getrusage(resource.RUSAGE_SELF)
print(
    f"rank {optimizer.rank}: {used.ru_maxrss * 1024 / 1e6} MB {used.ru_utime + used.ru_stime} s", flush=True
)
