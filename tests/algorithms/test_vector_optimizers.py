"""The vector optimizers against their equations in float64, PyTorch, Keras and facts with a closed form.

Run as a program, this file compares SGD with PyTorch bit for bit; a test does that in a process of its own.
"""

from __future__ import annotations

import importlib
import io
import os
import platform
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnlo_common.algorithms._optimizers as module
import nnlo_common.algorithms._vector_optimizer as base
from nnlo_common.algorithms._lars import LARS
from nnlo_common.algorithms._optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    LookaheadMomentum,
    RMSprop,
)
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import ConfigurationError
from tests.helpers.paths import ROOT

Make = Callable[[], Any]
STEPS = 50
# Both epsilon forms, every option, and values of epsilon that are felt by a gradient of 1e-8.
CASES: dict[str, Make] = {
    "sgd": lambda: SGD(0.1),
    "sgd-decay": lambda: SGD(0.1, weight_decay=0.01),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "nesterov-decay": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "lookahead": lambda: LookaheadMomentum(0.1, momentum=0.9),
    "adagrad": lambda: Adagrad(0.1),
    "adagrad-torch": lambda: Adagrad(0.1, epsilon=1e-8, initial_accumulator=1e-4),
    "adagrad-keras": lambda: Adagrad(0.1, epsilon=1e-7, initial_accumulator=0.1, epsilon_form="keras"),
    "adagrad-keras-0": lambda: Adagrad(0.1, epsilon=1e-16, epsilon_form="keras"),
    "rmsprop": lambda: RMSprop(0.1),
    "rmsprop-keras": lambda: RMSprop(0.1, decay=0.9, epsilon=1e-7, epsilon_form="keras"),
    "adadelta": lambda: Adadelta(1.0),
    "adadelta-keras": lambda: Adadelta(0.1, decay=0.95, epsilon=1e-7),
    "adam": lambda: Adam(0.1),
    "adam-keras": lambda: Adam(0.1, epsilon=1e-7, epsilon_form="keras"),
    "adam-short": lambda: Adam(0.1, beta1=0.5, beta2=0.75, epsilon=1e-7, epsilon_form="keras"),
}
each_case = pytest.mark.parametrize("name", CASES)


def problem(seed: int = 0, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """A start and gradients whose coordinates are 0, tiny, ordinary, huge, sometimes 0, or of every size."""
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((steps, 60))
    scales = np.repeat([0.0, 1e-8, 1.0, 1e8, 1.0, 1.0], 10)
    gradients *= scales
    gradients[:, 40:50] *= rng.integers(0, 2, (steps, 10))
    gradients[:, 50:] *= 10.0 ** rng.uniform(-8, 8, (steps, 10))
    start = rng.standard_normal(60) * (np.arange(60) % 2)  # from 0 even the smallest step is seen
    return start.astype(np.float32), gradients.astype(np.float32)


def rate(name: str, step: int) -> float:
    """A learning rate that changes half-way."""
    return CASES[name]().learning_rate * (1.0 if step < STEPS // 2 else 0.25)


def run(optimizer: VectorOptimizer, x: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    x, path = x.copy(), []
    for gradient in gradients:
        optimizer.step(x, gradient)
        path.append(x.copy())
    return np.array(path)


def scheduled(name: str) -> np.ndarray:
    """The path of a case under the changing learning rate."""
    optimizer, (x, gradients), path = CASES[name](), problem(), []
    for step, gradient in enumerate(gradients):
        optimizer.learning_rate = rate(name, step)
        path.append(run(optimizer, x if not path else path[-1], gradient[None])[0])
    return np.array(path)


def assert_close(path: np.ndarray, expected: np.ndarray, rtol: float = 1e-6) -> None:
    """Compare relative to the largest value that each coordinate takes; so a coordinate near 0 counts too."""
    assert np.isfinite(expected).all()
    error = np.abs(path - expected.astype(np.float64)).max(axis=0)
    worst = np.argmax(error - rtol * np.abs(expected).max(axis=0))
    assert error[worst] <= rtol * np.abs(expected[:, worst]).max(), f"coordinate {worst}"


# --- the equations, in float64 ---------------------------------------------------------------------------


def sgd(o: SGD, x: np.ndarray, g: np.ndarray, s: dict[str, Any], t: int, lr: float) -> np.ndarray:
    g = g + o.weight_decay * x
    b = s["b"] = o.momentum * s.get("b", 0.0) + g
    return x - lr * (g + o.momentum * b if o.nesterov else b)


def lookahead(
    o: LookaheadMomentum, x: np.ndarray, g: np.ndarray, s: dict[str, Any], t: int, lr: float
) -> np.ndarray:
    v = s["v"] = o.momentum * s.get("v", 0.0) - lr * g
    return x + v


def root(o: Any, square: np.ndarray, epsilon: float) -> np.ndarray:
    return np.sqrt(square + epsilon) if o.epsilon_form == "keras" else np.sqrt(square) + epsilon


def adagrad(o: Adagrad, x: np.ndarray, g: np.ndarray, s: dict[str, Any], t: int, lr: float) -> np.ndarray:
    a = s["a"] = s.get("a", o.initial_accumulator) + g**2
    denominator = root(o, a, o.epsilon)
    return x - lr * np.divide(g, denominator, out=np.zeros_like(g), where=denominator > 0)


def rmsprop(o: RMSprop, x: np.ndarray, g: np.ndarray, s: dict[str, Any], t: int, lr: float) -> np.ndarray:
    a = s["a"] = o.decay * s.get("a", 0.0) + (1 - o.decay) * g**2
    return x - lr * g / root(o, a, o.epsilon)


def adadelta(o: Adadelta, x: np.ndarray, g: np.ndarray, s: dict[str, Any], t: int, lr: float) -> np.ndarray:
    a = s["a"] = o.decay * s.get("a", 0.0) + (1 - o.decay) * g**2
    d = np.sqrt(s.get("d", 0.0) + o.epsilon) / np.sqrt(a + o.epsilon) * g
    s["d"] = o.decay * s.get("d", 0.0) + (1 - o.decay) * d**2
    return x - lr * d


def adam(o: Adam, x: np.ndarray, g: np.ndarray, s: dict[str, Any], t: int, lr: float) -> np.ndarray:
    m = s["m"] = o.beta1 * s.get("m", 0.0) + (1 - o.beta1) * g
    v = s["v"] = o.beta2 * s.get("v", 0.0) + (1 - o.beta2) * g**2
    c1, c2 = 1 - o.beta1**t, 1 - o.beta2**t
    if o.epsilon_form == "keras":
        return x - lr * np.sqrt(c2) / c1 * m / (np.sqrt(v) + o.epsilon)
    return x - lr * (m / c1) / (np.sqrt(v / c2) + o.epsilon)


EQUATIONS: dict[type, Callable[..., np.ndarray]] = {
    SGD: sgd,
    LookaheadMomentum: lookahead,
    Adagrad: adagrad,
    RMSprop: rmsprop,
    Adadelta: adadelta,
    Adam: adam,
}


@each_case
def test_equation_in_float64(name: str) -> None:
    optimizer, (x, gradients) = CASES[name](), problem()
    x, state, path = x.astype(np.float64), {}, []
    for step, gradient in enumerate(gradients.astype(np.float64)):
        x = EQUATIONS[type(optimizer)](optimizer, x, gradient, state, step + 1, rate(name, step))
        path.append(x)
    assert_close(scheduled(name), np.array(path))


# --- PyTorch ---------------------------------------------------------------------------------------------

# name of the case, name of torch's optimizer, its options
TORCH: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "SGD", {}),
    ("sgd-decay", "SGD", {"weight_decay": 0.01}),
    ("momentum", "SGD", {"momentum": 0.9}),
    ("nesterov", "SGD", {"momentum": 0.9, "nesterov": True}),
    ("nesterov-decay", "SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adagrad-torch", "Adagrad", {"eps": 1e-8, "initial_accumulator_value": 1e-4}),
    ("rmsprop", "RMSprop", {}),
    ("adadelta", "Adadelta", {}),
    ("adam", "Adam", {}),
]


def torch_path(
    name: str, options: dict[str, Any], x: np.ndarray, gradients: np.ndarray, rates: Iterator[float]
) -> np.ndarray:
    import torch

    parameter = torch.nn.Parameter(torch.from_numpy(x.copy()))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, foreach=False, **options)
    path = []
    for gradient, lr in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        path.append(parameter.detach().numpy().copy())
    return np.array(path)


@pytest.mark.framework("torch")
@pytest.mark.parametrize(("name", "torch_name", "options"), TORCH, ids=[case[0] for case in TORCH])
def test_torch(name: str, torch_name: str, options: dict[str, Any]) -> None:
    rates = (rate(name, step) for step in range(STEPS))
    assert_close(scheduled(name), torch_path(torch_name, options, *problem(), rates))


@pytest.mark.framework("torch")
def test_torch_adagrad_without_epsilon() -> None:
    x, gradients = problem()
    moving = gradients[0] != 0  # PyTorch's 0/0 is nan, ours stays
    rates = (rate("adagrad", step) for step in range(STEPS))
    expected = torch_path("Adagrad", {"eps": 0.0}, x, gradients, rates)
    assert_close(scheduled("adagrad")[:, moving], expected[:, moving])


@pytest.mark.framework("torch")
def test_torch_nesterov_walks_the_lookahead_points() -> None:
    start, gradients = problem()
    optimizer, x, points = LookaheadMomentum(0.1, momentum=0.9), start.copy(), []
    for gradient in gradients:
        optimizer.step(x, gradient)
        points.append(optimizer.gradient_point(x).copy())
    options = {"momentum": 0.9, "nesterov": True}
    assert_close(np.array(points), torch_path("SGD", options, start, gradients, iter([0.1] * STEPS)))


def assert_same_bits_as_torch(lr: float, momentum: float, nesterov: bool, weight_decay: float) -> None:
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    x, gradients = problem()
    expected = torch_path("SGD", options, x, gradients, iter([lr] * STEPS))
    assert run(SGD(lr, **options), x, gradients).tobytes() == expected.tobytes()


@pytest.mark.framework("torch")
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.5, True)])
def test_torch_bit_for_bit_where_products_are_exact(
    momentum: float, nesterov: bool, weight_decay: float
) -> None:
    """With powers of two nothing is rounded in a product, so a fused multiply-add gives the same bits."""
    assert_same_bits_as_torch(0.125, momentum, nesterov, weight_decay)


@pytest.mark.slow
@pytest.mark.framework("torch")
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="only on x86-64 are PyTorch's default kernels built without fma"
)
def test_torch_bit_for_bit_without_fused_multiply_add() -> None:
    """PyTorch's AVX kernels fuse `x - lr * d`, which NumPy cannot; its plain kernels round as we do."""
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": "default",
        "PYTHONPATH": str(ROOT),
    }
    line = [sys.executable, "-m", __name__]
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "8 equal\n"), done.stderr


def compare_all_bits() -> None:
    cases = [(0.0, False), (0.9, False), (0.9, True), (0.99, True)]
    for momentum, nesterov in cases:
        for weight_decay in (0.0, 0.01):
            assert_same_bits_as_torch(0.1, momentum, nesterov, weight_decay)
    print(2 * len(cases), "equal")


# --- Keras -----------------------------------------------------------------------------------------------

KERAS: list[tuple[str, str, dict[str, Any], float]] = [
    ("sgd", "SGD", {}, 1e-6),
    ("momentum", "SGD", {"momentum": 0.9}, 1e-6),
    ("nesterov", "SGD", {"momentum": 0.9, "nesterov": True}, 1e-6),
    ("adagrad-keras", "Adagrad", {}, 1e-6),
    ("adagrad-keras-0", "Adagrad", {"epsilon": 1e-16, "initial_accumulator_value": 0.0}, 1e-6),
    ("rmsprop-keras", "RMSprop", {}, 1e-6),
    ("adadelta-keras", "Adadelta", {}, 1e-6),
    ("adam-short", "Adam", {"beta_1": 0.5, "beta_2": 0.75}, 1e-6),
    # Keras computes 1 - 0.999**t in float32, whose first digits cancel.
    ("adam-keras", "Adam", {}, 5e-5),
]


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Any:
    if "keras" not in sys.modules:
        monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing a backend warns of is not this package's matter
        return importlib.import_module("keras")


# PyTorch's tensors, which Keras hands to numpy.array, do not know NumPy 2's keyword `copy`.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.framework("keras")
@pytest.mark.parametrize(("name", "keras_name", "options", "rtol"), KERAS, ids=[case[0] for case in KERAS])
def test_keras(keras: Any, name: str, keras_name: str, options: dict[str, Any], rtol: float) -> None:
    optimizer, (x, gradients) = CASES[name](), problem()
    variable = keras.Variable(x)
    theirs = getattr(keras.optimizers, keras_name)(learning_rate=optimizer.learning_rate, **options)
    theirs.build([variable])
    path = []
    for gradient in gradients:
        theirs.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        path.append(np.array(keras.ops.convert_to_numpy(variable)))
    assert_close(run(optimizer, x, gradients), np.array(path), rtol)


@pytest.mark.parametrize("kind", [Adagrad, RMSprop, Adam])
def test_epsilon_forms_are_told_apart(kind: Any) -> None:
    x, gradients = problem()
    torch_form, keras_form = (
        run(kind(0.1, epsilon=1e-8, epsilon_form=form), x, gradients) for form in ("torch", "keras")
    )
    assert np.abs(torch_form - keras_form).max() > 1e-2


# --- facts -----------------------------------------------------------------------------------------------


def test_adagrad_sums_inverse_roots() -> None:
    gradient = np.array([1e-8, -3.0, 1e8, 0.0], np.float32)
    path = run(Adagrad(0.1), np.zeros(4, np.float32), np.tile(gradient, (STEPS, 1)))
    sums = np.cumsum(np.arange(1, STEPS + 1) ** -0.5)
    np.testing.assert_allclose(path, -0.1 * np.sign(gradient) * sums[:, None], rtol=2e-6, atol=0)


def test_adagrad_first_step_is_exactly_the_learning_rate() -> None:
    gradient = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    (first,) = run(Adagrad(0.1), np.zeros(1000, np.float32), gradient[None])
    np.testing.assert_array_equal(first, -np.float32(0.1) * np.sign(gradient))


def test_adagrad_leaves_a_coordinate_whose_accumulator_is_zero() -> None:
    gradients = np.array([[0.0, -0.0, 1e-30, 0.0], [0.0, 0.0, -1e-30, 2.0]], np.float32)
    path = run(Adagrad(1.0), np.zeros(4, np.float32), gradients)
    np.testing.assert_array_equal(path, [[0, 0, 0, 0], [0, 0, 0, -1]])


@pytest.mark.parametrize("optimizer", [RMSprop(0.5), Adam(0.5), Adadelta(1.0)])
def test_averages_do_not_overflow_before_pytorch(optimizer: VectorOptimizer) -> None:
    """The square of 3e19 is beyond float32, a hundredth or a tenth of it is not."""
    (first,) = run(optimizer, np.zeros(1, np.float32), np.full((1, 1), 3e19, np.float32))
    expected = {RMSprop: -5.0, Adam: -0.5, Adadelta: -((1e-6 / 0.1) ** 0.5)}[type(optimizer)]
    np.testing.assert_allclose(first, expected, rtol=1e-6)


@pytest.mark.parametrize(("form", "widening"), [("torch", 1.0), ("keras", 0.001**-0.5)])
def test_first_adam_step(form: Any, widening: float) -> None:
    gradient = np.array([1e-8, -1e-6, 3.0, -1e8, 0.0], np.float32)
    (first,) = run(Adam(0.1, epsilon_form=form), np.zeros(5, np.float32), gradient[None])
    expected = -0.1 * gradient / (np.abs(gradient) + 1e-8 * widening)
    np.testing.assert_allclose(first, expected, rtol=1e-6)


def test_diloco_outer_recursion() -> None:
    """Inner training that reaches the optimum 0 hands out the centre itself as its difference."""
    outer, x, path = SGD(0.7, momentum=0.9, nesterov=True), np.ones(1, np.float32), [1.0]
    for _ in range(20):
        outer.step(x, x.copy())
        path.append(float(x[0]))
    expected = [1.0, -0.33]
    while len(expected) < len(path):
        expected.append(0.57 * expected[-1] - 0.27 * expected[-2])
    np.testing.assert_allclose(path, expected, rtol=0, atol=2e-7)
    assert path[1] == pytest.approx(-0.33, abs=1e-7)


def test_lookahead_takes_the_gradient_ahead() -> None:
    """On x^2/2 with momentum d: v' = d v - lr (x + d v); by hand for d = lr = 1/2, exact in float32."""
    optimizer, x, path = LookaheadMomentum(0.5, momentum=0.5), np.ones(1, np.float32), []
    for _ in range(4):
        optimizer.step(x, optimizer.gradient_point(x).copy())
        path.append(float(x[0]))
    assert path == [0.5, 0.125, -0.03125, -0.0546875]
    assert LookaheadMomentum(0.1).momentum == 0.99


def test_lookahead_without_momentum_is_gradient_descent() -> None:
    x, gradients = problem()
    lookahead_path = run(LookaheadMomentum(0.1, momentum=0.0), x, gradients)
    np.testing.assert_array_equal(lookahead_path, run(SGD(0.1), x, gradients))


def test_lookahead_point_is_one_buffer_and_no_step() -> None:
    optimizer, x = LookaheadMomentum(0.5), np.ones(3, np.float32)
    first = optimizer.gradient_point(x)
    np.testing.assert_array_equal(first, x)
    assert optimizer.state() == LookaheadMomentum(0.5).state()
    optimizer.step(x, np.ones(3, np.float32))
    assert optimizer.gradient_point(x) is first
    np.testing.assert_allclose(first, 0.5 - 0.99 * 0.5, rtol=1e-5)


# --- state -----------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file))


@each_case
@settings(max_examples=20)
@given(before=st.integers(0, 12), seed=st.integers(0, 2**31))
def test_resume_is_exact(name: str, before: int, seed: int) -> None:
    x, gradients = problem(seed, steps=12)
    whole, first, second = CASES[name](), CASES[name](), CASES[name]()
    expected = run(whole, x, gradients)
    path = run(first, x, gradients[:before])
    second.load(through_a_file(first.state()))
    rest = run(second, path[-1] if before else x, gradients[before:])
    assert path.tobytes() + rest.tobytes() == expected.tobytes()
    np.testing.assert_equal(second.state(), whole.state())


@each_case
def test_state_is_a_copy_both_ways(name: str) -> None:
    x, gradients = problem()
    optimizer, other = CASES[name](), CASES[name]()
    run(optimizer, x, gradients[:3])
    state = optimizer.state()
    kept = optimizer.state()
    other.load(state)
    for value in state.values():
        if isinstance(value, np.ndarray):
            np.add(value, 1, out=value)
    for stepped in (optimizer, other):
        np.testing.assert_equal(stepped.state(), kept)


def test_state_before_the_first_step_resets() -> None:
    x, gradients = problem()
    for make in CASES.values():
        fresh, used = make(), make()
        assert fresh.state() == {"learning_rate": fresh.learning_rate, "steps": 0}
        run(used, x, gradients)
        used.load(fresh.state())
        np.testing.assert_array_equal(run(used, x, gradients), run(fresh, x, gradients))


def test_state_holds_a_changed_learning_rate() -> None:
    optimizer, other = Adam(0.1), Adam(0.1)
    optimizer.learning_rate = 0.025
    other.load(optimizer.state())
    assert other.learning_rate == 0.025


def test_names_and_kinds_of_the_state() -> None:
    slots = {}
    for name, make in CASES.items():
        optimizer = make()
        run(optimizer, *problem(steps=1))
        learning_rate, steps, *slots[name] = optimizer.state()
        assert (learning_rate, steps) == ("learning_rate", "steps")
        assert optimizer.state()["steps"] == 1
        for slot in slots[name]:
            assert optimizer.state()[slot].dtype == np.float32
    assert slots["sgd"] == []
    assert slots["nesterov"] == ["buffer"]
    assert slots["lookahead"] == ["velocity"]
    assert slots["adagrad"] == ["accumulator"]
    assert slots["rmsprop"] == ["square_average"]
    assert slots["adadelta"] == ["square_average", "delta_average"]
    assert slots["adam"] == ["average", "square_average"]


VECTOR = np.ones(3, np.float32)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"learning_rate": 0.1},
        {"steps": 0},
        {"learning_rate": 0.1, "steps": 1},
        {"learning_rate": 0.1, "steps": -1},
        {"learning_rate": float("nan"), "steps": 0},
        {"learning_rate": -0.1, "steps": 0},
        {"learning_rate": 0.1, "steps": 0, "average": VECTOR, "square_average": VECTOR},
        {"learning_rate": 0.1, "steps": 1, "average": VECTOR},
        {"learning_rate": 0.1, "steps": 1, "average": VECTOR, "buffer": VECTOR},
        {"learning_rate": 0.1, "steps": 1, "average": VECTOR, "square_average": VECTOR, "buffer": VECTOR},
        {"learning_rate": 0.1, "steps": 1, "average": VECTOR, "square_average": VECTOR[:2]},
        {"learning_rate": 0.1, "steps": 1, "average": VECTOR, "square_average": VECTOR.astype(np.float64)},
        {"learning_rate": 0.1, "steps": 1, "average": VECTOR, "square_average": VECTOR[None]},
        {"learning_rate": 0.1, "steps": -1, "average": VECTOR, "square_average": VECTOR},
        {"learning_rate": 0.1, "steps": 1, "average": VECTOR, "square_average": [1.0, 1.0, 1.0]},
    ],
)
def test_load_refuses_the_state_of_another(state: dict[str, Any]) -> None:
    optimizer = Adam(0.5)
    run(optimizer, VECTOR, VECTOR[None])
    before = optimizer.state()
    with pytest.raises(ConfigurationError, match=r"Adam\.load needs .*'average', 'square_average'.*; got {"):
        optimizer.load(state)
    np.testing.assert_equal(optimizer.state(), before)


# --- arrays ----------------------------------------------------------------------------------------------


@each_case
def test_is_a_vector_optimizer_that_only_reads_the_gradient(name: str) -> None:
    optimizer, (x, gradients) = CASES[name](), problem()
    assert isinstance(optimizer, VectorOptimizer)
    kept = gradients.copy()
    gradients.setflags(write=False)
    run(optimizer, x, gradients)
    np.testing.assert_array_equal(gradients, kept)


@each_case
@pytest.mark.parametrize("block", [1, 7, 60])
def test_slices_and_blocks_do_not_change_a_bit(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, gradients = problem()
    expected = run(CASES[name](), x, gradients)
    cuts = [slice(0, 13), slice(13, 13), slice(13, 60)]
    parts = [run(CASES[name](), x[cut], np.ascontiguousarray(gradients[:, cut])) for cut in cuts]
    assert np.concatenate(parts, axis=1).tobytes() == expected.tobytes()
    monkeypatch.setattr(base.Optimizer, "_block_length", lambda _: block)
    assert run(CASES[name](), x, gradients).tobytes() == expected.tobytes()


@each_case
def test_later_steps_allocate_nothing(name: str) -> None:
    optimizer = CASES[name]()
    size = 3 * optimizer._block_length() + 5
    x, gradient = np.ones(size, np.float32), np.full(size, 0.5, np.float32)
    optimizer.step(x, gradient)
    buffers = [optimizer._work, *optimizer._slots.values()]
    # What another thread of the process allocates meanwhile is counted, too: not in each of three steps.
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        try:
            optimizer.step(x, gradient)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) < 16_384, "a step may make views, not arrays"
    for old, new in zip(buffers, [optimizer._work, *optimizer._slots.values()], strict=True):
        assert old is new


READ_ONLY = np.ones(3, np.float32)
READ_ONLY.setflags(write=False)


@pytest.mark.parametrize(
    ("x", "gradient", "words"),
    [
        (np.ones(3), VECTOR, r"x: float64\(3,\), gradient: float32\(3,\)"),
        (VECTOR.copy(), np.ones(3), r"x: float32\(3,\), gradient: float64\(3,\)"),
        (VECTOR.copy(), np.ones(3, np.float16), r"gradient: float16\(3,\)"),
        (VECTOR.copy(), np.ones(3, ">f4"), r"gradient: >f4\(3,\)"),
        (VECTOR.copy(), np.ones(4, np.float32), r"x: float32\(3,\), gradient: float32\(4,\)"),
        (VECTOR.copy(), np.ones(1, np.float32), r"gradient: float32\(1,\)"),
        (np.ones((1, 3), np.float32), np.ones((1, 3), np.float32), r"x: float32\(1, 3\)"),
        (np.ones((), np.float32), np.ones((), np.float32), r"x: float32\(\)"),
        (np.ones(6, np.float32)[::2], VECTOR, r"x: float32\(3,\) strided"),
        (VECTOR.copy(), np.ones(6, np.float32)[::-2], r"gradient: float32\(3,\) strided"),
        (READ_ONLY, VECTOR, r"x: float32\(3,\) read-only"),
        (VECTOR, VECTOR, "in memory of their own"),
        (VECTOR, VECTOR[:], "in memory of their own"),
        ([1.0, 1.0, 1.0], VECTOR, "x: a list"),
        (VECTOR.copy(), 1.0, r"gradient: 1\.0"),
        (VECTOR.copy(), None, "gradient: a NoneType"),
    ],
)
@each_case
def test_step_refuses_other_arrays(name: str, x: Any, gradient: Any, words: str) -> None:
    optimizer = CASES[name]()
    before = np.copy(x)
    with pytest.raises(ConfigurationError, match=rf"{type(optimizer).__name__}\.step needs .*{words}"):
        optimizer.step(x, gradient)
    np.testing.assert_array_equal(x, before)
    assert optimizer.state()["steps"] == 0
    with pytest.raises(ConfigurationError, match=rf"step_by_parts needs .*{words}"):
        base.moves(optimizer, x, gradient)


def test_a_step_by_parts_refuses_a_gradient_that_it_cannot_use_up() -> None:
    with pytest.raises(ConfigurationError, match=r"both writable; .*gradient: float32\(3,\) read-only"):
        SGD(0.1).step_by_parts(VECTOR.copy(), READ_ONLY)


@each_case
def test_one_optimizer_belongs_to_one_size(name: str) -> None:
    optimizer = CASES[name]()
    optimizer.step(np.ones(3, np.float32), np.ones(3, np.float32))
    with pytest.raises(ConfigurationError, match="steps a vector of 3 values and got one of 4"):
        optimizer.step(np.ones(4, np.float32), np.ones(4, np.float32))
    assert optimizer.state()["steps"] == 1


def test_loaded_slots_fix_the_size() -> None:
    saved, optimizer = Adam(0.1), Adam(0.1)
    saved.step(np.ones(3, np.float32), np.ones(3, np.float32))
    optimizer.load(saved.state())
    with pytest.raises(ConfigurationError, match="steps a vector of 3 values and got one of 4"):
        optimizer.step(np.ones(4, np.float32), np.ones(4, np.float32))


@pytest.mark.parametrize("x", [np.ones(3), np.ones((3, 1), np.float32), np.ones(6, np.float32)[::2], [1.0]])
def test_gradient_point_refuses_other_arrays(x: Any) -> None:
    with pytest.raises(ConfigurationError, match="gradient_point needs a contiguous float32 vector; got "):
        LookaheadMomentum(0.1).gradient_point(x)


def test_gradient_point_refuses_another_size() -> None:
    optimizer = LookaheadMomentum(0.1)
    optimizer.gradient_point(np.ones(3, np.float32))
    with pytest.raises(ConfigurationError, match="steps a vector of 3 values and got one of 4"):
        optimizer.gradient_point(np.ones(4, np.float32))


# --- options ---------------------------------------------------------------------------------------------

OUT_OF_RANGE = [-0.1, float("nan"), float("inf"), "0.1", None, 0.1j]


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        *((kind, "learning_rate", OUT_OF_RANGE) for kind in EQUATIONS),
        (SGD, "momentum", [*OUT_OF_RANGE, 1.0]),
        (SGD, "weight_decay", OUT_OF_RANGE),
        (LookaheadMomentum, "momentum", [*OUT_OF_RANGE, 1.0]),
        (Adagrad, "epsilon", OUT_OF_RANGE),
        (Adagrad, "initial_accumulator", OUT_OF_RANGE),
        (RMSprop, "decay", [*OUT_OF_RANGE, 1.0]),
        (RMSprop, "epsilon", [*OUT_OF_RANGE, 0.0, 1e-31]),
        (Adadelta, "decay", [*OUT_OF_RANGE, 1.0]),
        (Adadelta, "epsilon", [*OUT_OF_RANGE, 0.0]),
        (Adam, "beta1", [*OUT_OF_RANGE, 1.0]),
        (Adam, "beta2", [*OUT_OF_RANGE, 1.0]),
        (Adam, "epsilon", [*OUT_OF_RANGE, 0.0]),
    ],
)
def test_numbers_out_of_range(kind: Any, field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(
            ConfigurationError, match=rf"{kind.__name__} got {field}=.*<= {field} <"
        ) as caught:
            kind(**{"learning_rate": 0.1, field: value})
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("kind", [Adagrad, RMSprop, Adam])
@pytest.mark.parametrize("form", ["jax", "Torch", None, 1])
def test_unknown_epsilon_form(kind: Any, form: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{kind.__name__} got epsilon_form={form!r}; give 'torch' or"
    ):
        kind(0.1, epsilon_form=form)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(
        ConfigurationError, match=r"SGD got momentum=0\.0; give .* 0 < momentum < 1 where nest"
    ):
        SGD(0.1, nesterov=True)


def test_options_are_keyword_only() -> None:
    for kind in EQUATIONS:
        with pytest.raises(TypeError, match="positional"):
            kind(0.1, 0.9)


@pytest.mark.parametrize("value", OUT_OF_RANGE)
def test_changed_learning_rate_is_checked_at_the_step(value: Any) -> None:
    optimizer, x = Adam(0.1), np.ones(3, np.float32)
    optimizer.learning_rate = value
    with pytest.raises(ConfigurationError, match="Adam got learning_rate="):
        optimizer.step(x, VECTOR)
    np.testing.assert_array_equal(x, 1)


def test_numpy_scalars_are_options_too() -> None:
    x, gradients = problem()
    plain = run(Adam(0.1, beta1=0.5), x, gradients)
    optimizer = Adam(np.float64(0.1), beta1=np.float32(0.5))
    np.testing.assert_array_equal(run(optimizer, x, gradients), plain)
    optimizer.learning_rate = np.float64(0.1)
    run(optimizer, x, gradients[:1])
    assert type(optimizer.learning_rate) is float


# --- the module ------------------------------------------------------------------------------------------


def test_overflow_is_reported_by_numpy() -> None:
    x, gradient = np.zeros(1, np.float32), np.full(1, 1e30, np.float32)
    with pytest.warns(RuntimeWarning, match="overflow"):
        Adagrad(0.1).step(x, gradient)


def test_every_public_class_is_compared() -> None:
    assert {kind.__name__ for kind in EQUATIONS} == set(module.__all__)
    assert {type(make()) for make in CASES.values()} == set(EQUATIONS)


if __name__ == "__main__":
    compare_all_bits()


def test_lars_steps_a_model_without_a_parameter() -> None:
    optimizer, nothing = LARS(0.1, momentum=0.9), np.zeros(0, np.float32)
    optimizer.fit([0])
    optimizer.step(nothing, nothing.copy())
    assert optimizer.state()["steps"] == 1
