"""Gradients that leave for the servers while the backward pass makes the rest of them.

A backward pass makes gradients mostly from the last parameter to the first. Once all from some parameter on
are made they may leave, so the step that follows has little left to send. What a loop changes between
`backward()` and `step()`, as clipping does, is sent again by the step; so is a gradient that several passes
add up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import warn
from nnlo_common.base._flat_vector import FlatVector, Layout, Vector
from nnlo_common.training._session import Session

__all__ = ["GradientsAhead", "MadeGradients", "when_made"]

# Numbers that are worth a message: half a megabyte.
_WORTH_SENDING = 1 << 17
# A gradient of so many leaves from where autograd makes it.
_WORTH_A_PART = 1 << 17
# Numbers of each parameter that are compared, as PyTorch does not count what is changed through `.data`.
_COMPARED = 16
# Steps in a row whose gradients have changed before nothing is sent ahead any more.
_IN_VAIN = 3


#: A gradient as a framework holds it, None if there is none, and how often it was changed in place.
_Made: TypeAlias = tuple[object | None, int]


class MadeGradients(Protocol):
    """A model's gradients, which a backward pass makes one after another; parameters have numbers from 0.

    Attributes:
        sent: the parameters whose gradients have left for the servers, so that they are not collected again.
    """

    sent: Container[int]

    @property
    def gradient(self) -> FlatVector:
        """The vector that they are sent from."""

    def trained(self) -> list[bool]:
        """Return for each parameter whether it is not frozen now."""

    def made(self, index: int) -> _Made:
        """Return a parameter's gradient of this step as it is now."""

    def complete(self) -> None:
        """Take note that the step has all its gradients: what has been made, but not taken, is none."""

    def place_of(self, part: range) -> slice:
        """Return the place of neighbouring parameters in the vector, with their marks."""

    def apart(self, part: range, least: int) -> Mapping[int, tuple[slice, Vector]]:
        """Return the places and numbers of long gradients that lie outside of the vector, by parameter."""

    def collect(self, part: range, apart: Container[int] = ()) -> None:
        """Move gradients into the vector, but for those that stay apart, and mark which there are."""

    def when_made(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Call a function each time that a gradient is made, until what is returned is called."""


class GradientsAhead:
    """Sends gradients ahead of the steps of one worker.

    Args:
        team: the training.
        gradients: of its model, which a worker sends in each step.
    """

    def __init__(self, team: Session, gradients: MadeGradients) -> None:
        self._team, self._gradients = weakref.ref(team), gradients
        self._thread = threading.get_ident()
        self._places = _places(gradients.gradient.layout)
        self._trained = gradients.trained()
        self._in_vain, self._on = 0, True
        self._begin()
        self._forget = gradients.when_made(self._noticed)

    def settle(self) -> None:
        """Before a step: withdraw what has left if it is not the step's gradient."""
        self._gradients.complete()
        left = range(self._sent, len(self._trained))
        as_sent = not self._again and self._all_are_as_sent(left)
        self._gradients.sent = left if as_sent else ()
        if not as_sent:
            self._withdraw()
            self._in_vain += 1
            if self._in_vain == _IN_VAIN:
                self._on = False
                warn(
                    "overlap=True brings nothing here: gradients change between backward() and step(), by "
                    "clipping, a scaled loss or several backward passes, and are sent again; from now on "
                    "they leave with the step. Leave overlap out, or use lag=1"
                )
        elif self._made:
            self._in_vain = 0
        self._begin()

    def release(self) -> None:
        """Leave the gradients alone from now on."""
        self._forget()
        self._gradients.sent = ()

    def _begin(self) -> None:
        count = len(self._trained)
        self._made: dict[int, _Made] = {}  # since the last step, as they were
        self._next, self._sent = count - 1, count  # the last that is not made; the first that has left
        self._again = False  # a gradient was made once more
        self._apart: dict[int, tuple[slice, Vector]] = {}  # what has left from outside of the vector
        self._losses = 0  # servers that had died when the first of it left
        self._numbers: list[tuple[slice, npt.NDArray[np.uint32]]] = []  # what has left, where it is compared

    def _noticed(self, index: int) -> None:
        if not self._on or self._again or threading.get_ident() != self._thread:
            return
        if index in self._made:  # a step was left out, or passes are added up
            self._again = True
            return
        if not self._made:
            self._trained = self._gradients.trained()  # what was frozen before may be trained now
        self._made[index] = self._gradients.made(index)
        while self._next >= 0 and (self._next in self._made or not self._trained[self._next]):
            self._next -= 1
        made = range(self._next + 1, self._sent)
        if not made:
            return
        place, team = self._gradients.place_of(made), self._team()
        if team is not None and place.stop - place.start >= _WORTH_SENDING:
            self._sent = made.start
            if not self._numbers:
                self._losses = team.losses
            apart = self._gradients.apart(made, _WORTH_A_PART) if team.may_leave_apart else {}
            self._apart.update(apart)
            self._gradients.collect(made, apart)
            first, last = np.searchsorted(self._places, (place.start, place.stop))
            self._numbers.append((slice(first, last), self._compared(slice(first, last))))
            team.send_ahead(place.start, [*apart.values()])

    def _compared(self, part: slice) -> npt.NDArray[np.uint32]:
        """The bits of the gradient now, at some of the places where they are compared."""
        places = self._places[part]
        found = self._gradients.gradient.vector[places]
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
        self._gradients.collect(left, self._apart)  # small gradients do not lie in the vector
        return all(np.array_equal(self._compared(part), before) for part, before in self._numbers)

    def _is_as_sent(self, index: int) -> bool:
        """Whether a gradient that has left is still what it was."""
        now, changes = self._gradients.made(index)
        gradient, before = self._made.get(index, (None, 0))
        return now is gradient and changes == before

    def _withdraw(self) -> None:
        team = self._team()
        if team is not None:
            team.withdraw()


def when_made(parameters: Iterable[Any], call: Callable[[int], None]) -> Callable[[], None]:
    """Call a function with a number each time that a backward pass of PyTorch has made a gradient.

    Also of parameters that are frozen now: fine-tuning unfreezes them later.

    Args:
        parameters: PyTorch's, numbered from 0.
        call: takes the number.

    Returns:
        Ends that.
    """
    handles = []
    for index, tensor in enumerate(parameters):
        trained = tensor.requires_grad
        tensor.requires_grad_(True)  # PyTorch takes no hook of a frozen one, but keeps it
        handles.append(tensor.register_post_accumulate_grad_hook(partial(_without_tensor, call, index)))
        tensor.requires_grad_(trained)

    def forget() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    return forget


def _without_tensor(call: Callable[[int], None], index: int, tensor: object) -> None:  # noqa: ARG001
    call(index)


def _places(layout: Layout) -> npt.NDArray[np.int64]:
    """Return places of all parameters, in order."""
    found = [
        segment.offset + np.linspace(0, segment.size - 1, min(segment.size, _COMPARED)).round()
        for segment in layout.segments
        if segment.size
    ]
    return np.unique(np.concatenate(found)).astype(np.int64)
