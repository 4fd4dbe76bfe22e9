"""Gradient sums for torch: added up directly in the vector that is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nnlo_common import FlatVector
from nnlo_common.plugin import PRESENT
from nnlo_keras._compat import add_all, copy_all

__all__ = ["TorchSum"]


class TorchSum:
    """Sums for torch, where the training step is Python that runs every time.

    Args:
        variables: the variables that get gradients.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables
        self._there = [False] * len(variables)  # whether a variable has a gradient in this sum
        self._turn, self._twice = 0, False

    def tie(self, vectors: Sequence[FlatVector], model: Any) -> None:  # noqa: ARG002 - as for all back ends
        """Set the vectors that take the sums, in turn."""
        self._vectors, self._marks = vectors, vectors[0].layout.marks()
        self._views = [[torch.from_numpy(view) for view in flat.views()] for flat in vectors]
        # On another device gradients are added up there, and copied once by `collect`.
        self._sums = [
            [
                view
                if variable.value.device.type == "cpu"
                else torch.zeros_like(view, device=variable.value.device)
                for variable, view in zip(self._variables, views, strict=True)
            ]
            for views in self._views
        ]

    @torch.no_grad()
    def add(self, gradients: Sequence[Any]) -> None:
        """Add one gradient or None for each variable."""
        first: tuple[list[Any], list[Any]] = ([], [])
        later: tuple[list[Any], list[Any]] = ([], [])
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                sums, given = later if self._there[index] else first
                sums.append(self._sums[self._turn][index])
                given.append(gradient)
                self._there[index] = True
        if first[0]:
            copy_all(*first)
        if later[0]:
            self._twice = True
            add_all(*later)

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the sum into the current vector."""
        for index, (total, view) in enumerate(
            zip(self._sums[self._turn], self._views[self._turn], strict=True)
        ):
            if not self._there[index]:
                view.zero_()
            elif total is not view:
                view.copy_(total)
        self._vectors[self._turn].vector[self._marks] = np.where(self._there, PRESENT, 0)

    def twice(self) -> bool:
        """Whether a variable has more than one gradient in this sum."""
        return self._twice

    def restart(self, turn: int) -> None:
        """Begin a new sum, for the vector with this index."""
        self._turn, self._there, self._twice = turn, [False] * len(self._variables), False

    @torch.no_grad()
    def resume(self) -> None:
        """Resume with the sum in the current vector."""
        self._there = (self._vectors[self._turn].vector[self._marks] != 0).tolist()
        for total, view in zip(self._sums[self._turn], self._views[self._turn], strict=True):
            if total is not view:
                total.copy_(view)
