"""Make small pictures like CIFAR-10's, as lists of HDF5 files, for the Keras model in cifar10.json.

python examples/toy_images.py toy                      # writes toy/*.h5, toy/train.list, toy/val.list
mpiexec -n 3 nnlo train --model examples/cifar10.json --train toy/train.list --val toy/val.list \
    --loss categorical_crossentropy --metrics accuracy --batch 50 --epochs 5 --optimizer adam

Each class is a pattern of noisy stripes with its own direction, width and colour.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import numpy as np

CLASSES, SIZE = 10, 32


def pictures(draw, count):
    """Return `count` pictures of 32 x 32 x 3 in [0, 1], and their classes as rows of 0 and 1."""
    kinds = draw.integers(CLASSES, size=count)
    angle = (np.pi * kinds / CLASSES)[:, None, None]
    down, across = np.mgrid[:SIZE, :SIZE]
    waves = (1 + kinds % 3)[:, None, None] * 2 * np.pi / SIZE
    phase = draw.uniform(0, 2 * np.pi, (count, 1, 1))
    stripes = np.sin(waves * (np.cos(angle) * across + np.sin(angle) * down) + phase)
    colour = np.eye(3)[kinds % 3][:, None, None, :] + 0.3
    noise = draw.normal(0, 0.2, (count, SIZE, SIZE, 3))
    x = np.clip(0.5 + 0.3 * stripes[..., None] * colour + noise, 0, 1)
    return x.astype("f4"), np.eye(CLASSES, dtype="f4")[kinds]


def write(folder, files, samples, seed):
    """Write a list of files for training and one for validation."""
    draw, folder = np.random.default_rng(seed), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in {"train": files, "val": 1}.items():
        names = [f"{part}{number}.h5" for number in range(count)]
        for name in names:
            x, y = pictures(draw, samples)
            with h5py.File(folder / name, "w") as file:
                file.create_dataset("features", data=x, chunks=(50, SIZE, SIZE, 3))
                file["labels"] = y
        (folder / f"{part}.list").write_text("\n".join(names) + "\n")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", help="the folder to write to")
    options.add_argument("--files", type=int, default=4, help="files to train on (4)")
    options.add_argument("--samples", type=int, default=500, help="samples in each file (500)")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    write(chosen.folder, chosen.files, chosen.samples, chosen.seed)


if __name__ == "__main__":
    main()
