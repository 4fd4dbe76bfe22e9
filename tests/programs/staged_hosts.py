"""A training over staged files; each rank prints its host, and how often it was trained with each sample."""

import sys
import tempfile
from pathlib import Path

import torch

import nnlo_torch

folder = Path(sys.argv[1])
# The program that copies also notes for which host it did so.
copy = [
    "sh",
    "-c",
    'echo "$(hostname) ${1##*/}" >> "$0"; cp "$1" "$2"',
    str(folder / "copies"),
    "{src}",
    "{dst}",
]
model = torch.nn.Linear(1, 1)
optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=1e-4))
batches = nnlo_torch.H5Batches(
    str(folder / "*.h5"),
    features="x",
    labels="y",
    batch_size=7,
    stage_to=tempfile.gettempdir(),
    copy_command=copy,
)
seen = []
for _ in range(2):
    for x, y in batches:
        (model(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += y.int().tolist()
batches.close()
optimizer.close()
print(f"\nsamples {sorted(seen)}", flush=True)
