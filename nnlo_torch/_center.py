"""The centre stepped by the user's own torch optimizer, on the server rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nnlo_common import ConfigurationError
from nnlo_torch._bridge import Bridge

__all__ = ["CenterOptimizer"]


class CenterOptimizer:
    """Steps one shard of the centre with a torch optimizer; fits `nnlo_common.VectorOptimizer`.

    The wrapped optimizer steps parameters that are views of the centre, with gradients that are views of
    the message they came in: nothing is copied. Frozen parameters get no gradient and are left alone. A
    parameter that a worker did not use in a step comes with a gradient of zeros; so, unlike in a plain
    loop, momentum and weight decay still act on it.

    Args:
        optimizer: the user's.
        bridge: the server's model.
        place: the part of the vector that this server holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, bridge: Bridge, place: slice) -> None:
        self._optimizer, self._bridge = optimizer, bridge
        self._mine = [
            index
            for index, segment in enumerate(bridge.parameters.layout.segments)
            if place.start <= segment.offset < place.stop or (segment.size == 0 and place.start == 0)
        ]
        self._start = place.start
        self._masters = self._float32_masters()
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._optimizer.param_groups[0]["lr"] = value

    def step(self, x: Any, gradient: Any) -> None:  # noqa: ARG002 - x is where the parameters lie
        """Step with the gradient that lies in `gradient`."""
        for master, view in zip(self._masters, self._gradients(gradient), strict=True):
            master.grad = view if master.requires_grad else None
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the torch optimizer's own state."""
        return {"torch": self._optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        if set(state) != {"torch"}:
            raise ConfigurationError(f"the state of a torch optimizer was expected, not {sorted(state)}")
        self._optimizer.load_state_dict(state["torch"])

    def _gradients(self, vector: Any) -> list[torch.Tensor]:
        # Each worker's messages come in the same few frames, so their views are made once.
        address = vector.__array_interface__["data"][0]
        views = self._views.get(address)
        if views is None:
            flat = torch.from_numpy(vector)
            segments = [self._bridge.parameters.layout.segments[index] for index in self._mine]
            views = self._views[address] = [
                flat[s.offset - self._start : s.offset - self._start + s.size].view(s.shape) for s in segments
            ]
        return views

    def _float32_masters(self) -> list[torch.Tensor]:
        """What the optimizer steps: float32 views of the centre, whatever the model's own type is."""
        masters = []
        of_tensor = {id(tensor): index for index, tensor in enumerate(self._bridge.tensors)}
        mine = set(self._mine)
        for group in self._optimizer.param_groups:
            for position, tensor in enumerate(group["params"]):
                index = of_tensor[id(tensor)]
                if not self._bridge.aliased[index]:
                    group["params"][position] = torch.nn.Parameter(
                        self._bridge.views[index], tensor.requires_grad
                    )
                if index in mine:
                    masters.append(group["params"][position])
                else:
                    group["params"][position].grad = None
        return masters
