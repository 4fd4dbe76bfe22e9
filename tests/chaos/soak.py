"""Trains for a long time with checkpoints, and looks for what grows: memory, open files, unread messages.

    python -m tests.chaos.soak
    python -m tests.chaos.soak --seconds 60 --exchanges 1000

It starts 4 ranks, prints what each has noted, and ends with an error if anything grows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
#: By how much the memory of a rank may grow after the warm-up, which is a tenth of the time.
GROWTH, WARM_UP = 0.01, 0.1


def main() -> int:
    """Start the ranks, or be one of them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--seconds", type=float, default=1800)
    options.add_argument("--exchanges", type=int, default=100_000)
    options.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.notes is not None:
        train(given.notes, given.seconds, given.exchanges)
        return 0
    from tests.helpers.jobs import launcher, starting

    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, __file__, *sys.argv[1:], "--notes", folder]
        limit_s = 2 * given.seconds + 300
        limit = {"MPIEXEC_TIMEOUT": f"{limit_s:.0f}"}  # or mpiexec would end it after that of short tests
        with starting([launcher(), "-n", str(RANKS), *job], sys.stdout, limit) as process:
            status = process.wait(limit_s + 10)
        return status or judge(Path(folder), given.exchanges)


def train(folder: Path, seconds: float, exchanges: int) -> None:
    """Train, and note after each epoch what this rank has, while nothing is under way."""
    import psutil
    import torch
    from mpi4py import MPI

    import nnlo_torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    optimizer = nnlo_torch.Downpour(torch.optim.Adam(model.parameters(), lr=1e-4))
    data = torch.randn(3000, 20)
    sampler = nnlo_torch.ShardSampler(data, assignment="dynamic", unit=50)
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler)
    checkpoint = nnlo_torch.Checkpoint(folder / "run", optimizer, epochs=0, minutes=0.05)
    process, begun_s = psutil.Process(), time.monotonic()
    with (folder / f"rank{MPI.COMM_WORLD.Get_rank()}").open("w") as notes:
        for _ in checkpoint.epochs(sys.maxsize):
            for inputs in checkpoint.batches(loader):
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            done = optimizer.report().exchanges
            over = time.monotonic() - begun_s > seconds
            means = optimizer.mean({"exchanges": done, "over": over})
            noted = {
                "at_s": time.monotonic() - begun_s,
                "memory": process.memory_info().rss,
                "files": len(list(Path("/proc/self/fd").iterdir())),
                "unread": int(optimizer._team._part._endpoint._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)),
                "exchanges": RANKS * means["exchanges"],
            }
            print(json.dumps(noted), file=notes, flush=True)
            if means["over"] and noted["exchanges"] >= exchanges:
                break
    optimizer.close()


def judge(folder: Path, exchanges: int) -> int:
    """Say what has grown; return the exit status."""
    grown = False
    for rank in range(RANKS):
        notes = [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]
        last = notes[-1]
        warm = [one for one in notes if one["at_s"] >= WARM_UP * last["at_s"]]
        quarter = -(-len(warm) // 4)
        first, end = ([one["memory"] for one in part] for part in (warm[:quarter], warm[-quarter:]))
        growth = statistics.fmean(end) / statistics.fmean(first) - 1
        # While a checkpoint is written one file more is open.
        files = [min(one["files"] for one in part) for part in (warm[:quarter], warm[-quarter:])]
        unread = sum(one["unread"] for one in itertools.islice(reversed(notes), quarter))
        print(
            f"rank {rank}: {last['at_s']:.0f} s, {last['exchanges']:.0f} exchanges, {len(notes)} epochs; "
            f"memory {statistics.fmean(end) / 2**20:.1f} MiB, {100 * growth:+.2f} %; "
            f"open files {files[0]} to {files[1]}; unread messages {unread}",
            flush=True,
        )
        grown |= growth > GROWTH or files[1] > files[0] or unread > 0 or last["exchanges"] < exchanges
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
