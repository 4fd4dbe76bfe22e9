"""Toy jets from one to three partons, which radiate, become hadrons and are detected.

Simple enough to read at once, rich enough to need a network. `toy_jets.py` writes them to files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CLASSES = ("g", "q", "w", "z", "t")
G, Q, W, Z, T = range(len(CLASSES))
MASSES = np.array([0.0, 0.0, 80.4, 91.2, 172.5])  # of the classes, in GeV
WIDTHS = np.array([0.0, 0.0, 2.1, 2.5, 1.4])
RESOLUTION = 0.07  # of a resonance's mass; smaller is easier
RADIUS = 0.8
GLUON, QUARK = 3.0, 4 / 3  # color factors: how strongly each radiates
COUPLING, HARDEST_SHARE, SOFTEST_GEV = 0.14, 0.6, 0.8

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Shower(NamedTuple):
    """Particles of all jets: the jet of each, its momentum, its color factor and emission cone."""

    jet: Integers
    pt: Floats
    eta: Floats
    phi: Floats
    color: Floats
    cone: Floats

    @classmethod
    def of(cls, jet: Integers, momentum: Floats, color: float, cone: Floats) -> Shower:
        """Make partons from rows of (E, px, py, pz)."""
        return cls(jet, *direction(momentum), np.full(len(jet), color), cone)


def detected(draw: np.random.Generator, label: Integers) -> Shower:
    """Return the particles of one jet for each label, unsorted."""
    count = len(label)
    axis = (
        800 + draw.gamma(9.0, 25.0, count).clip(0, 780),
        draw.normal(0, 0.85, count).clip(-2.2, 2.2),
        draw.uniform(-np.pi, np.pi, count),
    )
    partons = _joined(list(_hard_partons(draw, label, axis)))
    hadrons = _hadrons(draw, _radiated(draw, partons))
    return _measured(draw, _on_the_pole(draw, hadrons, label, axis), axis)


# The hard process: one to three partons in each jet.


def _hard_partons(draw: np.random.Generator, label: Integers, axis: tuple[Floats, ...]) -> Iterator[Shower]:
    mass = MASSES[label] + WIDTHS[label] / 2 * _tails(draw, len(label))
    pt, eta, phi = axis
    momentum = np.stack([pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)], axis=1)
    energy = np.sqrt((momentum**2).sum(axis=1) + mass**2)
    whole = np.column_stack([energy, momentum])
    for one, color in ((G, GLUON), (Q, QUARK)):
        jet = np.flatnonzero(label == one)
        yield Shower.of(jet, whole[jet], color, np.full(len(jet), RADIUS))
    jet = np.flatnonzero((label == W) | (label == Z))
    yield from _quark_pair(draw, jet, whole[jet])
    jet = np.flatnonzero(label == T)
    boson_mass = MASSES[W] + WIDTHS[W] / 2 * _tails(draw, len(jet))
    bottom, boson = _decayed(draw, whole[jet], 4.8, boson_mass)
    yield Shower.of(jet, bottom, QUARK, _distance(bottom, boson).clip(0.3, RADIUS))
    yield from _quark_pair(draw, jet, boson)


def _tails(draw: np.random.Generator, count: int) -> Floats:
    """Breit-Wigner deviations in half widths, without the far tails."""
    return np.tan(np.pi * (draw.uniform(0.03, 0.97, count) - 0.5))


def _quark_pair(draw: np.random.Generator, jet: Integers, parent: Floats) -> Iterator[Shower]:
    one, other = _decayed(draw, parent, 0.0, np.zeros(len(jet)))
    cone = _distance(one, other).clip(0.02, RADIUS)
    yield Shower.of(jet, one, QUARK, cone)
    yield Shower.of(jet, other, QUARK, cone)


def _decayed(
    draw: np.random.Generator, parent: Floats, mass: float, other_mass: Floats
) -> tuple[Floats, Floats]:
    """Decay each row (E, px, py, pz) into two daughters, isotropic in its rest frame."""
    total = np.sqrt(np.maximum(parent[:, 0] ** 2 - (parent[:, 1:] ** 2).sum(axis=1), 1e-6))
    product = (total**2 - (mass + other_mass) ** 2) * (total**2 - (mass - other_mass) ** 2)
    size = np.sqrt(np.maximum(product, 0)) / (2 * total)
    cosine, angle = draw.uniform(-1, 1, len(total)), draw.uniform(0, 2 * np.pi, len(total))
    sine = np.sqrt(1 - cosine**2)
    rest = size[:, None] * np.stack([sine * np.cos(angle), sine * np.sin(angle), cosine], axis=1)
    velocity, gamma = parent[:, 1:] / parent[:, :1], parent[:, 0] / total
    return (
        _boosted(rest, np.sqrt(size**2 + mass**2), velocity, gamma),
        _boosted(-rest, np.sqrt(size**2 + other_mass**2), velocity, gamma),
    )


def _boosted(momentum: Floats, energy: Floats, velocity: Floats, gamma: Floats) -> Floats:
    along = (velocity * momentum).sum(axis=1)
    square = np.maximum((velocity**2).sum(axis=1), 1e-12)
    shift = (gamma - 1) * along / square + gamma * energy
    return np.column_stack([gamma * (energy + along), momentum + shift[:, None] * velocity])


# From partons to hadrons.


def _radiated(draw: np.random.Generator, partons: Shower) -> Shower:
    """Emit three generations of soft and collinear gluons."""
    done = []
    for _ in range(3):
        left, partons = _emitted(draw, partons)
        done.append(left)
    return _joined([*done, partons])


def _emitted(draw: np.random.Generator, parent: Shower) -> tuple[Shower, Shower]:
    """Return the partons after emission and their gluons, uniform in the logs of share and angle."""
    size = len(parent.pt)
    log = np.log(np.maximum(parent.pt * parent.cone / SOFTEST_GEV, 1.0))
    i = np.repeat(np.arange(size), draw.poisson(COUPLING * parent.color / np.pi * log**2))
    soft, narrow = draw.uniform(size=(2, len(i)))
    outside = soft + narrow > 1
    soft[outside], narrow[outside] = 1 - soft[outside], 1 - narrow[outside]
    share = np.exp(-log[i] * soft - 0.75)
    share *= np.minimum(1, HARDEST_SHARE / np.maximum(np.bincount(i, share, size), 1e-9))[i]
    angle = parent.cone[i] * np.exp(-log[i] * narrow)
    around = draw.uniform(0, 2 * np.pi, len(i))
    eta, phi = angle * np.cos(around), angle * np.sin(around)
    left = parent._replace(
        pt=parent.pt * (1 - np.bincount(i, share, size)),
        eta=parent.eta - np.bincount(i, share * eta, size),
        phi=parent.phi - np.bincount(i, share * phi, size),
    )
    at = parent.eta[i] + eta * (1 - share), parent.phi[i] + phi * (1 - share)
    gluons = Shower(parent.jet[i], parent.pt[i] * share, *at, np.full(len(i), GLUON), angle)
    return left, gluons


def _hadrons(draw: np.random.Generator, partons: Shower) -> Shower:
    """Split each parton into a few hadrons with random momentum shares, spread by their kT."""
    size = len(partons.pt)
    i = np.repeat(np.arange(size), 1 + draw.poisson(1.1 * np.log1p(partons.pt / 0.7) ** 1.15))
    share = draw.gamma(0.7, 1, len(i)) + 1e-4
    pt = partons.pt[i] * share / np.bincount(i, share, size)[i]
    spread = np.minimum(draw.rayleigh(0.18, len(i)) / np.maximum(pt, 0.3), 0.5)
    around = draw.uniform(0, 2 * np.pi, len(i))
    return taken(partons, i)._replace(
        pt=pt, eta=partons.eta[i] + spread * np.cos(around), phi=partons.phi[i] + spread * np.sin(around)
    )


def _on_the_pole(
    draw: np.random.Generator, hadrons: Shower, label: Integers, axis: tuple[Floats, ...]
) -> Shower:
    """Scale opening angles to the mass of the resonance, which massless splittings have inflated."""
    _, eta, phi = axis
    x, y = hadrons.eta - eta[hadrons.jet], turned(hadrons.phi - phi[hadrons.jet])
    scalar, first, second, square = (
        np.bincount(hadrons.jet, hadrons.pt * one, len(label))
        for one in (np.ones_like(x), x, y, x * x + y * y)
    )
    reached = np.sqrt(np.maximum(scalar * square - first**2 - second**2, 1))
    wanted = MASSES[label] * np.exp(draw.normal(0, RESOLUTION, len(label)))
    scale = np.where(MASSES[label] > 0, wanted / reached, 1.0).clip(0.3, 3)[hadrons.jet]
    return hadrons._replace(eta=eta[hadrons.jet] + scale * x, phi=phi[hadrons.jet] + scale * y)


def _measured(draw: np.random.Generator, hadrons: Shower, axis: tuple[Floats, ...]) -> Shower:
    """Add the underlying event, smear all particles, and cut at the jet radius."""
    _, eta, phi = axis
    jet = np.repeat(np.arange(len(eta)), draw.poisson(2, len(eta)))
    radius = RADIUS * np.sqrt(draw.uniform(size=len(jet)))
    around = draw.uniform(0, 2 * np.pi, len(jet))
    at = eta[jet] + radius * np.cos(around), phi[jet] + radius * np.sin(around)
    zeros = np.zeros(len(jet))
    under = Shower(jet, 0.3 + draw.exponential(0.3, len(jet)), *at, zeros, zeros)
    every = _joined([hadrons, under])
    smeared = every._replace(
        pt=every.pt * np.exp(draw.normal(0, 0.03, len(every.pt))),
        eta=every.eta + draw.normal(0, 0.002, len(every.pt)),
        phi=every.phi + draw.normal(0, 0.002, len(every.pt)),
    )
    off = np.hypot(smeared.eta - eta[smeared.jet], turned(smeared.phi - phi[smeared.jet]))
    return taken(smeared, (off < RADIUS) & (smeared.pt > 0.1))


# Angles, and lists of particles.


def direction(momentum: Floats) -> tuple[Floats, Floats, Floats]:
    """Return pt, eta and phi of rows (E, px, py, pz)."""
    _, px, py, pz = momentum.T
    pt = np.hypot(px, py)
    return pt, np.arcsinh(pz / pt), np.arctan2(py, px)


def _distance(one: Floats, other: Floats) -> Floats:
    (_, eta, phi), (_, other_eta, other_phi) = direction(one), direction(other)
    return np.hypot(eta - other_eta, turned(phi - other_phi))


def turned(angle: Floats) -> Floats:
    """Wrap an angle into -pi to pi."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def _joined(parts: list[Shower]) -> Shower:
    return Shower(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def taken(shower: Shower, which: npt.NDArray[np.generic]) -> Shower:
    return Shower(*(column[which] for column in shower))
