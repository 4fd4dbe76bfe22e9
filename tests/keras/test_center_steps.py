"""Steps of the centre's optimizer, on the back end of KERAS_BACKEND, with memory that is used again."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from nnlo_common import FlatVector  # noqa: E402
from nnlo_keras._flat_variables import flat_variables  # noqa: E402
from nnlo_keras._variable_layout import layout_of  # noqa: E402
from nnlo_keras._weights import stepper  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


class Before(keras.optimizers.Optimizer):
    """Steps with the gradient before, which it keeps as it was given."""

    def build(self, variables):
        super().build(variables)
        self.kept = [self.add_variable_from_reference(one, name="kept") for one in variables]

    def update_step(self, gradient, variable, learning_rate):
        kept = self.kept[self._get_variable_index(variable)]
        self.assign_sub(variable, keras.ops.convert_to_tensor(kept) * learning_rate)
        kept.assign(gradient)


class Case:
    """Two variables of a centre, stepped with gradients that always come in the same memory."""

    def __init__(self, optimizer, shapes=((3, 2), (5,)), prepare=lambda variables: None):
        self.variables = [keras.Variable(np.ones(shape, "f4"), name="v") for shape in shapes]
        prepare(self.variables)
        self.optimizer = optimizer
        optimizer.build(self.variables)
        layout = layout_of(self.variables)
        self.center, self.message = FlatVector(layout), FlatVector(layout)
        way = flat_variables(self.variables, self.center)
        pieces = [segment.place for segment in layout.segments]
        self._step = stepper(optimizer, self.variables, pieces, self.center.views(), way.read)

    def step(self, number, present=(True, True)):
        self.message.vector.fill(number)
        self._step(self.message.vector, present)
        self.message.vector.fill(np.nan)  # the next message
        values = [keras.ops.convert_to_numpy(one) for one in self.variables]
        for view, value in zip(self.center.views(), values, strict=True):
            assert np.array_equal(view, value)
        return [float(value.ravel()[0]) for value in values]


def test_the_centre_is_what_the_optimizer_has_made():
    case = Case(keras.optimizers.SGD(0.5))
    assert case.step(2.0) == [0, 0]
    assert case.step(-4.0) == [2, 2]


def test_variables_without_a_gradient_stay():
    case = Case(keras.optimizers.SGD(0.5, momentum=0.5))
    assert case.step(2.0, (True, False)) == [0, 1]
    assert case.step(2.0, (False, True)) == [0, 0]
    assert case.step(2.0) == [-1.5, -1.5]


def test_an_optimizer_may_keep_a_gradient():
    """The message that it has come in is overwritten by the next one."""
    case = Case(Before(1.0))
    assert case.step(1.0) == [1, 1]
    assert case.step(2.0) == [0, 0]
    assert case.step(3.0) == [-2, -2]
    assert case.step(4.0) == [-5, -5]


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="about JAX")
def test_jax_steps_in_the_memory_of_the_old_values():
    case, places = Case(keras.optimizers.SGD(0.5, momentum=0.5), shapes=((200, 200), (5,))), set()
    for turn, weight in enumerate((0.0, -1.5, -3.25, -5.125)):
        assert case.step(2.0) == [weight, weight]
        if turn:
            state = (case.variables[0], case.optimizer.momentums[0])
            places.add(tuple(one.value.unsafe_buffer_pointer() for one in state))
    assert len(places) == 1


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="about JAX")
def test_jax_steps_variables_that_share_a_value():
    def share(variables):
        variables[1].assign(variables[0].value)

    case = Case(keras.optimizers.SGD(0.5), shapes=((5,), (5,)), prepare=share)
    assert case.step(2.0) == [0, 0]
    assert case.step(2.0, (True, False)) == [-1, 0]
