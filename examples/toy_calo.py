"""Toy showers in a calorimeter, for a GAN to imitate: 12 layers of 7 x 7 cells, not a physics simulation.

The longitudinal and lateral profiles are parametrised much as by Grindhammer and Peters (hep-ex/0001020).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LAYERS, CELLS = 12, 7
LENGTHS = 2.0  # radiation lengths in a layer
CRITICAL_GEV = 0.008
QUANTUM_GEV = 0.02  # energy of one count; Poisson fluctuations of the counts stand for sampling

Rows = npt.NDArray[np.float32]
RADIUS = np.hypot(*(np.mgrid[:CELLS, :CELLS] - (CELLS - 1) / 2))


def make_showers(count: int, seed: int) -> tuple[Rows, Rows]:
    """Return the energy in each cell as a share of the electron's energy, and that energy in GeV.

    The shapes are (count, 12, 7, 7) and (count, 1). Equal seeds give equal showers.

    Example:
        >>> cells, energy = make_showers(100, seed=1)
        >>> cells.shape, energy.shape, bool(abs(cells.sum(axis=(1, 2, 3)).mean() - 1) < 0.02)
        ((100, 12, 7, 7), (100, 1), True)
    """
    draw = np.random.default_rng(seed)
    energy = draw.uniform(10, 100, (count, 1))
    deepest = (np.log(energy / CRITICAL_GEV) - 0.5) * draw.normal(1, 0.08, (count, 1))
    falling = 0.5 * np.exp(draw.normal(0, 0.05, (count, 1)))
    depth = (np.arange(LAYERS) + 0.5) * LENGTHS
    along = depth ** (falling * deepest) * np.exp(-falling * depth)
    along /= along.sum(axis=1, keepdims=True)
    expected = along[..., None, None] * _across(depth / deepest) * energy[..., None, None]
    counted = draw.poisson(expected / QUANTUM_GEV) * QUANTUM_GEV
    return (counted / energy[..., None, None]).astype(np.float32), energy.astype(np.float32)


def _across(age: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The lateral profile of each layer: a core and a tail, both widening with the shower age."""
    age = age[..., None, None]
    core, tail = 0.35 + 0.2 * age, 1.0 + 0.8 * age
    in_core = np.clip(0.9 - 0.25 * age, 0.3, 0.95)
    both = in_core * (core / (RADIUS**2 + core**2)) ** 2 + (1 - in_core) * (tail / (RADIUS**2 + tail**2)) ** 2
    return both / both.sum(axis=(2, 3), keepdims=True)


def differences(made: Rows, true: Rows) -> dict[str, float]:
    """Return the distances of generated showers from true ones; 0 is perfect.

    `along` and `across` are the shares of energy in the wrong layer and at the wrong distance from the axis,
    averaged over all showers; `response` is the mean distance between the sorted sums of all cells.
    """
    rings, ring = np.unique(RADIUS, return_inverse=True)

    def profiles(cells: Rows) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        mean = cells.mean(axis=0, dtype=np.float64) / cells.sum(axis=(1, 2, 3)).mean(dtype=np.float64)
        return mean.sum(axis=(1, 2)), np.bincount(ring.ravel(), mean.sum(axis=0).ravel(), len(rings))

    found = {
        name: float(np.abs(one - other).sum() / 2)
        for name, one, other in zip(("along", "across"), profiles(made), profiles(true), strict=True)
    }
    at = np.linspace(0.005, 0.995, 100)
    sums = (np.quantile(cells.sum(axis=(1, 2, 3)), at) for cells in (made, true))
    return found | {"response": float(np.abs(np.subtract(*sums)).mean())}
