"""Gradient sums for torch: added up directly in the vector that is sent."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError, FlatVector
from nnlo_common.plugin import PRESENT, Vector, when_made
from nnlo_keras._compat import add_all, changes_of, copy_all, value_of

__all__ = ["TorchSum"]


class TorchSum:
    """Sums for torch, where the training step is Python that runs every time.

    Gradients may leave while they are made (`overlap=True`). Then the first ones of a sum stay where autograd
    has made them until `collect`, and those that have left are not copied.

    Args:
        variables: the variables that get gradients.

    Attributes:
        sent: indices of the variables whose gradients have left for the servers.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables
        self._there = [False] * len(variables)  # whether a variable has a gradient in this sum
        self._turn, self._twice = 0, False
        self.sent: Container[int] = ()
        self._waits = False  # whether first gradients stay where they are
        self._given: dict[int, torch.Tensor] | None = None  # those of this sum, once they are added
        self._changes: dict[int, int] = {}  # how often each of those had been changed then

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
        if self._waits and self._given is None:
            self._given = {index: one for index, one in enumerate(gradients) if one is not None}
            self._changes = {index: changes_of(one) for index, one in self._given.items()}
            self._there = [one is not None for one in gradients]
            return
        self._take_all()
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
    def collect(self, part: range | None = None, apart: Container[int] = ()) -> None:
        """Copy the sum into the current vector, and mark which variables have a gradient.

        Args:
            part: the variables; None: all that are not `sent`.
            apart: those whose gradients stay where they are.
        """
        there = self._there
        if part is None:
            part, apart = range(len(self._variables)), self.sent
        elif self._given is None:  # the backward pass still makes the others
            there = [value_of(variable).grad is not None for variable in self._variables]
        if self._given is not None or there is not self._there:
            self._take([index for index in part if index not in apart])
        for index in part:
            total, view = self._sums[self._turn][index], self._views[self._turn][index]
            if not there[index]:
                view.zero_()
            elif total is not view:
                view.copy_(total)
        marks = self._marks[part.start : part.stop]
        self._vectors[self._turn].vector[marks] = np.where(there[part.start : part.stop], PRESENT, 0)

    def twice(self) -> bool:
        """Whether a variable has more than one gradient in this sum."""
        return self._twice

    def restart(self, turn: int) -> None:
        """Begin a new sum, for the vector with this index."""
        self._turn, self._there, self._twice = turn, [False] * len(self._variables), False
        self._given, self.sent = None, ()

    @torch.no_grad()
    def resume(self) -> None:
        """Resume with the sum in the current vector."""
        self._there = (self._vectors[self._turn].vector[self._marks] != 0).tolist()
        self._given = {}
        for total, view in zip(self._sums[self._turn], self._views[self._turn], strict=True):
            if total is not view:
                total.copy_(view)

    # -- gradients that leave while they are made -----------------------------------------------------------

    @property
    def gradient(self) -> FlatVector:
        """The vector that they are sent from."""
        return self._vectors[self._turn]

    def trained(self) -> list[bool]:
        """Return for each variable whether it is not frozen now."""
        return [bool(value_of(variable).requires_grad) for variable in self._variables]

    def made(self, index: int) -> tuple[object | None, int]:
        """Return a gradient, as made and later as the optimizer got it, and how often it was changed."""
        gradient = self._now(index)
        return gradient, 0 if gradient is None else changes_of(gradient)

    def complete(self) -> None:
        """Take note that the step has all its gradients: what the optimizer has not got is none.

        Raises:
            ConfigurationError: a gradient is not what the optimizer has got any more.
        """
        if self._given is None:
            self._given = {}
        self._refuse_changes(self._given)

    def place_of(self, part: range) -> slice:
        """Return the place of neighbouring variables in the vector, with their marks."""
        return slice(self.gradient.layout.segments[part.start].offset, int(self._marks[part.stop - 1]) + 1)

    def apart(self, part: range, least: int) -> dict[int, tuple[slice, Vector]]:
        """Return the places and numbers of long gradients, by variable."""
        found = {}
        for index in part:
            gradient, segment = self._now(index), self.gradient.layout.segments[index]
            if gradient is None or segment.size < least or not gradient.is_contiguous():
                continue
            place = slice(segment.offset, segment.offset + segment.size)
            found[index] = place, gradient.detach().view(-1).numpy()
        return found

    def when_made(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Call a function with an index each time that a backward pass has made a gradient.

        Returns:
            Ends that.

        Raises:
            ConfigurationError: gradients must be copied before they can leave.
        """
        for variable in self._variables:
            tensor = value_of(variable)
            if tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
                raise ConfigurationError(
                    f"overlap=True is possible only with float32 variables on the CPU, but {variable.path} "
                    f"is {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}; leave overlap out, "
                    "or use lag=1"
                )
        end = when_made(map(value_of, self._variables), call)
        self._waits = True

        def forget() -> None:
            self._take_all()
            self._waits = False
            end()

        return forget

    def _now(self, index: int) -> torch.Tensor | None:
        """Return a gradient of the first ones of this sum, which the backward pass may still make."""
        if self._given is not None:
            return self._given.get(index)
        found: torch.Tensor | None = value_of(self._variables[index]).grad
        return found

    def _take_all(self) -> None:
        """Copy the first gradients into the sum, to which others may be added now."""
        if self._given:
            self._refuse_changes(self._given)
            self._take([*self._given])
            self._given = {}

    def _refuse_changes(self, given: Mapping[int, torch.Tensor]) -> None:
        for index, gradient in given.items():
            if changes_of(gradient) != self._changes[index]:
                raise ConfigurationError(
                    f"overlap=True was given, but the gradient of {self._variables[index].path} was changed "
                    "after the optimizer got it and before it was sent, by train_step or a callback; if by "
                    "another backward(), call model.zero_grad() before that, or leave overlap out"
                )

    @torch.no_grad()
    def _take(self, part: Sequence[int]) -> None:
        """Copy first gradients into the sum."""
        found = [(self._sums[self._turn][index], self._now(index)) for index in part]
        there = [(total, gradient) for total, gradient in found if gradient is not None]
        if there:
            copy_all(*map(list, zip(*there, strict=True)))
