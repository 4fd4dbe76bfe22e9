"""tensorflow and jax: gradients are added up in variables of their own, by the traced training step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import keras
import numpy as np

from nnlo_common import FlatVector
from nnlo_common._flat import PRESENT
from nnlo_keras._layout import layout_of
from nnlo_keras._roads import road

__all__ = ["TracedSum"]

# A gradient of so many numbers has a sum of its own, which costs no copy in the step. Smaller ones are put
# together, since each sum is fetched by itself.
_LARGE = 1 << 16
# So many sums have numbers of their own; float32 counts no further than 2**24.
_NUMBERS = 1 << 20


class TracedSum:
    """Sums where Python traces the training step once.

    Each sum has a number. That of the sum asked for is only read by the step, so that nothing needs to be
    written for a new one to begin where variables can be host memory.

    Args:
        optimizer: whom the variables belong to that hold the sums.
        variables: of which there are gradients.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._segments = segments = layout_of(variables).segments
        self._small = [index for index, segment in enumerate(segments) if segment.size < _LARGE]
        self._large = [index for index, segment in enumerate(segments) if segment.size >= _LARGE]
        self._head = 1 + len(segments)
        ends = np.cumsum([self._head, *(segments[index].size for index in self._small)]).tolist()
        self._pieces = [slice(start, end) for start, end in pairwise(ends)]
        self._asked = optimizer.add_variable(shape=(1,), dtype="float32", name="sum_asked")
        # The number of the sum, of how many gradients it is for each variable, and the small sums.
        self._joint = optimizer.add_variable(shape=(ends[-1],), dtype="float32", name="sum_joint")
        self._sums = [
            optimizer.add_variable(shape=(segments[index].size,), dtype="float32", name=f"sum_{index}")
            for index in self._large
        ]

    def tie(self, vectors: Sequence[FlatVector], model: Any) -> None:
        """Say where sums are brought to, in turn."""
        self._vectors, self._marks, self._turn = vectors, vectors[0].layout.marks(), 0
        starts = [self._segments[index].offset for index in self._large]
        layouts = [layout_of([variable]) for variable in self._sums]
        self._roads = [
            [
                road([variable], flat.part(layout, slice(start, start + layout.size)), model)
                for variable, layout, start in zip(self._sums, layouts, starts, strict=True)
            ]
            for flat in vectors
        ]
        self._number, self._joined = (
            FlatVector(layout_of([self._asked])),
            FlatVector(layout_of([self._joint])),
        )
        self._number_road = road([self._asked], self._number, model)
        self._joint_road = road([self._joint], self._joined, model)
        self._number_road.attach()

    def add(self, gradients: Sequence[Any]) -> None:
        """Add one gradient for each variable, or None."""
        ops = keras.ops
        flat = [
            _flat(gradient, segment.size) for gradient, segment in zip(gradients, self._segments, strict=True)
        ]
        there = ops.convert_to_tensor(np.array([one is not None for one in gradients], np.float32))
        variables = [self._joint, *self._sums]
        old = [variable.value for variable in variables]
        goes_on = ops.equal(old[0][:1], self._asked.value)
        number = ops.where(goes_on, 0.0, self._asked.value)
        new = [
            ops.concatenate([number, there, *(flat[index] for index in self._small)]),
            *(flat[index] for index in self._large),
        ]
        after = ops.cond(goes_on[0], lambda: list(map(ops.add, old, new)), lambda: new)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    def collect(self) -> None:
        """Bring the sum into the vector whose turn it is."""
        self._joint_road.read()
        joined, vector = self._joined.vector, self._vectors[self._turn].vector
        if joined[0] != self._number.vector[0]:
            vector.fill(0)  # nothing was added
            return
        for way in self._roads[self._turn]:
            way.read()
        for index, piece in zip(self._small, self._pieces, strict=True):
            vector[self._segments[index].place] = joined[piece]
        vector[self._marks] = PRESENT * (joined[1 : self._head] > 0)

    def restart(self, turn: int) -> None:
        """Begin a new sum, for the vector of that number."""
        self._turn = turn
        self._number.vector[0] = self._number.vector[0] % _NUMBERS + 1
        self._number_road.write()

    def resume(self) -> None:
        """Go on with the sum that lies in the vector whose turn it is."""
        joined, vector = self._joined.vector, self._vectors[self._turn].vector
        joined[0] = self._number.vector[0]
        joined[1 : self._head] = vector[self._marks] != 0
        for index, piece in zip(self._small, self._pieces, strict=True):
            joined[piece] = vector[self._segments[index].place]
        for way in (self._joint_road, *self._roads[self._turn]):
            way.write()


def _flat(gradient: Any, size: int) -> Any:
    if gradient is None:
        return keras.ops.zeros(size, "float32")
    dense = keras.ops.convert_to_tensor(gradient, sparse=False)
    return keras.ops.cast(keras.ops.reshape(dense, (-1,)), "float32")
