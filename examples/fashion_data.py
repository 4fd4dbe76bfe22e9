"""Fashion-MNIST for the examples: the embedded subset, or the full set from a folder you name.

It downloads nothing and searches no folder, so that an example computes the same on every machine. Debian's
package `dataset-fashion-mnist` installs the full set in `/usr/share/datasets/fashion-mnist`; Keras keeps its
copy in `~/.keras/datasets/fashion-mnist`.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SUBSET = Path(__file__).with_name("data") / "fashion_mnist_2500.npz"
FILES = {
    "x_train": "train-images-idx3-ubyte.gz",
    "y_train": "train-labels-idx1-ubyte.gz",
    "x_test": "t10k-images-idx3-ubyte.gz",
    "y_test": "t10k-labels-idx1-ubyte.gz",
}


class Fashion(NamedTuple):
    """Images as rows of 784 float32 in [0, 1], labels as integers, and their source."""

    x_train: npt.NDArray[np.float32]
    y_train: npt.NDArray[np.int64]
    x_test: npt.NDArray[np.float32]
    y_test: npt.NDArray[np.int64]
    source: str


def load(folder: str | None = None) -> Fashion:
    """Load the full set from `folder`, or the embedded subset."""
    if folder is None:
        with np.load(SUBSET, allow_pickle=False) as arrays:
            return _prepared({key: arrays[key] for key in FILES}, f"{SUBSET.name} (embedded subset)")
    missing = [name for name in FILES.values() if not (Path(folder) / name).exists()]
    if missing:
        raise SystemExit(
            f"--data {folder}: there is no {missing[0]} in it; name the folder that holds the four "
            "Fashion-MNIST .gz files, or leave --data out to use the embedded subset"
        )
    return _prepared({key: _idx(Path(folder, name)) for key, name in FILES.items()}, folder)


def _prepared(arrays: dict[str, npt.NDArray[np.uint8]], source: str) -> Fashion:
    x_train, x_test = (
        (arrays[key].reshape(len(arrays[key]), -1) / np.float32(255)).astype(np.float32)
        for key in ("x_train", "x_test")
    )
    return Fashion(
        x_train, arrays["y_train"].astype(np.int64), x_test, arrays["y_test"].astype(np.int64), source
    )


def _idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an IDX file: two zero bytes, a type, the number of dimensions, their sizes, the values."""
    with gzip.open(path) as file:
        raw = file.read()
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
