"""Cost of a checkpoint of a training with 11 million parameters and Adam, alone and with two workers.

    python benchmarks/checkpoint_cost.py
    mpiexec -n 3 python benchmarks/checkpoint_cost.py

Times are those of the first worker. The cost of a checkpoint is the time of the steps up to the next one,
minus what they would take at the pace of their last third, when the write is over. Ends with an error if one
checkpoint in 30 s costs 5 % or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import nnlo_torch

LIMIT, EVERY_S = 0.05, 30.0
WIDTH = 1350


def main() -> int:
    """Train and compare the times of steps."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--batches", type=int, default=60, help="batches between checkpoints")
    options.add_argument("--checkpoints", type=int, default=5)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nnlo-checkpoint-cost")
    given = options.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = nnlo_torch.Downpour(torch.optim.Adam(model.parameters(), lr=1e-5))
    steps = given.batches * (given.checkpoints + 1)
    workers = max(1, optimizer.share[1])
    data = torch.randn(32, WIDTH).expand(workers * steps, 32, WIDTH)
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, sampler=nnlo_torch.ShardSampler(data, shuffle=False)
    )
    checkpoint = nnlo_torch.Checkpoint(given.folder, optimizer, epochs=0, batches=given.batches)
    ends, wall = [], []
    for _ in checkpoint.epochs(1):
        for inputs in checkpoint.batches(loader):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            ends.append(time.perf_counter())
            wall.append(time.time())
    first = optimizer.share[0] in (0, -1) and not optimizer.serves
    optimizer.close()
    return report(ends, wall, given, sum(one.numel() for one in model.parameters())) if first else 0


def report(ends: list[float], wall: list[float], given: argparse.Namespace, parameters: int) -> int:
    """Print the cost of the checkpoints; return the exit status."""
    times = [after - before for before, after in zip([ends[0], *ends], ends, strict=False)]
    costs, stood, waits = [], [], []
    # The first part follows no checkpoint.
    for begin in range(given.batches, given.batches * (given.checkpoints + 1), given.batches):
        part = times[begin : begin + given.batches]
        quiet = statistics.fmean(part[-len(part) // 3 :])
        costs.append(sum(part) - len(part) * quiet)
        stood.append(max(part[:3]) - quiet)
        waits.append(wall[begin - 1])
    newest = max(given.folder.glob("checkpoint-??????"))
    size = sum(path.stat().st_size for path in newest.iterdir())
    took = (newest / "manifest.json").stat().st_mtime - waits[-1]
    cost = statistics.median(costs)
    print(f"{parameters / 1e6:.1f} million parameters, {size / 1e6:.0f} MB in one checkpoint")
    print(f"a step without a checkpoint: {1e3 * quiet:.0f} ms")
    print(f"pause at a checkpoint: {1e3 * statistics.median(stood):.0f} ms (most {1e3 * max(stood):.0f})")
    print(f"time until it is complete on disk: {1e3 * took:.0f} ms")
    print(f"total cost: {1e3 * cost:.0f} ms, {100 * cost / EVERY_S:.1f} % of {EVERY_S:.0f} s")
    return int(cost >= LIMIT * EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
