"""Toy jets in the layout of the hls4ml LHC-jet files, to try a tagger on; not a physics simulation.

python examples/toy_jets.py FOLDER --jets 10000 --files 5

A jet has up to 150 particles with 16 features each, from a gluon, a light quark, or a decaying W, Z or top.
Equal seeds give equal files. An accuracy on these jets says nothing about real ones.
"""

from __future__ import annotations

import argparse
import fcntl
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from toy_shower import CLASSES, Floats, Integers, Shower, detected, direction, taken, turned

PARTICLES = 150
PARTICLE_FEATURES = (
    *("j1_px", "j1_py", "j1_pz", "j1_e", "j1_erel", "j1_pt", "j1_ptrel", "j1_eta", "j1_etarel", "j1_etarot"),
    *("j1_phi", "j1_phirel", "j1_phirot", "j1_deltaR", "j1_costheta", "j1_costhetarel"),
)
JET_FEATURES = (
    *("j_pt", "j_eta", "j_mass", "j_multiplicity"),
    *(f"j_{name}" for name in CLASSES),
    "j_undef",
)
PION_GEV = 0.1396

Rows = npt.NDArray[np.float32]


def make_jets(count: int, seed: int | list[int], particles: int = PARTICLES) -> tuple[Rows, Rows]:
    """Return (count, particles, 16) of `PARTICLE_FEATURES` and (count, 10) of `JET_FEATURES`.

    The particles are sorted by falling pt and padded with zeros. Classes are equally frequent.
    """
    draw = np.random.default_rng(seed)
    label = draw.permutation(np.arange(count) % len(CLASSES))
    return _features(*_sorted_and_padded(detected(draw, label), count, particles), label)


def _sorted_and_padded(found: Shower, count: int, particles: int) -> tuple[Floats, Floats, Floats, Integers]:
    """Return pt, eta and phi as (count, particles), and the number of particles of each jet."""
    ordered = taken(found, np.lexsort((-found.pt, found.jet)))
    many = np.bincount(ordered.jet, minlength=count)
    place = np.arange(len(ordered.jet)) - np.repeat(np.cumsum(many) - many, many)
    kept = place < particles
    padded = np.zeros((3, count, particles))
    for array, values in zip(padded, (ordered.pt, ordered.eta, ordered.phi), strict=True):
        array[ordered.jet[kept], place[kept]] = values[kept]
    return *padded, many


def _features(pt: Floats, eta: Floats, phi: Floats, many: Integers, label: Integers) -> tuple[Rows, Rows]:
    real = pt > 0
    px, py, pz = pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)
    energy = np.sqrt(px**2 + py**2 + pz**2 + PION_GEV**2) * real
    jet = np.stack([one.sum(axis=1) for one in (energy, px, py, pz)], axis=1)
    jet_pt, jet_eta, jet_phi = (one[:, None] for one in direction(jet))
    size, jet_size = np.sqrt(px**2 + py**2 + pz**2) + ~real, np.sqrt((jet[:, 1:] ** 2).sum(axis=1))[:, None]
    eta_rel, phi_rel = (eta - jet_eta) * real, turned(phi - jet_phi) * real
    eta_rot, phi_rot = _upright(pt, eta_rel, phi_rel)
    along = (px * jet[:, 1:2] + py * jet[:, 2:3] + pz * jet[:, 3:]) / (size * jet_size)
    columns = [
        *(px, py, pz, energy, energy / jet[:, :1], pt, pt / jet_pt, eta, eta_rel, eta_rot),
        *(turned(phi) * real, phi_rel, phi_rot, np.hypot(eta_rel, phi_rel), pz / size, along),
    ]
    mass = np.sqrt(np.maximum(jet[:, 0] ** 2 - jet_size[:, 0] ** 2, 0))
    seen = np.column_stack([jet_pt, jet_eta, mass, many, np.eye(len(CLASSES) + 1)[label]])
    return np.stack(columns, axis=-1).astype(np.float32), seen.astype(np.float32)


def _upright(pt: Floats, eta: Floats, phi: Floats) -> tuple[Floats, Floats]:
    """Rotate the angles around the hardest particle so that the principal axis is vertical."""
    x, y = (eta - eta[:, :1]) * (pt > 0), (phi - phi[:, :1]) * (pt > 0)
    angle = np.arctan2(2 * (pt * x * y).sum(axis=1), (pt * (x * x - y * y)).sum(axis=1)) / 2 - np.pi / 2
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return x * cosine + y * sine, y * cosine - x * sine


# Files.


def provide(folder: str | Path, jets: int, files: int = 1, seed: int = 0) -> list[Path]:
    """Make the missing files; of all ranks that call it one writes, and the others wait."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    edges = [jets * number // files for number in range(files + 1)]
    paths = [folder / f"toy_jets_seed{seed}_{first}_{end}.h5" for first, end in pairwise(edges)]
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if others := sorted(set(folder.glob("*.h5")) - set(paths)):
            raise SystemExit(
                f"{folder} holds toy jets of other numbers or seeds, e.g. {others[0].name}; "
                "delete them or name another folder"
            )
        for number, path in enumerate(paths):
            if not path.exists():
                write(path, *make_jets(edges[number + 1] - edges[number], [seed, number]))
    return paths


def write(path: Path, particles: Rows, jets: Rows) -> None:
    """Write one file in the layout of the hls4ml files, without the images."""
    part = path.with_suffix(".part")  # a killed job leaves no half-written file
    with h5py.File(part, "w") as file:
        file["jetConstituentList"], file["jets"] = particles, jets
        file["jetFeatureNames"] = np.array(JET_FEATURES, "S")
        # The real files also name a 17th feature, without a column for it.
        file["particleFeatureNames"] = np.array([*PARTICLE_FEATURES, "j1_pdgid"], "S")
    part.replace(path)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--jets", type=int, default=10000)
    options.add_argument("--files", type=int, default=5)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    if not 1 <= chosen.files <= chosen.jets:
        options.error(f"--files {chosen.files}: choose from 1 to --jets {chosen.jets}")
    paths = provide(chosen.folder, chosen.jets, chosen.files, chosen.seed)
    print(f"{chosen.jets} jets in {paths[0].parent}: {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main()
