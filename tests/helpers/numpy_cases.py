"""Trainings that are run over MPI and again in the virtual cluster, and their common ingredients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nnlo_common import (
    AGN,
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    Adagrad,
    Adam,
    DiLoCo,
    Downpour,
    DynSGD,
    LocalSGD,
    Synchronous,
    VectorOptimizer,
)
from nnlo_common.algorithms import Algorithm

SHAPES = [(40, 30), (30,), (30, 7), (7,)]
#: So many numbers that also one of two servers replies in parts (of 2 ** 17).
LONG = [(800, 700), (699,), (5, 3)]
STEPS = 12
EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """One training; `optimizer` goes where the algorithm wants it."""

    algorithm: Algorithm
    optimizer: Callable[[], VectorOptimizer] | None = None
    long: bool = False


CASES = {
    "downpour": Case(Downpour(), lambda: Adam(0.01)),
    "downpour_dean": Case(Downpour(n_push=3, n_fetch=2, local_learning_rate=0.05), lambda: Adagrad(0.1)),
    "downpour_warm": Case(Downpour(warm_start=3), lambda: SGD(0.1)),
    "downpour_lag": Case(Downpour(lag=1), lambda: SGD(0.1, momentum=0.5)),
    "synchronous": Case(Synchronous(), lambda: SGD(0.2)),
    "easgd": Case(EASGD(every=2), lambda: SGD(0.1)),
    "easgd_paper": Case(EASGD(every=3, order="paper", beta=0.5), lambda: SGD(0.1)),
    "easgd_synchronous": Case(EASGD(every=2, synchronous=True), lambda: SGD(0.1)),
    "easgd_lag": Case(EASGD(every=1, lag=1, beta=0.4), lambda: SGD(0.1)),
    "eamsgd": Case(EAMSGD(every=2, learning_rate=0.02, momentum=0.9, beta=0.5)),
    "gem": Case(GEM(learning_rate=0.05)),
    "gem_lag": Case(GEM(learning_rate=0.02, lag=1, kappa=2.0, gradient_at="center")),
    "agn": Case(AGN(every=3, local_learning_rate=0.1), lambda: SGD(0.1)),
    "dynsgd": Case(DynSGD(every=2), lambda: SGD(0.1)),
    "localsgd": Case(LocalSGD(every=3, warmup=2), lambda: SGD(0.1)),
    "localsgd_lag": Case(LocalSGD(every=2, lag=2), lambda: SGD(0.1)),
    "diloco": Case(DiLoCo(every=4), lambda: Adam(0.01)),
}
LONG_CASES = {
    "downpour_long": Case(Downpour(), lambda: Adam(0.01), long=True),
    "dynsgd_long": Case(DynSGD(), lambda: SGD(0.1, momentum=0.9), long=True),
    "easgd_long": Case(EASGD(every=1), lambda: SGD(0.1), long=True),
    "downpour_lag_long": Case(Downpour(lag=1), lambda: SGD(0.1), long=True),
}


def initial(*, long=False):
    """The parameters at the start."""
    draw = np.random.default_rng(5)
    return [draw.standard_normal(shape).astype("f4") for shape in (LONG if long else SHAPES)]


def gradient(x, rank, step):
    """Of a quadratic, with noise that depends on the rank and the step only."""
    noise = np.random.default_rng([rank, step]).standard_normal(x.size, dtype=np.float32)
    return np.linspace(0.2, 1.0, x.size, dtype=np.float32) * x + np.float32(0.1) * noise
