"""Evaluation of a model: sums over batches, and `eval()` mode without gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError

__all__ = ["Sums", "evaluating", "samples_in"]


class Sums:
    """Sums of the values measured on each batch, weighted by its number of samples."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: Counter[str] = Counter()

    def add(self, batch: object, means: Mapping[str, Any]) -> None:
        """Add the means over one batch."""
        samples = samples_in(batch)
        self.samples += samples
        for name, value in means.items():
            self._sums[name] += samples * float(value)  # type: ignore[assignment]

    def means(self) -> dict[str, float]:
        """Return the means over all samples so far; empty without samples."""
        return {name: total / self.samples for name, total in self._sums.items()} if self.samples else {}

    def state(self) -> dict[str, Any]:
        """Return the sums for a checkpoint."""
        return {"samples": self.samples, "sums": dict(self._sums)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume with saved sums."""
        self.samples, self._sums = state["samples"], Counter(state["sums"])


def samples_in(batch: object) -> int:
    """Return the number of samples in a batch: the length of the first tensor or array in it."""
    samples = _length(batch)
    if samples is not None:
        return samples
    raise ConfigurationError(
        f"the number of samples in a batch of type {type(batch).__name__} is unknown; let the loader yield "
        "tensors, or tuples, lists or dicts of them, with the samples along the first dimension"
    )


def _length(batch: object) -> int | None:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else 1
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, Sequence) and not isinstance(parts, str | bytes):
        return next((found for found in map(_length, parts) if found is not None), None)
    return None


@contextmanager
def evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put modules in `eval()` mode without gradients; afterwards restore the mode of each part."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
