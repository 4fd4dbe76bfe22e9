"""Buckets: parts of the gradient vector that are added up over a group while a backward pass still runs."""

from __future__ import annotations

from nnlo_common import ConfigurationError
from nnlo_common.plugin import GroupRank
from nnlo_torch._flat_model import FlatModel

__all__ = ["Buckets"]

_SIZE = 1 << 20  # numbers: 4 MB, as large as a message must be to use a network well


class Buckets:
    """Parts of a model's gradient that are added up over a group one after another.

    All ranks start them in one order, from the last parameter to the first, as backward passes mostly make
    gradients. Started in the order in which they get ready, they would not fit together where ranks use
    different parts of the model.

    Args:
        group: this rank's side of the group.
        flat_model: the model.
        size: the number of numbers after which a bucket ends; None: 4 MB of them.
    """

    def __init__(self, group: GroupRank, flat_model: FlatModel, size: int | None = None) -> None:
        self._group, self._flat_model = group, flat_model
        self._parts = _parts(flat_model, size or _SIZE)
        self._bucket = {index: number for number, part in enumerate(self._parts) for index in part}
        trained = [
            {index for index in part if flat_model.tensors[index].requires_grad} for part in self._parts
        ]
        self._trained = trained
        self._begin()

    @property
    def begun(self) -> bool:
        """Whether a mean is under way."""
        return self._under_way

    def begin(self, weight: float, samples: int) -> None:
        """Begin the mean of a gradient.

        Args:
            weight: the weight of this rank's gradient.
            samples: the number of samples that this rank has taken so far.
        """
        self._group.begin_mean(weight, samples)
        self._under_way = True

    def notice(self, index: int) -> None:
        """Start the next buckets if the gradient of this parameter was the last that they waited for."""
        number = self._bucket[index]
        if number < self._next:
            raise ConfigurationError(
                f"the gradient of {self._flat_model.names[index]} has changed while it was being added up "
                "over the group: an earlier backward pass has failed. Make a step, or use all_reduce='mpi'"
            )
        self._missing[number].discard(index)
        while self._next < len(self._parts) and not self._missing[self._next]:
            self._start()

    def finish(self) -> None:
        """Start the remaining buckets, and return once the vector holds the mean."""
        while self._next < len(self._parts):
            self._start()
        self._group.end_mean(self._flat_model.gradient.vector)
        self._begin()

    def _begin(self) -> None:
        self._under_way, self._next = False, 0
        self._missing = [set(one) for one in self._trained]

    def _start(self) -> None:
        part = self._parts[self._next]
        self._next += 1
        self._flat_model.collect(part)
        self._group.add_part(self._flat_model.gradient.vector, self._flat_model.place_of(part))


def _parts(flat_model: FlatModel, size: int) -> list[range]:
    """Return neighbouring parameters, from the last to the first, whose places together have `size`."""
    parts, stop = [], len(flat_model.tensors)
    for start in range(stop - 1, -1, -1):
        place = flat_model.place_of(range(start, stop))
        if place.stop - place.start >= size or start == 0:
            parts.append(range(start, stop))
            stop = start
    return parts
