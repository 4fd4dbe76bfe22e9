"""A step or a commit that is made part by part has the bits of one that is made at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from nnlo_common import AGN, EAMSGD, EASGD, GEM, LARS, SGD, Downpour, DynSGD, LocalSGD
from nnlo_common.algorithms import Algorithm, Contribution
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer, moves
from nnlo_common.base._flat_vector import blocks
from tests.algorithms.test_vector_optimizers import CASES

SIZE = 600_007  # three blocks of most optimizers and a rest
#: Parts that neither divide the vector nor are divided by blocks.
PARTS = [slice(0, 1), slice(1, 340_003), slice(340_003, SIZE)]


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype("f4")


def test_blocks_cut_a_part_and_nothing_else() -> None:
    for part in PARTS:
        cut = list(blocks(part, 65_536))
        assert [cut[0].start, *(one.stop for one in cut)] == [*(one.start for one in cut), part.stop]
        assert cut[0].start == part.start
        assert max(one.stop - one.start for one in cut) <= 65_536


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_steps_block_by_block(name: str) -> None:
    at_once, by_parts = CASES[name](), CASES[name]()
    x, y = numbers(0), numbers(0)
    for step in range(3):
        gradient = numbers(step + 1)
        at_once.step(x, gradient)
        move = moves(by_parts, y, gradient)
        assert move is not None
        for part in PARTS:
            move(part)
        np.testing.assert_array_equal(x, y)
    assert at_once.state().keys() == by_parts.state().keys()
    for key, value in at_once.state().items():
        np.testing.assert_array_equal(value, by_parts.state()[key])


def test_an_optimizer_that_needs_whole_parameters_is_not_cut() -> None:
    assert moves(LARS(0.1), numbers(0), numbers(1)) is None


class Foreign:
    """An optimizer of a framework: it can only step a whole vector."""

    learning_rate = 0.1

    def step(self, x: np.ndarray, gradient: np.ndarray) -> None:
        x -= np.float32(0.1) * gradient


#: An algorithm, the optimizer of its centre, and whether it can apply parts.
CENTERS: list[tuple[Algorithm, Callable[[], VectorOptimizer | None], bool]] = [
    (EASGD(alpha=0.3), lambda: None, True),
    (EAMSGD(learning_rate=0.1, alpha=0.3), lambda: None, True),
    (Downpour(), lambda: SGD(0.1), True),
    (Downpour(), lambda: SGD(0.1, momentum=0.9), True),
    (Downpour(), Foreign, False),
    (DynSGD(), lambda: SGD(0.1), True),
    (DynSGD(), Foreign, False),
    (AGN(local_learning_rate=0.1), lambda: SGD(0.1), True),
    (GEM(learning_rate=0.1), lambda: None, False),
    (LocalSGD(), lambda: None, False),
]


@pytest.mark.parametrize(("algorithm", "optimizer", "can"), CENTERS)
def test_a_centre_moves_and_replies_part_by_part(algorithm, optimizer, can) -> None:
    at_once, by_parts = (algorithm.center(numbers(0), 3, optimizer()) for _ in range(2))
    for turn in range(3):
        vectors = [numbers(turn + 1), numbers(turn + 1)]
        at_once.commit([Contribution(1, vectors[0], staleness=turn, weight=0.7)])
        at_once.reply(vectors[0])
        contribution = Contribution(1, vectors[1], staleness=turn, weight=0.7)
        move = by_parts.commit_by_parts(contribution)
        assert (move is not None) == can
        if move is None:
            np.testing.assert_array_equal(vectors[1], numbers(turn + 1))  # else it would count twice
            assert by_parts.clock == turn
            by_parts.commit([contribution])
        for part in PARTS:
            if move is not None:
                move(part)
            else:
                by_parts.reply(vectors[1], part)
        np.testing.assert_array_equal(at_once.center, by_parts.center)
        np.testing.assert_array_equal(*vectors)
        assert at_once.clock == by_parts.clock == turn + 1
