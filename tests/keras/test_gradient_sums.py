"""The sums of gradients, on the back end that KERAS_BACKEND names: exact, with marks, in turn."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from nnlo_common import FlatVector  # noqa: E402
from nnlo_common.base._flat_vector import PRESENT  # noqa: E402
from nnlo_keras._sums import _traced, gradient_sum  # noqa: E402
from nnlo_keras._variable_layout import layout_of  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BACKEND = keras.backend.backend()
SHAPES = [(3, 4), (), (16,), (0,), (5,), (70, 1000), (7,)]


class Holder(keras.optimizers.SGD):
    """An optimizer that adds up, as the wrappers do."""

    def __init__(self, variables):
        super().__init__()
        self.sum = gradient_sum(self, variables)


class Case:
    """A sum of gradients of variables with all kinds of shapes, and what it should be."""

    def __init__(self, vectors=1, dtype="float32"):
        self.variables = [
            keras.Variable(np.zeros(shape), dtype=dtype, name=f"v{number}")
            for number, shape in enumerate(SHAPES)
        ]
        self.layout = layout_of(self.variables)
        self.vectors = [FlatVector(self.layout) for _ in range(vectors)]
        for flat in self.vectors:
            flat.vector.fill(np.nan)  # as if something had been left there
        self.sum = Holder(self.variables).sum
        self.sum.tie(self.vectors, None)
        self.sum.restart(0)
        self.draw = np.random.default_rng(1)
        self.dtype = dtype

    def gradients(self, without=()):
        made = [self.draw.standard_normal(shape).astype("f4") for shape in SHAPES]
        return [None if number in without else one for number, one in enumerate(made)]

    def add(self, gradients):
        self.sum.add(
            [None if one is None else keras.ops.convert_to_tensor(one, self.dtype) for one in gradients]
        )

    def collected(self, turn=0):
        self.sum.collect()
        flat = self.vectors[turn]
        there = flat.vector[self.layout.marks()]
        most = 1 if keras.backend.backend() == "torch" else 3  # elsewhere marks are added up, too
        assert set((there / PRESENT).tolist()) <= set(range(most + 1))
        return flat.views(), (there != 0).tolist()


def equal(views, gradients):
    return all(np.array_equal(view, one) for view, one in zip(views, gradients, strict=True))


def test_one_gradient_arrives_bit_for_bit():
    case = Case()
    gradients = case.gradients()
    case.add(gradients)
    views, there = case.collected()
    assert equal(views, gradients)
    assert all(there)


def test_several_are_added_up_and_a_new_sum_begins_at_nothing():
    case = Case()
    for count in (3, 1, 2):
        total = [np.zeros(shape, "f4") for shape in SHAPES]
        for _ in range(count):
            gradients = case.gradients()
            total = [np.float32(one + more) for one, more in zip(total, gradients, strict=True)]
            case.add(gradients)
        assert equal(case.collected()[0], total)
        case.sum.restart(0)


def test_what_has_no_gradient_is_zero_and_has_no_mark():
    case = Case()
    case.add(case.gradients())
    case.collected()
    case.sum.restart(0)
    gradients = case.gradients(without=(0, 5))
    case.add(gradients)
    views, there = case.collected()
    assert equal(
        views, [np.zeros(shape) if one is None else one for shape, one in zip(SHAPES, gradients, strict=True)]
    )
    assert there == [number not in (0, 5) for number in range(len(SHAPES))]


def test_a_gradient_that_comes_in_a_later_batch_counts():
    case = Case()
    first, second = case.gradients(without=(2, 5)), case.gradients(without=(0,))
    case.add(first)
    case.add(second)
    views, there = case.collected()
    zeros = [np.zeros(shape, "f4") for shape in SHAPES]
    total = [
        zero + (0 if one is None else one) + (0 if other is None else other)
        for zero, one, other in zip(zeros, first, second, strict=True)
    ]
    assert equal(views, total)
    assert all(there)


def test_a_sum_that_nothing_was_added_to_is_zero():
    """As where a loss scale has skipped the only batch."""
    case = Case()
    case.add(case.gradients())
    case.collected()
    case.sum.restart(0)
    views, there = case.collected()
    assert not any(view.any() for view in views)
    assert not any(there)


def test_sums_come_into_vectors_in_turn():
    """The one before stays as it is: it may still travel."""
    case = Case(vectors=3)
    kept = []
    for step in range(7):
        gradients = case.gradients(without=(step % len(SHAPES),))
        case.add(gradients)
        views, _ = case.collected(turn=step % 3)
        kept.append([view.copy() for view in views])
        if step:
            assert equal(case.vectors[(step - 1) % 3].views(), kept[-2])
        case.sum.restart((step + 1) % 3)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere sums are copied")
def test_a_sum_travels_from_where_it_lies_and_stays_as_it_is_meanwhile():
    case, frames = Case(vectors=2), []
    own = [flat.frame.bytes for flat in case.vectors]
    for turn in (0, 1, 0, 1):
        case.sum.restart(turn)
        assert case.vectors[turn].frame.bytes is own[turn]
        gradients = case.gradients()
        case.add(gradients)
        views, _ = case.collected(turn)
        assert equal(views, gradients)
        memory = case.vectors[turn].frame.bytes
        assert memory is not own[turn]
        memory[:64] = turn + 1  # a header
        frames.append((memory, memory.tobytes()))
    case.add(case.gradients())  # to the sum that has just been taken
    for memory, before in frames[-2:]:
        assert memory.tobytes() == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_added_up_in_32(dtype):
    case = Case(dtype=dtype)
    case.add([np.full(shape, 1.0) for shape in SHAPES])
    case.add([np.full(shape, 2.0**-12) for shape in SHAPES])  # which 16 bits would lose
    views, _ = case.collected()
    assert equal(views, [np.full(shape, np.float32(1 + 2.0**-12)) for shape in SHAPES])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="torch compiles nothing; on JAX the tests of fit do it")
def test_it_is_part_of_a_compiled_step():
    import tensorflow as tf

    case = Case()

    step = tf.function(case.add)
    gradients = [case.gradients() for _ in range(3)]
    for one in gradients:
        step([tf.constant(piece) for piece in one])
    assert equal(case.collected()[0], [np.float32(a + b) + c for a, b, c in zip(*gradients, strict=True)])


@pytest.mark.parametrize("large", [0, 1, 20, 1 << 30])
def test_small_variables_share_a_sum(large, monkeypatch):
    """However many are put together, what arrives is the same."""
    monkeypatch.setattr(_traced, "_LARGE", large)
    test_several_are_added_up_and_a_new_sum_begins_at_nothing()
    test_what_has_no_gradient_is_zero_and_has_no_mark()
