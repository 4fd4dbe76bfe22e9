"""tensorflow and jax: gradients are added up in variables of their own, by the traced training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nnlo_common import FlatVector, Segment
from nnlo_common._flat import PRESENT
from nnlo_keras._layout import layout_of
from nnlo_keras._roads import road

__all__ = ["TracedSum"]

# A gradient of so many numbers has a sum of its own, which costs no copy in the step. Smaller ones are put
# together, since each sum is fetched by itself.
_LARGE = 1 << 16


class TracedSum:
    """Sums where Python traces the training step once.

    Args:
        optimizer: whom the variables belong to that hold the sums.
        variables: of which there are gradients.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._segments = layout_of(variables).segments
        self._groups = _groups(self._segments)
        self._sums = [
            optimizer.add_variable(shape=(_size(group),), dtype="float32", name=f"sum_{number}")
            for number, group in enumerate(self._groups)
        ]
        # Of which variables a sum has begun; of none: the next gradients take the place of all.
        self._there = optimizer.add_variable(shape=(len(variables),), dtype="float32", name="sums_begun")

    def tie(self, vectors: Sequence[FlatVector], model: Any) -> None:
        """Say where sums are brought to, in turn."""
        self._vectors, self._marks, self._turn = vectors, vectors[0].layout.marks(), 0
        layout = layout_of(self._sums)
        self._roads = [road(self._sums, flat.part(layout), model) for flat in vectors]
        self._begun = FlatVector(layout_of([self._there]))
        self._begun_road = road([self._there], self._begun, model)

    def add(self, gradients: Sequence[Any]) -> None:
        """Add one gradient for each variable, or None."""
        ops = keras.ops
        given = dict(zip(self._segments, gradients, strict=True))
        there = ops.convert_to_tensor(np.array([one is not None for one in gradients], np.float32))
        new = [there, *(_joined(group, given) for group in self._groups)]
        old = [variable.value for variable in (self._there, *self._sums)]
        after = ops.cond(
            ops.max(old[0]) > 0,
            lambda: [ops.maximum(old[0], new[0]), *map(ops.add, old[1:], new[1:])],
            lambda: new,
        )
        for variable, value in zip((self._there, *self._sums), after, strict=True):
            variable.assign(value)

    def collect(self) -> None:
        """Bring the sum into the vector whose turn it is."""
        self._begun_road.read()
        there = self._begun.vector[: len(self._segments)]
        vector = self._vectors[self._turn].vector
        if there.any():
            self._roads[self._turn].read()
        else:
            vector.fill(0)
        vector[self._marks] = PRESENT * there

    def restart(self, turn: int) -> None:
        """Begin a new sum, for the vector of that number."""
        self._turn = turn
        self._begun.vector.fill(0)
        self._begun_road.write()

    def resume(self) -> None:
        """Go on with the sum that lies in the vector whose turn it is."""
        there = self._vectors[self._turn].vector[self._marks] != 0
        self._begun.vector[: len(self._segments)] = there
        self._begun_road.write()
        self._roads[self._turn].write()


def _groups(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Put neighbours together that are small."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if groups and segment.size < _LARGE and _size(groups[-1]) < _LARGE:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _size(group: Sequence[Segment]) -> int:
    """How much of the vector a group takes, with the room between its segments."""
    return group[-1].place.stop - group[0].offset


def _joined(group: Sequence[Segment], given: dict[Segment, Any]) -> Any:
    """The gradients of a group as they lie in the vector."""
    ops, pieces, end = keras.ops, [], group[0].offset
    for segment in group:
        if segment.offset > end:
            pieces.append(ops.zeros(segment.offset - end, "float32"))
        gradient, end = given[segment], segment.place.stop
        if gradient is None:
            pieces.append(ops.zeros(segment.size, "float32"))
        else:
            dense = ops.convert_to_tensor(gradient, sparse=False)
            pieces.append(ops.cast(ops.reshape(dense, (-1,)), "float32"))
    return pieces[0] if len(pieces) == 1 else ops.concatenate(pieces)
