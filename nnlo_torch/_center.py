"""Centre optimizer: steps the centre with the user's torch optimizers on the server rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import InOrder, Stretch
from nnlo_torch._chunked_step import WORTH, ChunkedStep
from nnlo_torch._flat_model import FlatModel, Storage
from nnlo_torch._schedules import GroupOptions
from nnlo_torch._stretches import Stretches, own_momentum, scaled_rates, without_momentum

__all__ = ["TorchCenterOptimizer"]


class TorchCenterOptimizer:
    """Steps one shard of the centre with torch optimizers; fits `nnlo_common.VectorOptimizer`.

    The parameters are views of the centre and the gradients are views of the received message, so nothing is
    copied. A parameter without a gradient on the worker has none here. Of several optimizers only those
    step whose parameters have gradients.

    Attributes:
        stepped: indices of the optimizers that made the last step.

    Args:
        optimizers: the user's, each for parameters of its own.
        flat_model: the server's model.
        place: the part of the vector that this server holds.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], flat_model: FlatModel, place: slice
    ) -> None:
        self._optimizers, self._flat_model, self._place = list(optimizers), flat_model, place
        self._options = GroupOptions(*optimizers)
        self.stepped = [*range(len(self._optimizers))]
        self._replaced: list[tuple[list[Any], int, torch.Tensor]] = []
        self._mine = flat_model.parameters.layout.inside(place)
        self._marks = flat_model.marks[self._mine] - place.start
        self._masters = self._float32_masters()
        owners = [
            {id(one) for group in optimizer.param_groups for one in group["params"]}
            for optimizer in self._optimizers
        ]
        # For each optimizer, which of this shard's parameters are its own.
        self._owned = [np.array([id(one) in owned for one in self._masters], bool) for owned in owners]
        segments = [flat_model.parameters.layout.segments[index] for index in self._mine]
        self._places = [slice(s.offset - place.start, s.offset - place.start + s.size) for s in segments]
        self._chunked: list[ChunkedStep] | None = None
        self._views: dict[int, list[torch.Tensor]] = {}
        self._stretches: Stretches | None = None
        self._left: tuple[float, bool] | None = None  # the momentum that workers have

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizers[0].param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._optimizers[0].param_groups[0]["lr"] = value

    def configure(self, options: Any) -> None:
        """Set the learning rates and other options that a worker's scheduler has set."""
        self._options.set(options)
        if self._left is not None and self.own_momentum() != self._left:
            raise ConfigurationError(
                f"momentum={self.own_momentum()[0]!r} was set during the training, but with wire='topk' the "
                f"workers have added up gradients with momentum={self._left[0]!r}; leave the momentum as it "
                "is (cycle_momentum=False in a scheduler), or use wire='int8'"
            )

    def step(self, x: Any, gradient: Any) -> None:  # noqa: ARG002 - the parameters are views of x
        """Step with this gradient."""
        if self._left is not None:
            with without_momentum(self._optimizers):
                self._step(gradient)
        else:
            self._step(gradient)

    def step_by_parts(self, x: Any, gradient: Any) -> InOrder | None:  # noqa: ARG002 - as in `step`
        """Begin a step; return what steps a part, if the optimizers can: PyTorch's from their second on."""
        if gradient.size < WORTH:
            return None
        present = self._present_in(gradient)
        if self._chunked is None:
            self._chunked = [
                ChunkedStep(
                    optimizer,
                    [master for master, is_own in zip(self._masters, owned, strict=True) if is_own],
                    [place for place, is_own in zip(self._places, owned, strict=True) if is_own],
                )
                for optimizer, owned in zip(self._optimizers, self._owned, strict=True)
            ]
        stepped = [(self._chunked[index], present[self._owned[index]]) for index in self.stepped]
        if not all(chunked.begin(gradient, own) for chunked, own in stepped):
            return None

        def step(part: slice) -> None:
            for chunked, _ in stepped:
                chunked.step_before(part.stop)

        return InOrder(step)

    def _present_in(self, gradient: Any) -> Any:
        """Return which parameters have a gradient, and note which optimizers step with them."""
        present = gradient[self._marks] != 0
        several = len(self._optimizers) > 1
        self.stepped = [
            index for index, owned in enumerate(self._owned) if not several or present[owned].any()
        ]
        return present

    def _step(self, gradient: Any) -> None:
        by_parts = self.step_by_parts(None, gradient)
        if by_parts is not None:
            by_parts(slice(0, gradient.size))
            return
        present = self._present_in(gradient)
        for master, view, is_there in zip(self._masters, self._gradients(gradient), present, strict=True):
            master.grad = view if is_there else None
        for index in self.stepped:
            self._optimizers[index].step()

    def own_momentum(self) -> tuple[float, bool]:
        """Return the momentum of SGD, and whether it is Nesterov's."""
        return own_momentum(self._optimizers[0], "wire='topk'")

    def leave_momentum(self) -> None:
        """Step without momentum from now on, with the weight decay of all the steps that it would bring."""
        self._left = self.own_momentum()

    def stretches(self, size: int, gradient: Any) -> list[Stretch] | None:  # noqa: ARG002 - the layout knows
        """Return the options of SGD, Adam or AdamW, one stretch for each group; None: it is another one."""
        (optimizer,) = self._optimizers
        if self._stretches is None:
            masters = dict(zip(self._mine, self._masters, strict=True))
            self._stretches = Stretches(optimizer, self._flat_model, masters, self._place)
        return self._stretches.read(gradient)

    def step_scaled(self, x: Any, gradient: Any, scale: float) -> None:
        """Step with `scale` times the learning rates."""
        with scaled_rates(self._optimizers, scale):
            self.step(x, gradient)

    def keep_in(self, velocity: Any, square: Any) -> int:
        """Keep the momentum and Adam's mean square in these vectors; return the steps made so far."""
        self.stretches(velocity.size, None)
        assert self._stretches is not None  # made just now
        return self._stretches.keep_in(velocity, square)

    def count(self, steps: int) -> None:
        """Note that so many steps have been made with what is kept."""
        if self._stretches is not None:
            self._stretches.count(steps)

    def follow(self, progress: float) -> None:
        """Do nothing: schedulers run on the workers, and follow the progress there."""

    def prepare(self, gradient: Any) -> None:
        """Leave a gradient as it is: loops clip before they step."""

    def state(self) -> dict[str, Any]:
        """Return the torch optimizers' own states."""
        first, *others = [one.state_dict() for one in self._optimizers]
        return {"torch": first, **({"others": others} if others else {})}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        expected = {"torch", "others"} if len(self._optimizers) > 1 else {"torch"}
        if set(state) != expected:
            raise ConfigurationError(
                f"expected the state of {len(self._optimizers)} torch optimizers, found {sorted(state)}; "
                "load a checkpoint that nnlo_torch wrote in this training"
            )
        for one, own in zip(self._optimizers, [state["torch"], *state.get("others", [])], strict=True):
            one.load_state_dict(_with_tensors(own))

    def release(self) -> None:
        """Give the optimizers the model's parameters back, before another centre is made of them."""
        self._chunked = None
        tensors: dict[Any, torch.Tensor] = {}
        for params, position, tensor in self._replaced:
            tensors[params[position]], params[position] = tensor, tensor
        for optimizer in self._optimizers:
            states = list(optimizer.state.items())
            optimizer.state.clear()
            optimizer.state.update({tensors.get(key, key): state for key, state in states})

    def _gradients(self, vector: Any) -> list[torch.Tensor]:
        # Messages arrive in the same few buffers, so their views are cached.
        address = vector.__array_interface__["data"][0]
        views = self._views.get(address)
        if views is None:
            flat = torch.from_numpy(vector)
            views = self._views[address] = [
                flat[place].view(master.shape)
                for place, master in zip(self._places, self._masters, strict=True)
            ]
        return views

    def _float32_masters(self) -> list[torch.Tensor]:
        """Give the optimizer float32 views of the centre, whatever the model's own type is."""
        masters: dict[int, torch.Tensor] = {}
        of_tensor = {id(tensor): index for index, tensor in enumerate(self._flat_model.tensors)}
        for optimizer, group in [(one, group) for one in self._optimizers for group in one.param_groups]:
            if group.get("capturable") and Storage.BLOCK in self._flat_model.storages:
                group["capturable"] = False  # CUDA graphs need GPU memory; the centre is in host memory
            for position, tensor in enumerate(group["params"]):
                index = of_tensor[id(tensor)]
                if self._flat_model.storages[index] is not Storage.VIEW:
                    master = torch.nn.Parameter(self._flat_model.views[index], tensor.requires_grad)
                    group["params"][position] = master
                    self._replaced.append((group["params"], position, tensor))
                    if tensor in optimizer.state:
                        optimizer.state[master] = _as_master(optimizer.state.pop(tensor))
                masters[index] = group["params"][position]
                masters[index].grad = None
        return [masters[index] for index in self._mine]


def _with_tensors(state: Any) -> Any:
    """Return a state with tensors in place of arrays, as it comes from another rank's memory."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state)
    if isinstance(state, Mapping):
        return {key: _with_tensors(value) for key, value in state.items()}
    return [_with_tensors(one) for one in state] if isinstance(state, list) else state


def _as_master(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a parameter's optimizer state for its float32 master."""
    return {
        name: value.to("cpu", torch.float32)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in state.items()
    }
