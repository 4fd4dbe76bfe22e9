"""Samples behind a step: those of the batches that the loop has got since the step before."""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import is_number
from nnlo_torch._compat import LoaderBatches, driving_loader

__all__ = ["Draws", "StepWeights", "checked_weight"]


class Draws:
    """What a sampler draws in one run, by the batch of the loader that it goes into.

    Used in a `with` block around the run, for a run that the loop has left ends, too.

    Args:
        loader: the loader that the sampler runs for; None: what was drawn has reached the loop.
    """

    def __init__(self, loader: LoaderBatches | None) -> None:
        self._loader = loader
        self._sizes: Counter[int] = Counter()
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        if self._loader is not None and self._loader.drops_last:
            self._sizes.pop(self._loader.drawing, None)  # too few for a batch

    def add(self, samples: int) -> None:
        """Count samples that were drawn."""
        self._sizes[0 if self._loader is None else self._loader.drawing] += samples

    def settle(self) -> int:
        """Return how many samples have reached the loop since it was last asked."""
        loader = self._loader
        return sum(
            self._sizes.pop(number)
            for number in list(self._sizes)
            if loader is None or not loader.is_under_way(number)
        )

    @property
    def over(self) -> bool:
        """Whether nothing more will reach the loop, once settled."""
        return self._ended and (not self._sizes or self._loader is None or self._loader.over)


class StepWeights:
    """The number of samples behind each step of a worker.

    Example:
        >>> weights = StepWeights()
        >>> weights.step()  # nothing is known yet
        1.0
        >>> weights.add(32)
        >>> weights.add(16)
        >>> weights.step(), weights.step()  # the second with the same batches
        (48.0, 48.0)
    """

    def __init__(self) -> None:
        self._samples = 0
        self._last = 1.0
        self._runs: list[Draws] = []

    def draws(self) -> Draws:
        """Begin a run of a sampler; called by what the loader runs."""
        run = Draws(driving_loader())
        self._settle()  # a loader that goes round again has let go of what it had under way
        self._runs.append(run)
        return run

    def add(self, samples: int) -> None:
        """Count samples that the loop has got."""
        self._samples += samples

    def forget(self) -> None:
        """Leave out what the loop has got but will not train with."""
        self._settle()
        self._samples = 0

    def step(self) -> float:
        """Return the number of samples since the last step; that of the last step if there were none."""
        self._settle()
        if self._samples:
            self._last, self._samples = float(self._samples), 0
        return self._last

    def _settle(self) -> None:
        for run in self._runs:
            self._samples += run.settle()
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
