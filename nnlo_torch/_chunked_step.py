"""Steps of PyTorch's optimizers part by part: each number once, with the bits of the optimizer's own step.

An optimizer passes several times over each parameter, which for a long one is a pass over the memory, and
Adam makes temporary tensors of its size. In chunks that fit a cache the same takes half the time or less, and
a part of the centre can leave for a worker while later ones are stepped. SGD passes once ("fused") where that
has the same bits, and each chunk by PyTorch's function, which costs a fourth of a call of its optimizer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.sgd import sgd

from nnlo_common.plugin import Vector, blocks
from nnlo_torch._compat import changes_of, global_hooks, hooks_of

__all__ = ["WORTH", "ChunkedStep"]

#: A shorter vector gains nothing.
WORTH = 1 << 19
# Numbers of a chunk.
_CHUNK = 1 << 18
# A fused kernel works with vectors of so many numbers or of a half, a quarter..., and rounds otherwise in
# what is left of a tensor at its end.
_VECTOR = 64
# Numbers that are stepped in one call of an optimizer but SGD: it takes some 60 microseconds besides.
_AT_ONCE = 1 << 20
_OF_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "fused")
# Those of PyTorch that step each number by itself.
_NUMBER_BY_NUMBER = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "Rprop",
    )
)


@dataclass(eq=False)
class _CutParameter:
    """One parameter of the centre, cut into chunks if it is long.

    Attributes:
        tensor: what the optimizer steps.
        place: its place in the vector.
        group: the number of the optimizer's group that holds it.
        chunks: what is stepped in its place: views of its parts, or itself. All but the last have whole
            vectors of a kernel.
        states: the state of each chunk.
        whole: the optimizer's own state, of which those of the chunks are views.
        seen: what it held when the views were made.
        counts: what in it is no vector, such as the number of steps, with its changes when the chunks had it.
    """

    tensor: torch.Tensor
    place: slice
    group: int
    chunks: list[tuple[slice, torch.Tensor]]
    states: list[dict[str, Any]] = field(default_factory=list)
    whole: Mapping[str, Any] | None = None
    seen: list[Any] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def follow(self, whole: dict[str, Any]) -> bool:
        """Let the chunks have the state that the optimizer has; return whether they can."""
        if whole is not self.whole or any(map(operator.is_not, whole.values(), self.seen)):
            self.whole = None
            if not all(map(_is_known, whole.values())):
                return False
            self.whole, self.seen, self.counts, self.states = whole, [*whole.values()], {}, [whole]
            if len(self.chunks) > 1:
                self.counts = {name: -1 for name, value in whole.items() if self._is_count(value)}
                self.states = [
                    {name: self._part_of(value, place) for name, value in whole.items()}
                    for place, _ in self.chunks
                ]
        for name, changes in self.counts.items():
            if changes_of(whole[name]) != changes:
                for state in self.states:
                    state[name].copy_(whole[name])
        return True

    def tell(self) -> None:
        """Give the optimizer's own state the counts of the chunks."""
        assert self.whole is not None  # follow has returned True
        for name in self.counts:
            self.whole[name].copy_(self.states[0][name])
            self.counts[name] = changes_of(self.whole[name])

    def _part_of(self, value: Any, place: slice) -> Any:
        if self._is_count(value):
            return value.clone()
        return value.view(-1)[place] if isinstance(value, torch.Tensor) else value

    def _is_count(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape != self.tensor.shape


class ChunkedStep:
    """Steps one optimizer part by part.

    Args:
        optimizer: the user's.
        tensors: those of its parameters that lie in the vector, in order.
        places: of each in the vector.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], places: Sequence[slice]
    ) -> None:
        self._optimizer = optimizer
        self._parameters: list[_CutParameter] = []
        self._stepper: torch.optim.Optimizer | None = None
        self._is_sgd = type(optimizer) is torch.optim.SGD
        # Of SGD: the state of each chunk, and which groups pass once.
        self._states: dict[torch.Tensor, dict[str, Any]] = {}
        self._once: list[bool] = []
        self._waiting: list[tuple[int, int, torch.Tensor]] = []  # start, group, chunk; the next one last
        self._stepped: list[_CutParameter] = []
        self._views: dict[int, dict[_CutParameter, list[torch.Tensor]]] = {}
        if type(optimizer) not in _NUMBER_BY_NUMBER:
            return
        groups = {id(one): index for index, of in enumerate(optimizer.param_groups) for one in of["params"]}
        for tensor, place in zip(tensors, places, strict=True):
            self._parameters.append(_CutParameter(tensor, place, groups[id(tensor)], _cut(tensor)))

    def begin(self, gradient: Vector, present: Iterable[bool]) -> bool:
        """Begin a step; return whether it can be made part by part, else the optimizer must make it.

        Args:
            gradient: for the whole vector.
            present: for each parameter, whether it has a gradient.
        """
        if not self._parameters or self._is_special():
            return False
        stepped = [one for one, there in zip(self._parameters, present, strict=True) if there]
        for one in stepped:
            state = self._optimizer.state.get(one.tensor)
            # The first step of a parameter makes its state.
            if not (state or self._needs_no_state(one)) or not one.follow(state or {}):
                return False
        gradients = self._gradients(gradient)
        states = self._states if self._is_sgd else self._own_stepper().state
        self._waiting = []
        for one in reversed(stepped):
            views = gradients[one]
            parts = [*zip(one.chunks, one.states, views, strict=True)]
            for (place, chunk), state, view in reversed(parts):
                states[chunk], chunk.grad = state, view
                self._waiting.append((one.place.start + place.start, _twin_of(one.group, chunk), chunk))
        if self._is_sgd:
            self._once = [_passes_once(self._optimizer, group) for group in self._optimizer.param_groups]
        else:
            for index, own in enumerate(self._own_stepper().param_groups):
                own.update({**self._optimizer.param_groups[index // 2], "params": []})
        self._stepped = stepped
        return True

    def step_before(self, stop: int) -> None:
        """Step all that begins before this place of the vector."""
        while self._waiting and self._waiting[-1][0] < stop:
            (self._step_by_sgd if self._is_sgd else self._step_next)()
        if not self._waiting:
            for one in self._stepped:
                one.tell()
            self._stepped = []

    @torch.no_grad()
    def _step_by_sgd(self) -> None:
        """Step the next chunks as `torch.optim.SGD` does."""
        for twin, chunks in self._next(_CHUNK).items():
            group = self._optimizer.param_groups[twin // 2]
            own = {name: group[name] for name in _OF_SGD}
            if twin % 2 and self._once[twin // 2]:
                own["fused"] = True
            buffers = [self._states[one]["momentum_buffer"] for one in chunks] if group["momentum"] else []
            gradients = [one.grad for one in chunks if one.grad is not None]  # begin has set each
            sgd(chunks, gradients, buffers, has_sparse_grad=False, **own)

    def _step_next(self) -> None:
        stepper, taken = self._own_stepper(), self._next(_AT_ONCE)
        for twin, chunks in taken.items():
            stepper.param_groups[twin]["params"] = chunks
        stepper.step()
        for twin in taken:
            stepper.param_groups[twin]["params"] = []

    def _next(self, most: int) -> dict[int, list[torch.Tensor]]:
        """Take the next chunks with so many numbers together; return them by the stepper's group."""
        taken: dict[int, list[torch.Tensor]] = {}
        count = 0
        while self._waiting and (not count or count + self._waiting[-1][2].numel() <= most):
            _, twin, chunk = self._waiting.pop()
            taken.setdefault(twin, []).append(chunk)
            count += chunk.numel()
        return taken

    def _gradients(self, vector: Vector) -> dict[_CutParameter, list[torch.Tensor]]:
        """Return the gradient of each chunk; vectors lie in the same few buffers, so their views are kept."""
        address = vector.__array_interface__["data"][0]
        if address not in self._views:
            self._views[address] = {}
            for one in self._parameters:
                flat = torch.from_numpy(vector[one.place])
                self._views[address][one] = [flat[place].view(chunk.shape) for place, chunk in one.chunks]
        return self._views[address]

    def _own_stepper(self) -> torch.optim.Optimizer:
        """Return an optimizer of the same kind that steps chunks.

        It has two groups for each of the user's: the second for chunks of whole vectors.
        """
        if self._stepper is None:
            make: Any = type(self._optimizer)
            twins = [{**group, "params": []} for group in self._optimizer.param_groups for _ in range(2)]
            for one in self._parameters:
                for _, chunk in one.chunks:
                    twins[_twin_of(one.group, chunk)]["params"].append(chunk)
            self._stepper = make(twins)
            self._stepper.state.clear()  # Adagrad makes one at once
        return self._stepper

    def _needs_no_state(self, one: _CutParameter) -> bool:
        return self._is_sgd and not self._optimizer.param_groups[one.group]["momentum"]

    def _is_special(self) -> bool:
        """Whether something else must see a step as a whole, or makes it."""
        hooks = (*global_hooks(), *hooks_of(self._optimizer, "step"))
        differentiable = any(group.get("differentiable") for group in self._optimizer.param_groups)
        return any(hooks) or differentiable or "step" in vars(self._optimizer)


def _is_known(value: Any) -> bool:
    """Whether an optimizer has made this part of its state, as a tensor whose parts are views."""
    return value is not None and (not isinstance(value, torch.Tensor) or value.is_contiguous())


def _cut(tensor: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Return a parameter's chunks with their places in it; a short one is its own."""
    size = tensor.numel()
    if size <= _CHUNK:
        return [(slice(0, size), tensor)]
    flat, end = tensor.detach().view(-1), size - size % _VECTOR
    places = [*blocks(slice(0, end), _CHUNK), *blocks(slice(end, size), _VECTOR)]
    return [(place, torch.nn.Parameter(flat[place])) for place in places]


def _twin_of(group: int, chunk: torch.Tensor) -> int:
    """Return which of the stepper's groups steps a chunk of this group."""
    return 2 * group + (chunk.numel() % _VECTOR == 0)


# -- SGD in one pass ----------------------------------------------------------------------------------------


def _passes_once(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the fused kernel may step a group, because its user leaves the kernel open."""
    if type(optimizer) is not torch.optim.SGD or not group.get("fused", True) is None is group["foreach"]:
        return False
    return _has_same_bits_fused(
        momentum=bool(group["momentum"]),
        dampening=bool(group["dampening"]),
        weight_decay=bool(group["weight_decay"]),
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )


@functools.cache
def _has_same_bits_fused(*, nesterov: bool, maximize: bool, **given: bool) -> bool:
    """Whether the fused kernel of SGD has the bits of the others, with these options on this machine.

    It makes the same operations, but a compiler may round two of them at once.
    """
    options: dict[str, Any] = {name: 0.3 * is_given for name, is_given in given.items()}
    options |= {"nesterov": nesterov, "maximize": maximize}
    draw = torch.Generator().manual_seed(1)
    start, *gradients = torch.randn((5, 16 * _VECTOR), generator=draw, dtype=torch.float32, device="cpu")
    found = []
    for fused in (None, True):
        tensor = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([tensor], lr=0.1, **options)
        for gradient in gradients:
            tensor.grad = gradient
            optimizer.step()
            optimizer.param_groups[0]["fused"] = fused  # the first step makes the state
        found.append([tensor.detach(), *filter(torch.is_tensor, optimizer.state[tensor].values())])
    return all(map(torch.equal, *found))
