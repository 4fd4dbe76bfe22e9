"""Centre optimizer: steps the centre with the user's torch optimizer on the server rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nnlo_common import ConfigurationError
from nnlo_torch._flat_model import FlatModel, Storage
from nnlo_torch._group_options import GroupOptions

__all__ = ["TorchCenterOptimizer"]


class TorchCenterOptimizer:
    """Steps one shard of the centre with a torch optimizer; fits `nnlo_common.VectorOptimizer`.

    The parameters are views of the centre and the gradients are views of the received message, so nothing is
    copied. A parameter without a gradient on the worker has none here.

    Args:
        optimizer: the user's.
        flat_model: the server's model.
        place: the part of the vector that this server holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat_model: FlatModel, place: slice) -> None:
        self._optimizer, self._flat_model, self._place = optimizer, flat_model, place
        self._options = GroupOptions(optimizer)
        self._mine = flat_model.parameters.layout.inside(place)
        self._marks = flat_model.marks[self._mine] - place.start
        self._masters = self._float32_masters()
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._optimizer.param_groups[0]["lr"] = value

    def configure(self, options: Any) -> None:
        """Set the learning rates and other options that a worker's scheduler has set."""
        self._options.set(options)

    def step(self, x: Any, gradient: Any) -> None:  # noqa: ARG002 - the parameters are views of x
        """Step with this gradient."""
        present = gradient[self._marks] != 0
        for master, view, is_there in zip(self._masters, self._gradients(gradient), present, strict=True):
            master.grad = view if is_there else None
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the torch optimizer's own state."""
        return {"torch": self._optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        if set(state) != {"torch"}:
            raise ConfigurationError(
                f"expected the state of a torch optimizer, found {sorted(state)}; load a checkpoint that "
                "nnlo_torch wrote"
            )
        self._optimizer.load_state_dict(state["torch"])

    def _gradients(self, vector: Any) -> list[torch.Tensor]:
        # Messages arrive in the same few buffers, so their views are cached.
        address = vector.__array_interface__["data"][0]
        views = self._views.get(address)
        if views is None:
            flat, start = torch.from_numpy(vector), self._place.start
            segments = [self._flat_model.parameters.layout.segments[index] for index in self._mine]
            views = self._views[address] = [
                flat[s.offset - start : s.offset - start + s.size].view(s.shape) for s in segments
            ]
        return views

    def _float32_masters(self) -> list[torch.Tensor]:
        """Give the optimizer float32 views of the centre, whatever the model's own type is."""
        masters: dict[int, torch.Tensor] = {}
        of_tensor = {id(tensor): index for index, tensor in enumerate(self._flat_model.tensors)}
        for group in self._optimizer.param_groups:
            if group.get("capturable") and Storage.BLOCK in self._flat_model.storages:
                group["capturable"] = False  # CUDA graphs need GPU memory; the centre is in host memory
            for position, tensor in enumerate(group["params"]):
                index = of_tensor[id(tensor)]
                if self._flat_model.storages[index] is not Storage.VIEW:
                    master = torch.nn.Parameter(self._flat_model.views[index], tensor.requires_grad)
                    group["params"][position] = master
                    if tensor in self._optimizer.state:
                        self._optimizer.state[master] = _as_master(self._optimizer.state.pop(tensor))
                masters[index] = group["params"][position]
                masters[index].grad = None
        return [masters[index] for index in self._mine]


def _as_master(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a parameter's optimizer state for its float32 master."""
    return {
        name: value.to("cpu", torch.float32)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in state.items()
    }
