"""Step weights: the samples in the batches that the loop received since the previous step."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import is_number
from nnlo_torch._compat import LoaderBatches, driving_loader

__all__ = ["Again", "Draws", "StepWeights", "checked_weight"]


class Again(NamedTuple):
    """An element that has been dealt already: it fills a batch of its own, which has no weight.

    Attributes:
        element: the element.
    """

    element: Any


class Draws:
    """Samples drawn in one run of a sampler, counted by the loader's batch that they go into.

    Wrap the run in a `with` block, so that it also ends when the loop is left early.

    Args:
        loader: the batches of the loader that runs the sampler; None: drawn samples reach the loop at once.
    """

    def __init__(self, loader: LoaderBatches | None) -> None:
        self._loader = loader
        self._sizes: dict[int, int] = {}
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        if self._loader is not None and self._loader.drops_last:
            self._sizes.pop(self._loader.drawing, None)  # incomplete, so the loader drops it

    def batch_size(self, sampler: Any) -> int | None:
        """Return how many elements of a sampler make a batch; None: unknown, or the last may be dropped."""
        return None if self._loader is None else self._loader.batch_size(sampler)

    def add(self, samples: int) -> None:
        """Count samples that were drawn; 0: the batch has none that counts."""
        number = 0 if self._loader is None else self._loader.drawing
        self._sizes[number] = self._sizes.get(number, 0) + samples

    def settle(self) -> list[int]:
        """Return the samples of the batches that have reached the loop since the last call."""
        arrived = list(self._sizes) if self._loader is None else self._loader.arrived(self._sizes)
        return [self._sizes.pop(number) for number in arrived]

    @property
    def over(self) -> bool:
        """Whether nothing more will reach the loop; valid after `settle`."""
        return self._ended and (not self._sizes or self._loader is None or self._loader.over)


class StepWeights:
    """The number of samples behind each step of a worker.

    Example:
        >>> weights = StepWeights()
        >>> weights.step()  # no samples yet
        1.0
        >>> weights.add(32)
        >>> weights.add(16)
        >>> weights.step(), weights.step()  # the second step uses the same batches
        (48.0, 48.0)
    """

    def __init__(self) -> None:
        self._samples = self._in_gradients = 0  # since the last step; those of them with a gradient
        self._received = self._told = 0  # in all; as `fresh` has told
        self._last = self._last_gradient = 1.0
        self._empty = self._empty_gradient = False  # whether a batch without a sample that counts has arrived
        self._runs: list[Draws] = []

    def draws(self) -> Draws:
        """Begin a sampler's run; call it from a sampler or iterable data set that the loader runs."""
        run = Draws(driving_loader())
        self._settle()  # a restarted loader has dropped its prefetched batches
        self._runs.append(run)
        return run

    def add(self, samples: int) -> None:
        """Count samples that the loop has received."""
        self._samples += samples
        self._received += samples

    @property
    def received(self) -> int:
        """The number of samples that loops have received; a loader may have drawn more."""
        self._settle()
        return self._received

    def go_on_from(self, received: int) -> None:
        """Go on from an earlier number of received samples."""
        self._received = self._told = received

    def fresh(self) -> int:
        """Return the number of samples that loops have received since the last call."""
        fresh = self.received - self._told
        self._told += fresh
        return fresh

    def add_empty(self) -> None:
        """Note a batch without a sample that counts."""
        self._empty = self._empty_gradient = True

    def forget(self) -> None:
        """Discard the samples that the loop has received but will not train with."""
        self._settle()
        self._samples = self._in_gradients = 0
        self._empty = self._empty_gradient = False

    @property
    def receiving(self) -> bool:
        """Whether a loop over a sampler's batches is under way."""
        self._settle()
        return bool(self._runs)

    def gradient(self) -> float:
        """Return the number of samples since the last gradient or step; without any, the last one's number.

        Unlike `step` it leaves the samples to the step.
        """
        self._settle()
        if self._samples > self._in_gradients or self._empty_gradient:
            self._last_gradient = float(self._samples - self._in_gradients)
            self._in_gradients, self._empty_gradient = self._samples, False
        return self._last_gradient

    def step(self) -> float:
        """Return the number of samples since the last step; without any, return the last step's number."""
        self._settle()
        if self._samples or self._empty:
            self._last, self._samples = float(self._samples), 0
        self._in_gradients, self._empty, self._empty_gradient = 0, False, False
        return self._last

    def _settle(self) -> None:
        for run in self._runs:
            sizes = run.settle()
            self.add(sum(sizes))
            if 0 in sizes:
                self.add_empty()
        self._runs = [run for run in self._runs if not run.over]


def checked_weight(weight: Any) -> float | None:
    """Return a weight as a float, or None for "by samples"; refuse everything else."""
    if weight is None:
        return None
    single = isinstance(weight, np.generic) or (isinstance(weight, torch.Tensor) and weight.numel() == 1)
    number = weight.item() if single else weight
    if is_number(number) and 0 < number < float("inf"):
        return float(number)
    raise ConfigurationError(
        f"optimizer.weight = {weight!r} is not possible: it must be a finite number above 0, or None to "
        "weigh each step by its number of samples"
    )
