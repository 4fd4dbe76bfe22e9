"""Train on HDF5 files of numbered samples, a folder for each rank, and say which samples it has seen."""

import json
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import torch

import nnlo_torch as nt

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
LENGTHS, EPOCHS = [30, 0, 71], 2
torch.set_num_threads(1)

model = torch.nn.Linear(1, 1)
optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=1e-6))
mine = FOLDER / f"rank{optimizer.rank}"
mine.mkdir()
for index, length in enumerate(LENGTHS):
    start = sum(LENGTHS[:index])
    with h5py.File(mine / f"{index}.h5", "w") as file:
        numbers = np.arange(start, start + length)
        layout = {"chunks": (10, 1), "compression": "gzip"} if length else {}
        file.create_dataset("x", data=numbers[:, None].astype("f4"), **layout)
        file["y"] = numbers
if CASE == "truncated" and optimizer.rank == 2:
    with (mine / "2.h5").open("r+b") as raw:
        raw.truncate(1500)


def batches_of(assignment):
    options = {"batch_size": 3, "block": 2, "window": 2, "assignment": assignment}
    return nt.H5Batches(mine / "?.h5", features="x", labels="y", optimizer=optimizer, **options)


def damage():
    """As if somebody wrote the file anew while it is trained on."""
    with (mine / "2.h5").open("r+b") as raw:
        raw.seek(800)
        raw.write(b"\xff" * 20_000)


seen = {}
for assignment in ("static", "dynamic"):
    batches = batches_of(assignment)
    seen[assignment] = [[] for _ in range(EPOCHS)]
    if CASE == "changed" and optimizer.rank == 2:
        damage()  # before anything of it is read ahead
    for epoch in range(EPOCHS):
        for x, y in batches:
            time.sleep(0.02 * (optimizer.rank == 2))
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen[assignment][epoch] += y.tolist()
optimizer.close()
(FOLDER / f"rank{optimizer.rank}.json").write_text(json.dumps(seen))
