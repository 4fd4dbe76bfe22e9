"""Using a model: predictions and tiles beside a plain loop and MONAI, on one and two ranks, with a slow rank.

    python benchmarks/use_models.py [--samples 100000] [--rounds 5]

One thread a rank. Each round runs all cases, each twice in new processes, and counts the second call alone,
without imports; a ratio is of two neighbours in a round, and the median of all rounds counts. Prints what
each took, and refuses at the end if a promise is broken: as fast as a loop over a DataLoader on one rank; 1.8
times as fast on two ranks; with a rank that takes three times as long for a batch, 1.4 times as fast as equal
shares; memory that does not grow with the data; as fast as MONAI's sliding window, with its numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch

import nnlo_torch as nt

HERE = Path(__file__).resolve()
BATCH = 100


class Net(torch.nn.Module):
    """A network that computes for a while; on one rank it may be slow."""

    def __init__(self, slow: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 8)
        )
        self.slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, and wait for as long as a slow rank would."""
        began_s = time.perf_counter()
        y: torch.Tensor = self.layers(x)
        if self.slow > 1:
            time.sleep((self.slow - 1) * (time.perf_counter() - began_s))
        return y


def write(path: Path, samples: int) -> None:
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (samples, 64), "f4")
        for at in range(0, samples, 10_000):
            rows = min(10_000, samples - at)
            data[at : at + rows] = np.random.default_rng(at).standard_normal((rows, 64)).astype("f4")


def shares(net: Net, path: Path, world_rank: int, size: int) -> None:
    """What one writes by hand: each rank predicts an equal share of the rows, by a loop over a DataLoader."""
    with h5py.File(path) as file:
        rows = len(file["x"])
        part = file["x"][world_rank * rows // size : (world_rank + 1) * rows // size]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(part)), batch_size=BATCH
    )
    with torch.inference_mode():
        found = np.concatenate([net(x).numpy() for (x,) in loader])
    np.save(f"{path}.rank{world_rank}.npy", found)


def one_rank(case: str, path: Path) -> None:
    """Run a case twice on this rank, and print the second time."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    net = Net(3.0 if "slow" in case and rank == size - 1 else 1.0)
    for _ in range(2):
        began_s = time.perf_counter()
        if case.startswith("shares"):
            shares(net, path, rank, size)
        else:
            nt.predict(net, str(path), f"{path}.out.h5", features="x", batch_size=BATCH, overwrite=True)
        seconds = time.perf_counter() - began_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rank": rank, "seconds": seconds, "memory": peak}), flush=True)


def measured(case: str, path: Path, ranks: int = 1) -> dict[str, float]:
    """Return the time of the last rank of a case, and the memory of the largest."""
    command = [sys.executable, str(HERE), "--case", case, "--path", str(path)]
    if ranks > 1:
        command = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks), *command]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"seconds": max(one["seconds"] for one in found), "memory": max(one["memory"] for one in found)}


def tiles(repeat: int) -> dict[str, float] | None:
    """Return the times of MONAI and of tiles, and by how much they differ; None: MONAI is not installed."""
    try:
        from monai.inferers import sliding_window_inference
    except ImportError:
        return None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv3d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(8, 3, 3, padding=1)
    ).eval()
    volume = np.random.default_rng(0).standard_normal((100, 120, 110)).astype("f4")
    theirs, ours = [], []
    for _ in range(repeat):
        began_s = time.perf_counter()
        with torch.inference_mode():
            tensor = torch.from_numpy(volume)[None, None]
            reference = sliding_window_inference(tensor, (48,) * 3, 4, net, overlap=0.25, mode="gaussian")
        theirs.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        options = {"tile": 48, "margin": 0, "overlap": 12, "multiple": 1, "batch_size": 4}
        found = nt.infer_tiles(net, volume, blend="gaussian", **options).outputs
        ours.append(time.perf_counter() - began_s)
    apart = float(np.abs(found - np.asarray(reference[0])).max())
    return {"MONAI": statistics.median(theirs), "nnlo": statistics.median(ours), "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        one_rank(given.case, given.path)
        return
    broken = []
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        path, small = Path(folder, "x.h5"), Path(folder, "small.h5")
        write(path, given.samples)
        write(small, given.samples // 8)
        for number in range(given.rounds):
            rounds.append(
                {
                    "a loop over a DataLoader": measured("shares", path),
                    "predict, 1 rank": measured("predict", path),
                    "predict, 2 ranks": measured("predict", path, 2),
                    "equal shares, 2 ranks, one slow": measured("shares slow", path, 2),
                    "predict, 2 ranks, one slow": measured("predict slow", path, 2),
                    "predict, 1 rank, an eighth of the samples": measured("predict", small),
                }
            )
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}")
            for name, one in rounds[-1].items():
                print(f"  {name:42} {one['seconds']:8.2f} s {one['memory']:8.0f} MB", flush=True)
    for what, over, under, key, least in (
        ("1 rank beside a loop", 0, 1, "seconds", 1.0),
        ("2 ranks beside 1", 1, 2, "seconds", 1.8),
        ("a slow rank beside equal shares", 3, 4, "seconds", 1.4),
        ("memory of an eighth beside all", 5, 1, "memory", 0.95),
    ):
        ratios = sorted([*one.values()][over][key] / [*one.values()][under][key] for one in rounds)
        median = statistics.median(ratios)
        print(f"{what:44} {median:8.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] (promised: {least})")
        broken += [what] if median < least else []
    if (beside := tiles(given.rounds)) is None:
        print("MONAI is not installed: tiles are not compared")
    else:
        print(
            f"tiles: MONAI {beside['MONAI']:.2f} s, nnlo {beside['nnlo']:.2f} s, {beside['apart']:.1e} apart"
        )
        broken += ["tiles beside MONAI"] if beside["nnlo"] > beside["MONAI"] else []
        broken += ["the numbers of MONAI"] if beside["apart"] > 1e-5 else []
    if broken:
        sys.exit(f"broken: {', '.join(broken)}")


if __name__ == "__main__":
    main()
