"""Mean gradients of a group, made when a backward pass ends.

The gradients of the parameters are the group's means as soon as `backward()` returns, so that all that a loop
does with them before `step()`, such as clipping or a `GradScaler`, is what it does with one large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nnlo_common import ConfigurationError
from nnlo_common.plugin import GroupRank
from nnlo_torch._compat import after_backward
from nnlo_torch._flat_model import FlatModel

__all__ = ["Buckets", "GroupGradients"]

# -- buckets: parts of the gradient vector that are added up over a group while a backward pass still
# runs.

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
        self._under_way, trained = True, self._flat_model.trained()
        self._missing = [{index for index in part if trained[index]} for part in self._parts]

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


class GroupGradients:
    """Replaces the gradients of a model by their means over a group, after each backward pass.

    Where sums are made while the caller computes, they begin as soon as the first gradients are there.

    Each rank sends the whole vector: zeros for a parameter without a gradient there, and a mark for each that
    has one. So ranks that have used different parts of the model agree, and a parameter that none has used
    keeps no gradient.

    Args:
        group: this rank's side of the group.
        flat_model: the model.
        weight: returns the weight of the gradient that is ready.
        samples: returns the number of samples that this rank has taken so far.
    """

    def __init__(
        self,
        group: GroupRank,
        flat_model: FlatModel,
        weight: Callable[[], float],
        samples: Callable[[], int],
    ) -> None:
        self._group, self._flat_model = group, flat_model
        self._weight, self._samples = weight, samples
        self._on, self._queued, self._made = True, False, False
        self._buckets = Buckets(group, flat_model) if group.reducer.overlaps else None
        self._forget = flat_model.when_made(self._noticed)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the gradients of backward passes within a `with` block as they are."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def settle(self) -> None:
        """Make the means before a step, if no backward pass has made them since the last one."""
        if not self._made:
            self._make()
        self._made = self._queued = False  # a backward pass that failed has made none

    def release(self) -> None:
        """Leave the gradients alone from now on."""
        self._forget()

    def _noticed(self, index: int) -> None:
        if not self._on:
            return
        if not self._queued:
            self._queued = True
            after_backward(self._make)
        if self._buckets is not None:
            self._begin(self._buckets)
            self._buckets.notice(index)

    def _reach_all(self) -> None:
        """Take the gradients of all optimizers of the training, whichever has stepped last."""
        self._flat_model.chosen = range(len(self._flat_model.tensors))

    def _begin(self, buckets: Buckets) -> None:
        if not buckets.begun:
            self._reach_all()
            buckets.begin(self._weight(), self._samples())

    def _make(self) -> None:
        self._queued, self._made = False, True
        self._reach_all()
        if self._buckets is None:
            self._flat_model.collect()
            self._group.mean(self._flat_model.gradient.vector, self._weight(), self._samples())
        else:
            self._begin(self._buckets)
            self._buckets.finish()
        self._flat_model.hand_out()
