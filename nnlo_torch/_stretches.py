"""Options of SGD, Adam and AdamW as stretches of the flat vector, and learning rates scaled for one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Stretch
from nnlo_torch._flat_model import FlatModel

__all__ = [
    "GroupOptimizer",
    "Stretches",
    "own_momentum",
    "refuse_options",
    "scaled_rates",
    "without_momentum",
]

#: What their states are called: the momentum, and Adam's mean square.
_SLOTS: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
}
#: Options that a step at the pace of several workers does not have.
_REFUSED = ("amsgrad", "dampening")


def refuse_options(optimizer: torch.optim.Optimizer, wrapper: str) -> None:
    """Refuse options of SGD, Adam and AdamW that the wrapper's steps do not have."""
    if type(optimizer) not in _SLOTS:
        return
    for group in optimizer.param_groups:
        for name in _REFUSED:
            if group.get(name):
                raise ConfigurationError(
                    f"{wrapper} cannot wrap {type(optimizer).__name__} with {name}={group[name]!r}: several "
                    f"workers step without it; leave {name} out"
                )


@contextmanager
def scaled_rates(optimizers: Sequence[torch.optim.Optimizer], scale: float) -> Iterator[None]:
    """Multiply all learning rates within a `with` block."""
    groups = [group for one in optimizers for group in one.param_groups]
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate * scale
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def own_momentum(optimizer: torch.optim.Optimizer, owner: str) -> tuple[float, bool]:
    """Return the momentum of SGD, and whether it is Nesterov's; 0: it has none, or is not SGD.

    Args:
        optimizer: the user's.
        owner: what needs it, for the error.

    Raises:
        ConfigurationError: its groups differ in it, or it is not added up as a velocity is.
    """
    if type(optimizer) is not torch.optim.SGD:
        return 0.0, False
    found = {(float(group["momentum"]), bool(group["nesterov"])) for group in optimizer.param_groups}
    damped = any(group["momentum"] and group["dampening"] for group in optimizer.param_groups)
    if len(found) > 1 or damped:
        what = "dampening" if damped else f"momenta {sorted(one for one, _ in found)} or some with nesterov"
        raise ConfigurationError(
            f"{owner} cannot have SGD with {what}: its workers add up one momentum for all parameters; give "
            "all groups the same momentum and no dampening, or use wire='int8'"
        )
    return found.pop()


@contextmanager
def without_momentum(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Let SGD step without its momentum within a `with` block, with the weight decay of all later steps."""
    groups = [group for one in optimizers for group in one.param_groups if group.get("momentum")]
    before = [(group["momentum"], group["weight_decay"]) for group in groups]
    for group, (momentum, decay) in zip(groups, before, strict=True):
        group["momentum"], group["weight_decay"] = 0.0, decay / (1 - momentum)
    try:
        yield
    finally:
        for group, (momentum, decay) in zip(groups, before, strict=True):
            group["momentum"], group["weight_decay"] = momentum, decay


class Stretches:
    """The options of an optimizer's groups, by the places of their parameters in the vector.

    Args:
        optimizer: the user's.
        flat_model: the model.
        tensors: what the optimizer's groups hold for each parameter of the model.
        place: the part of the vector.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flat_model: FlatModel,
        tensors: Mapping[int, torch.Tensor],
        place: slice,
    ) -> None:
        mine = flat_model.parameters.layout.inside(place)
        segments = [flat_model.parameters.layout.segments[index] for index in mine]
        self._optimizer = optimizer
        self._segments = [slice(s.offset - place.start, s.offset - place.start + s.size) for s in segments]
        self._marks = flat_model.marks[mine] - place.start
        self._all = np.ones(len(mine), bool)
        self._tensors = [tensors[index] for index in mine]
        self._runs: list[tuple[int, range]] | None = None
        self._kept: torch.Tensor | None = None  # the last of the views that the optimizer's state consists of
        self._steps = 0

    def read(self, gradient: Any) -> list[Stretch] | None:
        """Return the options as they are now; None: of an optimizer without stretches.

        Args:
            gradient: leave out parameters that have no gradient in it; None: all of them.
        """
        if type(self._optimizer) not in _SLOTS:
            return None
        present = self._all if gradient is None else gradient[self._marks] != 0
        if self._runs is None:
            self._runs = self._groups_in_order()
        found = []
        for number, indices in self._runs:
            group = self._optimizer.param_groups[number]  # loading a state replaces it
            for first, last in _present_runs(present, indices):
                place = slice(self._segments[first].start, self._segments[last].stop)
                found.append(_stretch(self._optimizer, group, place))
        return found

    def keep_in(self, velocity: Any, square: Any) -> int:
        """Let the optimizer's state lie in these vectors, with what it holds now; return its steps so far."""
        state, names = self._optimizer.state, _SLOTS[type(self._optimizer)]
        last = state.get(self._tensors[-1], {}).get(names[0])
        if last is not None and last is self._kept:
            return self._steps
        self._steps = max((int(float(one["step"])) for one in state.values() if "step" in one), default=0)
        for tensor, segment in zip(self._tensors, self._segments, strict=True):
            own = state[tensor]
            for name, vector in zip(names, (velocity, square), strict=False):
                view = torch.from_numpy(vector[segment]).view(tensor.shape)
                before = own.get(name)
                view.zero_() if before is None else view.copy_(before)
                own[name] = view
            if len(names) > 1:
                own["step"] = torch.tensor(float(self._steps))
        if self._kept is None:
            self._optimizer.register_state_dict_pre_hook(self._tell_steps)
        self._kept = state[self._tensors[-1]][names[0]]
        self.count(self._steps)
        return self._steps

    def count(self, steps: int) -> None:
        """Set the number of steps that the optimizer has made; it costs time only where somebody looks."""
        self._steps = steps

    def _tell_steps(self, *_: Any) -> None:
        """Write the number of steps into the optimizer's state, before somebody saves it."""
        for tensor in self._tensors:
            own = self._optimizer.state.get(tensor, {})
            if "step" in own:
                own["step"].fill_(float(self._steps))

    def _groups_in_order(self) -> list[tuple[int, range]]:
        """Return the number of each group with the indices of its parameters, which follow each other."""
        groups = enumerate(self._optimizer.param_groups)
        owners = {id(one): number for number, group in groups for one in group["params"]}
        found: list[tuple[int, range]] = []
        for index, tensor in enumerate(self._tensors):
            group = owners[id(tensor)]
            if found and found[-1][0] == group:
                found[-1] = group, range(found[-1][1].start, index + 1)
            else:
                found.append((group, range(index, index + 1)))
        return found


class GroupOptimizer:
    """The user's optimizer on each rank of a training without servers; fits `nnlo_common.VectorOptimizer`.

    Args:
        optimizer: the user's.
        flat_model: the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat_model: FlatModel) -> None:
        self._optimizer, self._flat_model = optimizer, flat_model
        tensors = dict(enumerate(flat_model.tensors))
        whole = slice(0, flat_model.parameters.layout.size)
        self._stretches = Stretches(optimizer, flat_model, tensors, whole)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._optimizer.param_groups[0]["lr"] = value

    def stretches(self, size: int, gradient: Any) -> list[Stretch] | None:  # noqa: ARG002 - the layout knows
        """Return the options of SGD, Adam or AdamW; None: it is another one."""
        return self._stretches.read(gradient)

    def keep_in(self, velocity: Any, square: Any) -> int:
        """Keep the momentum and Adam's mean square in these vectors; return the steps made so far."""
        return self._stretches.keep_in(velocity, square)

    def count(self, steps: int) -> None:
        """Note that so many steps have been made with what is kept."""
        self._stretches.count(steps)

    def follow(self, progress: float) -> None:
        """Do nothing: schedulers run on the workers, and follow the progress there."""

    def prepare(self, gradient: Any) -> None:
        """Leave a gradient as it is: loops clip before they step."""

    def step(self, x: Any, gradient: Any) -> None:  # noqa: ARG002 - the model holds both
        """Step the model with the gradients that it has."""
        self._flat_model.publish()
        self._optimizer.step()
        self._flat_model.absorb()

    def step_scaled(self, x: Any, gradient: Any, scale: float) -> None:
        """Step with `scale` times the learning rates."""
        with scaled_rates([self._optimizer], scale):
            self.step(x, gradient)

    def state(self) -> dict[str, Any]:
        """Return nothing: the wrapper saves the optimizer's own state."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load nothing."""


def _present_runs(present: Any, indices: range) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of each run of parameters that are present."""
    if present[indices.start : indices.stop].all():
        yield indices.start, indices.stop - 1
        return
    for there, run in groupby(indices, lambda index: bool(present[index])):
        if there:
            found = list(run)
            yield found[0], found[-1]


def decouples(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group's weight decay is no part of its gradient."""
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def _stretch(optimizer: torch.optim.Optimizer, group: dict[str, Any], place: slice) -> Stretch:
    adaptive = not isinstance(optimizer, torch.optim.SGD)
    beta1, beta2 = map(float, group["betas"]) if adaptive else (float(group["momentum"]), 0.0)
    return Stretch(
        place=place,
        learning_rate=float(group["lr"]),
        momentum=beta1,
        adaptive=adaptive,
        beta2=beta2,
        epsilon=float(group.get("eps", 0.0)),
        weight_decay=float(group["weight_decay"]),
        decoupled=decouples(optimizer, group),
        maximize=bool(group["maximize"]),
    )
