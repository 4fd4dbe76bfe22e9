"""Torch variables in a flat vector: views of it, wherever possible.

Variables that cannot be views (16 bits, another device, memory in another order) are copied. A variable that
was given new memory is detected and made a view again.
"""

from __future__ import annotations

import keras
import torch

from nnlo_common import FlatVector
from nnlo_keras._compat import value_of

__all__ = ["TorchVariables"]


class TorchVariables:
    """Copies of torch parameters in the vector."""

    def __init__(self, variables: list[keras.Variable], flat: FlatVector) -> None:
        views = [torch.from_numpy(view) for view in flat.views()]
        places = zip(variables, views, flat.layout.segments, strict=True)
        self._places = [
            (variable, view, view.data_ptr())
            for variable, view, segment in places
            if segment.tied_to is None and segment.size
        ]

    @property
    def aliased(self) -> bool:
        """Whether some variables are views of the vector."""
        return any(value_of(variable).data_ptr() == address for variable, _, address in self._places)

    @torch.no_grad()
    def read(self) -> None:
        """Copy variables that are not views into the vector."""
        for variable, view, address in self._places:
            tensor = value_of(variable)
            if tensor.data_ptr() != address:
                view.copy_(tensor)
                if _can_be_view(tensor):
                    tensor.data = view

    @torch.no_grad()
    def write(self) -> None:
        """Copy the vector into the variables that are not views."""
        for variable, view, address in self._places:
            tensor = value_of(variable)
            if tensor.data_ptr() != address:
                if _can_be_view(tensor):
                    tensor.data = view
                else:
                    tensor.copy_(view)

    def attach(self) -> None:
        """Do nothing: the variables are views already."""

    def detach(self) -> None:
        """Do nothing."""


def _can_be_view(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
