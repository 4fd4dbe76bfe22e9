"""Exact state: saving copies, loading keeps the memory, and a state that does not match is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from nnlo_common import SGD, ConfigurationError
from nnlo_common.algorithms._rule import GradientSum
from nnlo_common.base._state_tree import Stateful


class Inner(Stateful):
    saved = ("vector", "count")

    def __init__(self) -> None:
        self.vector = np.zeros(2, np.float32)
        self.count = 0


class Outer(Stateful):
    """Has every kind of attribute that can be saved, and a scratch buffer that is not saved."""

    saved = ("clock", "rate", "vector", "waiting", "inner", "optimizer")

    def __init__(self, clock: int = 0) -> None:
        self.clock, self.rate = clock, 0.5
        self.vector = np.arange(3, dtype=np.float32) + clock
        self.waiting = [np.full(2, float(i), np.float32) for i in range(clock)]
        self.inner = Inner()
        self.optimizer = SGD(0.1, momentum=0.9)
        self.scratch = np.ones(3, np.float32)

    def step(self) -> None:
        self.clock += 1
        self.optimizer.step(self.vector, self.scratch)
        self.waiting.append(self.vector.copy())
        self.inner.vector += self.vector[:2]
        self.inner.count += 1


def moved(steps: int = 3) -> Outer:
    outer = Outer()
    for _ in range(steps):
        outer.step()
    return outer


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return (str(state.dtype), state.tolist()) if isinstance(state, np.ndarray) else state


def test_a_loaded_object_goes_on_bit_for_bit() -> None:
    one, other = moved(3), Outer(9)
    other.load(pickle.loads(pickle.dumps(one.state())))
    assert plain(other.state()) == plain(one.state())
    for outer in (one, other):
        outer.step()
    assert plain(other.state()) == plain(one.state())
    assert set(one.state()) == {"type", "clock", "rate", "vector", "waiting", "inner", "optimizer"}


def test_a_state_shares_no_memory_with_what_it_was_taken_from_or_loaded_into() -> None:
    one = moved(3)
    state = one.state()
    kept = plain(state)
    other = Outer()
    other.load(state)
    for outer in (one, other):
        outer.step()
        outer.waiting[0][:] = 77
        assert plain(state) == kept
    state["vector"][:] = state["waiting"][1][:] = state["inner"]["vector"][:] = 99
    assert 99 not in other.vector
    assert 99 not in other.waiting[1]
    assert 99 not in other.inner.vector


def test_arrays_are_loaded_in_place_so_that_views_of_them_stay_valid() -> None:
    target, state = Outer(), moved(2).state()
    view, inner = target.vector[1:], target.inner
    target.load(state)
    assert view.tolist() == state["vector"][1:].tolist()
    assert target.inner is inner
    assert target.inner.vector.tolist() == state["inner"]["vector"].tolist()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"clock": None}, r"Outer must have \['clock', .*it has \['inner'"),
        ({"extra": 1}, "resume with the algorithm and version"),
        ({"clock": 1.5}, "clock in .* Outer must be a int, but it is 1.5"),
        ({"clock": "3"}, "clock in .* Outer must be a int, but it is '3'"),
        ({"waiting": 3}, "waiting in .* Outer must be a list, but it is 3"),
        ({"vector": np.zeros(4, np.float32)}, r"vector .* must be float32\[3\], but it is float32\[4\]"),
        ({"vector": np.zeros(1, np.float32)}, r"it is float32\[1\]; resume with the model"),
        ({"vector": np.zeros((3, 1), np.float32)}, r"it is float32\[3, 1\]"),
        ({"vector": np.zeros(3)}, r"must be float32\[3\], but it is float64\[3\]"),
        ({"vector": [0.0, 0.0, 0.0]}, r"must be float32\[3\], but it is a list"),
        ({"vector": 0.0}, r"must be float32\[3\], but it is 0.0"),
        ({"inner": {"type": "Inner", "vector": np.zeros(2, np.float32)}}, r"Inner must have \['count'"),
        ({"inner": {"type": "Inner", "vector": np.zeros(3, np.float32), "count": 1}}, "vector in .* Inner"),
        ({"inner": {"type": "Other", "vector": np.zeros(2, np.float32), "count": 1}}, "type in .* Inner"),
        ({"inner": None}, "inner"),
        ({"type": "Other"}, "type in .* Outer must be 'Outer', but it is 'Other'"),
        ({"optimizer": {"learning_rate": 0.1}}, "SGD"),
        ({"optimizer": None}, "optimizer"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], problem: str) -> None:
    target, state = Outer(1), moved(2).state()
    before = plain(target.state())
    if change == {"clock": None}:
        del state["clock"]
    else:
        state |= change
    with pytest.raises(ConfigurationError, match=problem):
        target.load(state)
    assert plain(target.state()) == before


def test_a_gradient_sum_of_one_is_that_gradient_and_is_resumed_half_full() -> None:
    gradients = np.float32([[0.1, -0.0], [0.7, 3e-8], [1e-3, 5.0]])
    total = GradientSum(2)
    total.add(gradients[0])
    assert total.take().tobytes() == gradients[0].tobytes()  # -0.0 stays -0.0
    for gradient in gradients[:2]:
        total.add(gradient)
    resumed = GradientSum(2)
    resumed.load(total.state())
    for one in (total, resumed):
        one.add(gradients[2])
        assert one.take().tolist() == (gradients[0] + gradients[1] + gradients[2]).tolist()
        assert one.count == 0
