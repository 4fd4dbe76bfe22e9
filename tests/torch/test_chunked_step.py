"""A server steps a long vector in chunks and part by part, with the bits of PyTorch's own step."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

from nnlo_common.algorithms._vector_optimizer import moves

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

from torch.optim import sgd  # noqa: E402

from nnlo_common.plugin import PRESENT  # noqa: E402
from nnlo_torch import _chunked_step  # noqa: E402
from nnlo_torch._center import TorchCenterOptimizer  # noqa: E402
from nnlo_torch._chunked_step import ChunkedStep  # noqa: E402
from nnlo_torch._flat_model import FlatModel  # noqa: E402
from tests.helpers.torch_cases import same  # noqa: E402

pytestmark = pytest.mark.framework("torch")

# Chunks of 2^18 numbers divide none of them; the last two are too short to be cut.
SHAPES = {"first": (523, 1201), "second": (300_011,), "short": (7, 3), "number": ()}
STEPS = 6
KINDS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "dampening": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.1, maximize=True),
    "unfused momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=False),
    "foreach momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
    "fused momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "fused adam": lambda params: torch.optim.Adam(params, fused=True),
    "foreach adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr_decay=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
    "groups": lambda params: torch.optim.Adam(
        [{"params": params[::2], "lr": 0.02}, {"params": params[1::2], "betas": (0.5, 0.9)}]
    ),
}


def parameters():
    draw = torch.Generator().manual_seed(3)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def center_of(optimizers, flat):
    return TorchCenterOptimizer(optimizers, flat, slice(0, flat.parameters.layout.size))


class Pair:
    """An optimizer in a plain loop, and the same on a server.

    Args:
        make: makes the optimizer.
    """

    def __init__(self, make):
        self.plain, self.model = parameters(), parameters()
        self.reference, self.optimizer = make([*self.plain.values()]), make([*self.model.values()])
        self.flat = FlatModel([*self.model.items()])
        self.center = center_of([self.optimizer], self.flat)

    def gradient(self, step, present=tuple(SHAPES)):
        """Give the plain parameters a gradient, and return the message that brings the same."""
        draw, views = torch.Generator().manual_seed(100 + step), self.flat.gradient_views
        self.flat.gradient.vector[:] = 0
        for name, mark, view in zip(SHAPES, self.flat.marks, views, strict=True):
            value = 10.0 ** (step % 3 - 2) * torch.randn(SHAPES[name], generator=draw)
            self.plain[name].grad = value.clone() if name in present else None
            if name in present:
                view.copy_(value)
                self.flat.gradient.vector[mark] = PRESENT
        return self.flat.gradient.vector

    def step(self, step, present=tuple(SHAPES), parts=(0, 131_072, 400_001, 700_000)):
        """Make one step in both, on the server part by part; return whether it was."""
        vector = self.gradient(step, present)
        self.reference.step()
        move = moves(self.center, self.flat.parameters.vector, vector)
        if move is None:
            self.center.step(self.flat.parameters.vector, vector)
            return False
        for start, stop in zip(parts, [*parts[1:], vector.size], strict=True):
            move(slice(start, stop))
            for name, tensor in self.done_before(stop):
                assert torch.equal(tensor, self.plain[name])  # what leaves with this part
        return True

    def done_before(self, stop):
        for name, segment in zip(SHAPES, self.flat.parameters.layout.segments, strict=True):
            if segment.offset + segment.size <= stop:
                yield name, self.model[name]

    def check(self):
        """Both have the same parameters, and the same state."""
        assert same([*map(detached, self.model.values())], [*map(detached, self.plain.values())])
        assert same(self.optimizer.state_dict(), self.reference.state_dict())


def detached(tensor):
    return tensor.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_the_bits_and_the_state_of_the_optimizers_own(kind):
    pair = Pair(KINDS[kind])
    for step in range(STEPS):
        by_parts = pair.step(step)
        pair.check()
        assert by_parts or step == 0
        for one in (pair.reference, pair.optimizer):  # as a scheduler does
            one.param_groups[-1]["lr"] *= 0.9


def kernels_of(pair, monkeypatch):
    """Make three steps; return how many numbers each kernel of SGD has stepped in the third."""
    numbers, own = {"fused": 0, "other": 0}, _chunked_step.sgd

    def noted(params, *lists, fused, **options):
        numbers["fused" if fused else "other"] += sum(one.numel() for one in params)
        return own(params, *lists, fused=fused, **options)

    assert not pair.step(0)
    assert pair.step(1)  # which kernels have the same bits is known now
    vector = pair.gradient(2)
    monkeypatch.setattr(_chunked_step, "sgd", noted)
    moves(pair.center, pair.flat.parameters.vector, vector)(slice(0, vector.size))
    monkeypatch.undo()
    pair.reference.step()
    pair.check()
    return numbers


def test_sgd_passes_once_over_all_whole_vectors_of_long_parameters(monkeypatch):
    ends = 523 * 1201 % 64 + 300_011 % 64 + 7 * 3 + 1
    found = kernels_of(Pair(KINDS["momentum"]), monkeypatch)
    assert found == {"fused": 523 * 1201 + 300_011 + 7 * 3 + 1 - ends, "other": ends}


def test_short_parameters_of_sgd_are_stepped_together(monkeypatch):
    shapes = {f"short {number}": (50,) for number in range(90)} | {"long": (600_000,)}
    monkeypatch.setattr("tests.torch.test_chunked_step.SHAPES", shapes)
    pair, calls = Pair(KINDS["momentum"]), []
    assert not pair.step(0, [*shapes])
    own = _chunked_step.sgd
    monkeypatch.setattr(
        _chunked_step,
        "sgd",
        lambda params, *rest, **more: calls.append(len(params)) or own(params, *rest, **more),
    )
    assert pair.step(1, [*shapes])
    pair.check()
    assert sum(calls) == 90 + 3
    assert len(calls) <= 6


@pytest.mark.parametrize("kind", ["unfused momentum", "foreach momentum"])
def test_a_kernel_that_the_user_has_chosen_is_used(kind, monkeypatch):
    assert not kernels_of(Pair(KINDS[kind]), monkeypatch)["fused"]


def test_sgd_does_not_pass_once_where_that_has_other_bits(monkeypatch):
    kernel = sgd._fused_sgd
    monkeypatch.setattr(
        sgd, "_fused_sgd", lambda *lists, lr, **more: kernel(*lists, lr=lr * 1.000001, **more)
    )
    looks = functools.cache(_chunked_step._has_same_bits_fused.__wrapped__)
    monkeypatch.setattr(_chunked_step, "_has_same_bits_fused", looks)
    assert not kernels_of(Pair(KINDS["momentum"]), monkeypatch)["fused"]


@pytest.mark.parametrize("kind", ["momentum", "adam", "rprop"])
def test_parameters_without_a_gradient_are_left_alone(kind):
    pair = Pair(KINDS[kind])
    turns = [("second",), ("first", "short"), tuple(SHAPES), ("first",), (), ("number",)]
    for step, present in enumerate(turns):
        pair.step(step, present)
        pair.check()


@pytest.mark.parametrize("kind", ["momentum", "adam", "adagrad"])
def test_a_state_that_is_loaded_or_changed_is_the_one_that_goes_on(kind):
    pair = Pair(KINDS[kind])
    kept = None
    for step in range(STEPS):
        if step == 2:
            kept = copy.deepcopy(pair.reference.state_dict())
        if step == 4:
            pair.reference.load_state_dict(copy.deepcopy(kept))
            pair.optimizer.load_state_dict(copy.deepcopy(kept))
        if step == 5:
            for one in (pair.reference, pair.optimizer):
                for state in one.state.values():
                    if "step" in state:
                        state["step"].fill_(50.0)
        assert pair.step(step) or step == 0
        pair.check()


def test_a_step_as_a_whole_in_between_counts_for_all_chunks():
    pair = Pair(KINDS["adam"])
    calls = []
    for step in range(STEPS):
        if step == 3:
            hook = pair.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        assert pair.step(step) == (step not in (0, 3))
        pair.check()
        if step == 3:
            hook.remove()
    assert calls == ["after"]


def test_the_whole_step_of_a_server_is_made_in_chunks_too(monkeypatch):
    pair, calls = Pair(KINDS["adam"]), []
    pair.step(0)
    step_next = ChunkedStep._step_next
    monkeypatch.setattr(ChunkedStep, "_step_next", lambda self: calls.append("chunks") or step_next(self))
    for step in (1, 2):
        vector = pair.gradient(step)
        pair.reference.step()
        pair.center.step(pair.flat.parameters.vector, vector)
        pair.check()
    assert calls


def test_a_step_that_somebody_has_replaced_is_made():
    pair, calls = Pair(KINDS["adam"]), []
    pair.step(0)
    own = pair.optimizer.step
    pair.optimizer.step = lambda: calls.append("mine") or own()
    for step in (1, 2):
        assert not pair.step(step)
        pair.check()
    assert calls == ["mine"] * 2


class Mine(torch.optim.SGD):
    """A user's own, which may look at all gradients together."""


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Mine(params, lr=0.1, momentum=0.9),
        torch.optim.ASGD,
        *([torch.optim.Adafactor] if hasattr(torch.optim, "Adafactor") else []),  # torch 2.5
    ],
)
def test_other_optimizers_make_their_own_step(make):
    pair = Pair(make)
    for step in range(3):
        assert not pair.step(step)
        pair.check()


def test_a_short_vector_is_stepped_as_a_whole():
    tensor = torch.nn.Parameter(torch.ones(1000))
    flat = FlatModel([("one", tensor)])
    center = center_of([torch.optim.SGD([tensor], lr=1.0)], flat)
    vector = np.ones_like(flat.parameters.vector)
    for _ in range(2):
        assert moves(center, flat.parameters.vector, vector) is None
        center.step(flat.parameters.vector, vector)
    assert tensor.eq(-1).all()


@pytest.mark.parametrize("names", [("first", "short"), ("second", "number")])
def test_of_two_optimizers_those_step_whose_parameters_have_gradients(names):
    others = [name for name in SHAPES if name not in names]
    plain, model = parameters(), parameters()
    make = (torch.optim.Adam, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    both = [
        [one([of[name] for name in owned]) for one, owned in zip(make, (names, others), strict=True)]
        for of in (plain, model)
    ]
    flat = FlatModel([*model.items()])
    center = center_of(both[1], flat)
    for step, owned in enumerate([names, others, names, names, others, list(SHAPES)]):
        draw = torch.Generator().manual_seed(step)
        flat.gradient.vector[:] = 0
        for name, mark, view in zip(SHAPES, flat.marks, flat.gradient_views, strict=True):
            plain[name].grad = torch.randn(SHAPES[name], generator=draw) if name in owned else None
            if name in owned:
                view.copy_(plain[name].grad)
                flat.gradient.vector[mark] = PRESENT
        for one in both[0]:
            one.step()
        move = moves(center, flat.parameters.vector, flat.gradient.vector)
        assert (move is None) == (step < 2)
        if move is None:
            center.step(flat.parameters.vector, flat.gradient.vector)
        else:
            move(slice(0, flat.gradient.vector.size))
        assert same([*map(detached, model.values())], [*map(detached, plain.values())])
        assert same([one.state_dict() for one in both[1]], [one.state_dict() for one in both[0]])
