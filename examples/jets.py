"""Options of the jet examples, and their files in the layout of the hls4ml LHC jets.

To use the real files (https://zenodo.org/records/3602260), unpack both archives into one folder, which then
holds `train` and `val`, and pass it as --data. Without --data the examples make toy jets, once on each host,
in the folder for temporary files.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import toy_jets

FEATURES, LABELS = "jetConstituentList", "jets"
CLASSES, COLUMNS = toy_jets.CLASSES, len(toy_jets.PARTICLE_FEATURES)
PT = toy_jets.PARTICLE_FEATURES.index("j1_pt")


def options(text: str, algorithms: Iterable[str], epochs: int) -> argparse.ArgumentParser:
    """Return the parser of the common options; `text` is the docstring of the script."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--algorithm", choices=[*algorithms], default="downpour")
    parser.add_argument("--data", help="a folder with train/*.h5 and val/*.h5; else toy jets")
    parser.add_argument(
        "--jets", type=int, default=6000, help="toy jets to train on; as many to validate with"
    )
    parser.add_argument(
        "--particles",
        type=int,
        default=30,
        help="use the hardest N particles of each jet; a jet has up to 150",
    )
    parser.add_argument("--epochs", type=int, default=epochs)
    return parser


def files(chosen: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and the files to validate with, the same on every rank."""
    if not chosen.data:
        folder = Path(tempfile.gettempdir(), f"toy_jets_{os.getuid()}", str(chosen.jets))
        return (
            toy_jets.provide(folder / "train", chosen.jets, files=min(3, chosen.jets), seed=1),
            toy_jets.provide(folder / "val", chosen.jets, files=min(3, chosen.jets), seed=2),
        )
    train, validate = (sorted(Path(chosen.data, part).glob("*.h5")) for part in ("train", "val"))
    if not train or not validate:
        raise SystemExit(
            f"--data {chosen.data}: there is no train/*.h5 or no val/*.h5 in it; unpack the hls4ml archives "
            "there, make toy jets with examples/toy_jets.py, or leave --data out"
        )
    return train, validate


def reading(train: list[Path], particles: int) -> dict[str, Any]:
    """Return the options of `H5Batches`, `H5Dataset` and `H5Sequence` for such files."""
    return {
        "features": FEATURES,
        "labels": LABELS,
        "adapt_features": Standardised(train[0], particles),
        "adapt_labels": classes,
    }


def classes(jets: np.ndarray) -> np.ndarray:
    """Return the class of each jet; the last column is `j_undef`."""
    return jets[:, -6:-1].argmax(axis=1)


class Standardised:
    """Scale each feature of the hardest particles to mean 0 and width 1; padding stays 0.

    The features differ by three orders of magnitude. Mean and width are those of the first 2000 jets of the
    first file, so they are equal on all ranks.
    """

    def __init__(self, path: Path, particles: int) -> None:
        self.particles = particles
        with h5py.File(path) as file:
            first = file[FEATURES][:2000, :particles, :COLUMNS]
        rows = first[first[..., PT] > 0].astype(np.float64)
        self.mean = rows.mean(axis=0).astype(np.float32)
        self.scale = (1 / np.maximum(rows.std(axis=0), 1e-6)).astype(np.float32)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return the network's input for some jets."""
        kept = rows[:, : self.particles, :COLUMNS]
        return (kept - self.mean) * self.scale * (kept[..., PT : PT + 1] > 0)
