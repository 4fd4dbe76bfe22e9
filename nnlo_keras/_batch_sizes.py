"""Number of batches and of samples that `fit` has trained on, as far as Keras tells."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_keras._compat import data_of_fit, samples_counted, synchronise

__all__ = ["BatchSizes"]


class BatchSizes:
    """Counts the batches and the samples of each execution of a `fit`.

    Keras numbers batches as if each execution were full, and does not tell callbacks what a batch holds.

    Args:
        batches: what `fit` loops over; None where that was not found.
        model: the model.
        steps_matter: whether the optimizer counts each batch as a step, in `model.optimizer`.
    """

    def __init__(self, batches: Any, model: Any, *, steps_matter: bool) -> None:
        self._fit, self._model, self._steps_matter = batches, model, steps_matter
        self._adapter = getattr(batches, "data_adapter", None)
        self._seen, self._steps = 0, 0.0  # samples and steps of this epoch, where they have to be counted

    @classmethod
    def of(cls, model: Any, *, steps_matter: bool) -> BatchSizes:
        """Find what the `fit` of a model loops over that has called, directly or not."""
        return cls(data_of_fit(), model, steps_matter=steps_matter)

    @property
    def per_execution(self) -> int:
        """How many batches an execution has, if it is full."""
        return int(getattr(self._fit, "steps_per_execution", None) or 1)

    def begin_epoch(self) -> None:
        """Begin to count."""
        self._seen, self._steps = 0, self._steps_made()

    def batches(self, first: int, last: int) -> int:
        """Return how many batches an execution really had that was to have those from `first` to `last`."""
        if last == first:
            return 1
        number = getattr(self._fit, "num_batches", None)
        if number:
            return max(0, min(last + 1, number) - first)
        if self._steps_matter:  # the last execution of an epoch of unknown length
            before, self._steps = self._steps, self._steps_made()
            return min(last + 1 - first, int(self._steps - before))
        return last + 1 - first

    def samples(self, first: int, count: int) -> float:
        """Return how many samples some batches had, or how many batches there were if nothing tells."""
        size = getattr(self._adapter, "batch_size", None)
        number = getattr(self._adapter, "num_batches", None)
        if size and number and not getattr(self._fit, "steps_per_epoch", None):
            partial = getattr(self._adapter, "partial_batch_size", None) or size
            return float(size * count + (partial - size if first < number <= first + count else 0))
        synchronise(self._model)
        before, self._seen = self._seen, samples_counted(self._model)
        return float(self._seen - before if self._seen > before else count)

    def _steps_made(self) -> float:
        if not self._steps_matter or self.per_execution == 1:
            return 0.0
        synchronise(self._model)
        return float(keras.ops.convert_to_numpy(self._model.optimizer.iterations))
