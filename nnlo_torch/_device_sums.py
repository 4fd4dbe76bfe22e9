"""Sums of gradients on their device: between two exchanges no gradient comes to the host.

With `every` above 1 a worker adds up its gradients. To add 100 million numbers on the host takes 100 ms a
step, and their copy from a GPU 15 ms; the sum on a GPU takes less than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nnlo_common.plugin import GradientSum, Vector
from nnlo_torch._flat_model import FlatModel

__all__ = ["DeviceSum"]


class DeviceSum(GradientSum):
    """A running sum of a model's gradients on their device, with the bits that the host would make.

    Its state is that of the sum on the host, so a training may resume with the other one.

    Args:
        flat_model: the model, whose gradients no longer come to the host by themselves.
    """

    def __init__(self, flat_model: FlatModel) -> None:
        super().__init__(0)
        self._model = flat_model
        self.total = flat_model.like_gradient()
        self._blocks = [(block, torch.zeros_like(block.gradient)) for block in flat_model.blocks]
        flat_model.fetches = False

    def add(self, gradient: Vector) -> None:
        """Add the gradients on the device; only the marks come from the host's vector."""
        marks = self._model.marks
        self.total[marks] = gradient[marks] + (self.total[marks] if self.count else 0)
        for block, total in self._blocks:
            if self.count:
                total.add_(block.gradient)
            else:
                total.copy_(block.gradient)
        self.count += 1

    def take(self) -> Vector:
        """Return the sum, valid until the next `add`, and restart from zero."""
        self._fetch()
        return super().take()

    def state(self) -> dict[str, Any]:
        """Return what the sum on the host would."""
        self._fetch()
        return super().state() | {"type": GradientSum.__name__}

    def check(self, state: object) -> None:
        """Refuse a state that `load` cannot use; change nothing."""
        same = isinstance(state, Mapping) and state.get("type") == GradientSum.__name__
        super().check(
            {**state, "type": type(self).__name__} if isinstance(state, Mapping) and same else state
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        super().load(state)
        for block, total in self._blocks:
            total.copy_(torch.from_numpy(self.total[block.start : block.start + total.numel()]))

    def _fetch(self) -> None:
        """Copy the sum to the host, but for the marks, which are there."""
        if not self.count:
            return
        there = self.total[self._model.marks].copy()
        for block, total in self._blocks:
            torch.from_numpy(self.total[block.start : block.start + total.numel()]).copy_(total)
        self.total[self._model.marks] = there
