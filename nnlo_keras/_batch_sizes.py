"""Numbers of batches and samples that `fit` has trained on, as far as Keras exposes them."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_keras._compat import data_of_fit, samples_counted, synchronise

__all__ = ["BatchSizes"]


class BatchSizes:
    """Counts the batches and the samples of each execution of a `fit`.

    Keras numbers batches as if each execution were full, and does not pass batch sizes to callbacks.

    Args:
        batches: `fit`'s epoch iterator; None if it was not found.
        model: the model.
        steps_matter: whether `model.optimizer` counts each batch as a step.
    """

    def __init__(self, batches: Any, model: Any, *, steps_matter: bool) -> None:
        self._fit, self._model, self._steps_matter = batches, model, steps_matter
        self._adapter = getattr(batches, "data_adapter", None)
        self._seen, self._steps = 0, 0.0  # samples and steps of this epoch, if Keras has to be queried
        self._again = 0  # batches at the end of each pass over the data that are in it already

    @classmethod
    def of(cls, model: Any, *, steps_matter: bool) -> BatchSizes:
        """Make it for the running `fit`, found on the call stack."""
        return cls(data_of_fit(), model, steps_matter=steps_matter)

    @property
    def per_execution(self) -> int:
        """Number of batches in a full execution."""
        return int(getattr(self._fit, "steps_per_execution", None) or 1)

    def begin_epoch(self, *, again: int = 0) -> None:
        """Start counting an epoch.

        Args:
            again: so many batches of each pass over the data follow at its end once more.
        """
        self._seen, self._steps, self._again = 0, self._steps_made(), again

    def batches(self, first: int, last: int) -> int:
        """Return the real number of batches of an execution that Keras numbers from `first` to `last`."""
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
        """Return the number of samples in these batches, or `count` if Keras exposes no sizes."""
        size = getattr(self._adapter, "batch_size", None)
        number = getattr(self._adapter, "num_batches", None)
        if size and number and not getattr(self._fit, "steps_per_epoch", None):
            first %= number + self._again  # of this pass
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
