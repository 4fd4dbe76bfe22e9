"""Gradient sums for tensorflow and jax: the traced training step adds them up in extra variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from nnlo_common import FlatVector, Segment
from nnlo_common.plugin import HEADER_BYTES, PRESENT
from nnlo_keras._flat_variables import flat_variables, memory_of
from nnlo_keras._variable_layout import layout_of

__all__ = ["TracedSum"]

# A gradient of at least this many numbers has its own variable, which costs no copy in the step. Smaller ones
# share one, since each variable is fetched separately.
_LARGE = 1 << 17
# Sum numbers wrap around here; float32 cannot count beyond 2**24.
_NUMBERS = 1 << 20


class TracedSum:
    """Sums for back ends that trace the training step once.

    Each sum has a number. The step only reads the number of the requested sum, so beginning a new sum assigns
    no variable if variables can be host memory.

    On tensorflow, memory that was read never changes. So if all gradients are small, their sum is sent from
    the variable's own memory, which has room for a header.

    Args:
        optimizer: the owner of the variables that hold the sums.
        variables: the variables that get gradients.
        changed: the collected sums are changed, so they may not be the variables' own memory.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], *, changed: bool = False) -> None:
        layout = layout_of(variables)
        self._segments, self._marks = layout.segments, layout.marks()
        self._large = [index for index, segment in enumerate(self._segments) if segment.size >= _LARGE]
        self._runs = list(_runs(self._segments, self._marks, self._large))
        # `_joint` holds: the small sums with their marks, laid out as in the vector; the other marks; the
        # sum's number.
        ends = np.cumsum([0, *(place.stop - place.start for _, place in self._runs)]).tolist()
        self._inside, self._rest = [slice(*pair) for pair in pairwise(ends)], slice(ends[-1], -1)
        whole = not changed and keras.backend.backend() == "tensorflow" and ends[1:] == [layout.size]
        self._room = HEADER_BYTES // 4 if whole else 0
        size = self._room + ends[-1] + len(self._large) + 1
        self._asked = optimizer.add_variable(shape=(1,), dtype="float32", name="sum_asked")
        self._joint = optimizer.add_variable(shape=(size,), dtype="float32", name="sum_joint")
        self._sums = [
            optimizer.add_variable(shape=(self._segments[index].size,), dtype="float32", name=f"sum_{index}")
            for index in self._large
        ]

    def tie(self, vectors: Sequence[FlatVector], model: Any) -> None:
        """Set the vectors that take the sums, in turn."""
        self._vectors, self._turn = vectors, 0
        self._memory = [flat.frame.bytes for flat in vectors]
        self._sent_in_place = self._room > 0 and all(flat.vector is flat.frame.vector for flat in vectors)
        starts = [self._segments[index].offset for index in self._large]
        layouts = [layout_of([variable]) for variable in self._sums]
        self._large_links = [
            [
                flat_variables([variable], flat.part(layout, slice(start, start + layout.size)), model)
                for variable, layout, start in zip(self._sums, layouts, starts, strict=True)
            ]
            for flat in vectors
        ]
        self._number = FlatVector(layout_of([self._asked]))
        self._number_link = flat_variables([self._asked], self._number, model)
        self._joined = memory_of(self._joint, model)
        self._number_link.attach()

    def add(self, gradients: Sequence[Any]) -> None:
        """Add one gradient or None for each variable."""
        ops = keras.ops
        flat = [
            _flat(gradient, segment.size) for gradient, segment in zip(gradients, self._segments, strict=True)
        ]
        marks = [np.float32(0 if gradient is None else PRESENT) for gradient in gradients]
        small = []
        for members, _ in self._runs:
            for index in members:
                free = self._marks[index] - self._segments[index].place.stop
                small += [flat[index], np.append(np.zeros(free, np.float32), marks[index])]
        variables = [self._joint, *self._sums]
        old = [variable.value for variable in variables]
        continues = ops.equal(old[0][-1:], self._asked.value)
        number = ops.where(continues, 0.0, self._asked.value)
        large = np.array([marks[index] for index in self._large], np.float32)
        room = np.zeros(self._room, np.float32)
        new = [ops.concatenate([room, *small, large, number]), *(flat[index] for index in self._large)]
        after = ops.cond(continues[0], lambda: list(map(ops.add, old, new)), lambda: new)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    def collect(self) -> None:
        """Copy the sum into the current vector."""
        joined, flat = self._joined(), self._vectors[self._turn]
        if joined[-1] != self._number.vector[0]:
            flat.vector.fill(0)  # nothing was added
            return
        if self._sent_in_place:
            flat.lie_in(joined[:-1].view(np.uint8))
            return
        joined, vector = joined[self._room :], flat.vector
        for link in self._large_links[self._turn]:
            link.read()
        for inside, (_, place) in zip(self._inside, self._runs, strict=True):
            vector[place] = joined[inside]
        if self._large:
            vector[self._marks[self._large]] = joined[self._rest]

    def twice(self) -> bool:
        """Whether a variable has more than one gradient in the collected sum."""
        return bool((self._vectors[self._turn].vector[self._marks] > PRESENT).any())

    def restart(self, turn: int) -> None:
        """Begin a new sum, for the vector with this index."""
        self._turn = turn
        if self._sent_in_place:  # the send from the variable's memory is complete
            self._vectors[turn].lie_in(self._memory[turn])
        self._number.vector[0] = self._number.vector[0] % _NUMBERS + 1
        self._number_link.write()

    def resume(self) -> None:
        """Resume with the sum in the current vector."""
        vector = self._vectors[self._turn].vector
        pieces = [*(vector[place] for _, place in self._runs), vector[self._marks[self._large]]]
        self._joined()  # on jax this puts the value back into the variable, where the next step reads it
        room = np.zeros(self._room, np.float32)
        self._joint.assign(np.concatenate([room, *pieces, self._number.vector[:1]]))
        for link in self._large_links[self._turn]:
            link.write()


def _runs(
    segments: Sequence[Segment], marks: npt.NDArray[np.int64], large: Sequence[int]
) -> Iterator[tuple[list[int], slice]]:
    """Group the small segments into contiguous parts of the vector: each part's segments and its place."""
    members: list[int] = []
    for index in range(len(segments) + 1):
        if index < len(segments) and index not in large:
            members.append(index)
        elif members:
            yield members, slice(segments[members[0]].offset, int(marks[members[-1]]) + 1)
            members = []


def _flat(gradient: Any, size: int) -> Any:
    if gradient is None:
        return keras.ops.zeros(size, "float32")
    dense = keras.ops.convert_to_tensor(gradient, sparse=False)
    return keras.ops.cast(keras.ops.reshape(dense, (-1,)), "float32")
