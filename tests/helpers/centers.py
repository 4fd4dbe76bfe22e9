"""What the facts are compared with: textbook linear algebra, and a way to watch the centre move.

Nothing here imports a rule: the maps are written down again, in float64, from the papers' equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from nnlo_common.algorithms import CenterRule
from nnlo_common.testing import ByTime, Interleaved, RandomOrder, RoundRobin, Schedule

Matrix = NDArray[np.float64]

#: New schedules by name, from a seed: a schedule remembers where it stands, so no two runs share one.
SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "round_robin": lambda seed: RoundRobin(),
    "random": RandomOrder,
    "interleaved": Interleaved,
    "by_time": ByTime,
}


@contextmanager
def watched_centers() -> Iterator[list[Matrix]]:
    """The centre after every commit of the runs inside, in float64."""
    trail: list[Matrix] = []
    commit = CenterRule.commit

    def watched(self: CenterRule, contributions: object) -> None:
        commit(self, contributions)
        trail.append(self.center.astype(np.float64))

    with mock.patch.object(CenterRule, "commit", watched):
        yield trail


def elastic_period(
    p: int, e: float, alpha: float, *, tau: int = 1, order: str = "step_first", synchronous: bool = False
) -> tuple[Matrix, Matrix]:
    """One period (tau steps of each worker, one exchange of each, in turn) on the gradient e x + noise.

    Returns:
        What becomes of the state (c, x_1, ..., x_p): z <- A z + B w, where the columns of B are the noises
        w, of unit size after the learning rate, in the first step of each worker, then in the second, ...
    """
    noises = p * tau
    z = np.eye(1 + p, 1 + p + noises)
    unit = np.eye(noises, 1 + p + noises, 1 + p)

    def exchange(pulled: Matrix) -> None:
        # Jacobi: all at once; otherwise one worker after the other.
        for group in [range(1, p + 1)] if synchronous else [[i] for i in range(1, p + 1)]:
            forces = {i: alpha * (z[i] - z[0]) for i in group}
            for i, force in forces.items():
                z[0] += force
                pulled[i - 1] -= force

    for step in range(tau):
        moved = (1 - e) * z[1:] - unit[step * p : (step + 1) * p]
        if order == "paper" and step == 0:  # the exchange sees the snapshot at which the gradient is taken
            exchange(moved)
        elif order == "step_first" and step == tau - 1:
            z[1:] = moved
            exchange(moved)
        z[1:] = moved
    return z[:, : 1 + p], z[:, 1 + p :]


def radius(matrix: Matrix) -> float:
    """The spectral radius."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def stationary(a: Matrix, b: Matrix) -> Matrix:
    """The covariance V = A V A' + B B' that unit white noise keeps up (discrete Lyapunov equation)."""
    size = len(a)
    return np.linalg.solve(np.eye(size**2) - np.kron(a, a), (b @ b.T).ravel()).reshape(size, size)
