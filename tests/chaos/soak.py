"""Trains for a long time with checkpoints, and looks for what grows: memory, open files, unread messages.

    python -m tests.chaos.soak
    python -m tests.chaos.soak --framework keras
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANKS = 4
#: By how much the memory of a rank may grow after the warm-up, which is a tenth of the time.
GROWTH, WARM_UP = 0.01, 0.1
SAMPLES, FEATURES, BATCH = 3000, 20, 5
MINUTES_BETWEEN_CHECKPOINTS = 0.05
# More epochs than half an hour has; each that is left over costs two messages at the end.
MOST_EPOCHS = 20_000


def main() -> int:
    """Start the ranks, or be one of them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--framework", choices=("torch", "keras"), default="torch")
    options.add_argument("--seconds", type=float, default=1800)
    options.add_argument("--exchanges", type=int, default=100_000)
    options.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.notes is not None:
        train = train_torch if given.framework == "torch" else train_keras
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


class Notes:
    """Notes of one rank: after each epoch, while nothing is under way, what it has.

    Args:
        folder: where they are written.
        seconds: how long the training lasts at least.
        exchanges: how many exchanges it has at least.
    """

    def __init__(self, folder: Path, seconds: float, exchanges: int) -> None:
        import psutil
        from mpi4py import MPI

        self._mpi, self._process, self._begun_s = MPI, psutil.Process(), time.monotonic()
        self._seconds, self._exchanges = seconds, exchanges
        self._file = (folder / f"rank{MPI.COMM_WORLD.Get_rank()}").open("w")

    @property
    def over(self) -> bool:
        """Whether the training has lasted long enough on this rank."""
        return time.monotonic() - self._begun_s > self._seconds

    def add(self, team: Any, means: Mapping[str, float]) -> bool:
        """Write a note; return whether the training has lasted long enough on all ranks.

        Args:
            team: this rank's session.
            means: over all ranks, of how many exchanges each has made, and of `over`.
        """
        noted = {
            "at_s": time.monotonic() - self._begun_s,
            "memory": self._process.memory_info().rss,
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "unread": int(team._part._endpoint._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)),
            "exchanges": RANKS * means["exchanges"],
        }
        print(json.dumps(noted), file=self._file, flush=True)
        return bool(means["over"]) and noted["exchanges"] >= self._exchanges


def train_torch(folder: Path, seconds: float, exchanges: int) -> None:
    """Train with PyTorch."""
    import torch

    import nnlo_torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    optimizer = nnlo_torch.Downpour(torch.optim.Adam(model.parameters(), lr=1e-4))
    data = torch.randn(SAMPLES, FEATURES)
    sampler = nnlo_torch.ShardSampler(data, assignment="dynamic", unit=50)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    checkpoint = nnlo_torch.Checkpoint(
        folder / "run", optimizer, epochs=0, minutes=MINUTES_BETWEEN_CHECKPOINTS
    )
    notes = Notes(folder, seconds, exchanges)
    for _ in checkpoint.epochs(sys.maxsize):
        for inputs in checkpoint.batches(loader):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        means = optimizer.mean({"exchanges": optimizer.report().exchanges, "over": notes.over})
        if notes.add(optimizer._team, means):
            break
    optimizer.close()


def train_keras(folder: Path, seconds: float, exchanges: int) -> None:
    """Train with Keras."""
    import h5py
    import keras
    import numpy as np
    from mpi4py import MPI

    import nnlo_keras

    rank, path = MPI.COMM_WORLD.Get_rank(), folder / "data.h5"
    keras.utils.set_random_seed(1)
    if rank == 0:
        inputs = np.random.default_rng(1).normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = inputs, inputs[:, :1]
    MPI.COMM_WORLD.Barrier()
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(50, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer=nnlo_keras.Downpour(keras.optimizers.Adam(1e-4)), loss="mse", jit_compile=False)
    data = nnlo_keras.H5Sequence(path, features="x", labels="y", batch_size=BATCH, assignment="dynamic")
    distribute, notes = nnlo_keras.Distribute(), Notes(folder, seconds, exchanges)
    checkpoint = nnlo_keras.Checkpoint(folder / "run", MOST_EPOCHS, minutes=MINUTES_BETWEEN_CHECKPOINTS)

    class Noting(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            team = distribute.team
            values = {"exchanges": float(distribute.report.exchanges), "over": float(notes.over)}
            if notes.add(team, team.mean(values, 1.0)):
                self.model.stop_training = True

    model.fit(data, epochs=MOST_EPOCHS, verbose=0, callbacks=[checkpoint, distribute, Noting()])


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
