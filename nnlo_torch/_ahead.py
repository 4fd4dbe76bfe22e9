"""Gradients that leave for the servers while the backward pass makes the rest of them.

A backward pass makes gradients mostly from the last parameter to the first. Once all from some parameter on
are made they may leave, so the step that follows has little left to send. What a loop changes between
`backward()` and `step()`, as clipping does, is sent again by the step; so is a gradient that several passes
add up.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch

from nnlo_common import ConfigurationError, Layout
from nnlo_common.plugin import Session, Vector, warn
from nnlo_torch._compat import changes_of
from nnlo_torch._flat_model import FlatModel, Storage

__all__ = ["GradientsAhead", "check_for_overlap"]

# Numbers that are worth a message: half a megabyte.
_WORTH_SENDING = 1 << 17
# A gradient of so many leaves from where autograd makes it.
_WORTH_A_PART = 1 << 17
# Numbers of each parameter that are compared, as PyTorch does not count what is changed through `.data`.
_COMPARED = 16
# Steps in a row whose gradients have changed before nothing is sent ahead any more.
_IN_VAIN = 3


def check_for_overlap(flat_model: FlatModel) -> None:
    """Refuse parameters whose gradients must be copied before they can leave."""
    for name, tensor, storage in zip(flat_model.names, flat_model.tensors, flat_model.storages, strict=True):
        if storage is not Storage.VIEW:
            raise ConfigurationError(
                f"overlap=True is possible only with dense float32 parameters on the CPU, but {name} is "
                f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}; leave overlap out, or use "
                "lag=1"
            )


class GradientsAhead:
    """Sends gradients ahead of the steps of one worker.

    Args:
        team: the training.
        flat_model: its model, of which a worker sends the gradient of each step.
    """

    def __init__(self, team: Session, flat_model: FlatModel) -> None:
        self._team, self._flat_model = weakref.ref(team), flat_model
        self._thread = threading.get_ident()
        self._places = _places(flat_model.gradient.layout)
        self._trained = flat_model.trained()
        self._in_vain, self._on = 0, True
        self._begin()
        self._hooks = flat_model.when_made(self._noticed)

    def settle(self) -> None:
        """Before a step: withdraw what has left if it is not the step's gradient."""
        left = range(self._sent, len(self._trained))
        as_sent = not self._again and self._all_are_as_sent(left)
        self._flat_model.sent = left if as_sent else ()
        if not as_sent:
            self._withdraw()
            self._in_vain += 1
            if self._in_vain == _IN_VAIN:
                self._on = False
                warn(
                    "overlap=True brings nothing here: gradients change between backward() and step(), by "
                    "clipping, a GradScaler or several backward passes, and are sent again; from now on they "
                    "leave with the step. Leave overlap out, or use lag=1"
                )
        elif self._made:
            self._in_vain = 0
        self._begin()

    def release(self) -> None:
        """Leave the gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._flat_model.sent = ()

    def _begin(self) -> None:
        count = len(self._trained)
        self._made: dict[int, tuple[torch.Tensor | None, int]] = {}  # since the last step, as they were
        self._next, self._sent = count - 1, count  # the last that is not made; the first that has left
        self._again = False  # a gradient was made once more
        self._apart: dict[int, tuple[slice, Vector]] = {}  # what has left from outside of the vector
        self._losses = 0  # servers that had died when the first of it left
        self._numbers: list[tuple[slice, npt.NDArray[np.uint32]]] = []  # what has left, where it is compared

    def _noticed(self, index: int, tensor: torch.Tensor) -> None:
        if not self._on or self._again or threading.get_ident() != self._thread:
            return
        if index in self._made:  # a step was left out, or passes are added up
            self._again = True
            return
        if not self._made:
            self._trained = self._flat_model.trained()  # what was frozen before may be trained now
        gradient = tensor.grad
        self._made[index] = gradient, 0 if gradient is None else changes_of(gradient)
        while self._next >= 0 and (self._next in self._made or not self._trained[self._next]):
            self._next -= 1
        made = range(self._next + 1, self._sent)
        if not made:
            return
        place, team = self._flat_model.place_of(made), self._team()
        if team is not None and place.stop - place.start >= _WORTH_SENDING:
            self._sent = made.start
            if not self._numbers:
                self._losses = team.losses
            apart = self._flat_model.apart(made, _WORTH_A_PART) if team.may_leave_apart else {}
            self._apart |= apart
            self._flat_model.collect(made, apart)
            first, last = np.searchsorted(self._places, (place.start, place.stop))
            self._numbers.append((slice(first, last), self._compared(slice(first, last))))
            team.send_ahead(place.start, [*apart.values()])

    def _compared(self, part: slice) -> npt.NDArray[np.uint32]:
        """The bits of the gradient now, at some of the places where they are compared."""
        places = self._places[part]
        found = self._flat_model.gradient.vector[places]
        for place, numbers in self._apart.values():
            first, last = np.searchsorted(places, (place.start, place.stop))
            found[first:last] = numbers[places[first:last] - place.start]
        return found.view(np.uint32)

    def _all_are_as_sent(self, left: range) -> bool:
        """Whether all that has left is still the gradient, and those live that it has left for."""
        if not left:
            return True
        team = self._team()
        lost = team is not None and team.losses > self._losses
        if lost or not all(map(self._is_as_sent, left)):
            return False
        self._flat_model.collect(left, self._apart)  # small gradients do not lie in the vector
        return all(np.array_equal(self._compared(part), before) for part, before in self._numbers)

    def _is_as_sent(self, index: int) -> bool:
        """Whether a gradient that has left is still what it was."""
        now = self._flat_model.tensors[index].grad
        gradient, version = self._made.get(index, (None, 0))
        return now is gradient and (now is None or changes_of(now) == version)

    def _withdraw(self) -> None:
        team = self._team()
        if team is not None:
            team.withdraw()


def _places(layout: Layout) -> npt.NDArray[np.int64]:
    """Return places of all parameters, in order."""
    found = [
        segment.offset + np.linspace(0, segment.size - 1, min(segment.size, _COMPARED)).round()
        for segment in layout.segments
        if segment.size
    ]
    return np.unique(np.concatenate(found)).astype(np.int64)
