"""Advice for a Keras model: a probe of the compiled model and its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Advice, ProcessMemory, Vector, advise_with, whole_number
from nnlo_keras._compat import synchronise

__all__ = ["KerasProbed", "advise"]

# Keeps the last gradient, and next to nothing of those before.
_FORGETS = 1e-30


def advise(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    validation_data: Any = None,
    seconds: float = 60.0,
    link: tuple[float, float] | None = None,
    folder: str | Path | None = None,
) -> Advice:
    """Try a training for a minute, and say how many workers, which batch and which layout suit it.

    Call it in a script between `compile` and `fit`, started plainly or on several ranks, which then all try
    at the same time: that shows what they take from each other. The model is as before afterwards.

        model.compile(optimizer=nnlo_keras.Steady(keras.optimizers.SGD(0.05)), loss="mse")
        print(nnlo_keras.advise(model, x, y, batch_size=100))

    A model with a `train_step` of its own is tried with Keras' own step: its loss, and its optimizer.

    Args:
        model: compiled, Functional or Sequential.
        x: arrays, or a `PyDataset` such as `H5Sequence`, as for `fit`.
        y: the labels; None for a `PyDataset`.
        batch_size: as for `fit`.
        validation_data: as for `fit`; only whether there is any is told.
        seconds: about how long it takes.
        link: seconds of a short message, and bytes a second of a long one, between hosts, as `nnlo doctor`
            measures them; None: say what follows for a common network.
        folder: write advice.html and advice.json there.

    Raises:
        ConfigurationError: the model is not compiled or has no inputs, it does not fit into the memory, a
            loss is not finite, or there are too few samples; nothing is written then.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.01), "mse")
        >>> draws = np.random.default_rng(0)
        >>> x, y = draws.normal(size=(256, 8)), draws.normal(size=(256, 1))
        >>> advise(model, x, y, batch_size=32, seconds=1).facts.parameters
        9
    """
    if getattr(model, "loss", None) is None or getattr(model, "optimizer", None) is None:
        raise ConfigurationError("the model has no loss or no optimizer yet; compile it before advise()")
    one = KerasProbed(
        model, model.loss, model.optimizer, x, y, batch_size=batch_size, validated=validation_data is not None
    )
    try:
        return advise_with(one, seconds=seconds, link=link, folder=folder, wrappers="nnlo_keras")
    finally:
        one.restore()


class KerasProbed:
    """A training of Keras in the hands of a probe; see `nnlo_common.simulation._probe.ProbedModel`.

    Two models of the same layers train: one with an optimizer like yours, one with an optimizer whose memory
    is the last gradient. So it works on every back end, in Keras' own compiled step.

    Args:
        model: the user's.
        loss: as for `compile`.
        optimizer: the user's, wrapped or not; a new one like it makes the steps.
        x: arrays or a `PyDataset`.
        y: labels.
        batch_size: of arrays.
        validated: whether there are samples to validate with.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        validated: bool = True,
    ) -> None:
        ends = _end(model, "inputs"), _end(model, "outputs")
        if ends[0] is None or ends[1] is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no inputs that Keras knows, so it cannot be tried; use a "
                f"Functional "
                "or Sequential model with an Input"
            )
        self._model, self._kept = model, model.get_weights()
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        # Not by `keras.saving`, which loads TensorFlow where that is installed: some 300 MB.
        made = type(optimizer).from_config(optimizer.get_config())
        self._trained, self._noted = (keras.Model(*ends) for _ in range(2))
        self._gradients = keras.optimizers.SGD(1.0, momentum=_FORGETS)
        self._trained.compile(optimizer=made, loss=loss)
        self._noted.compile(optimizer=self._gradients, loss=loss, auto_scale_loss=False)
        self._optimizer = made
        self.framework = f"Keras {keras.__version__} on {keras.backend.backend()}"
        self.device, self.validated = "the processor", validated
        self.layers = [(one.path, int(np.prod(one.shape))) for one in model.trainable_variables]
        if not self.layers:
            raise ConfigurationError("the model has no variables to train; give one that has")
        self._data = _AnyBatches(x, y, batch_size)
        self.batch, self.samples = self._data.batch, self._data.samples
        self._memory = ProcessMemory()

    @property
    def slots(self) -> int:
        """Numbers that the optimizer keeps for each variable."""
        kept = sum(int(np.prod(one.shape)) for one in self._optimizer.variables if len(one.shape))
        return round(kept / max(sum(size for _, size in self.layers), 1))

    def read(self, size: int) -> Any:
        """Return a batch of this size."""
        return self._data.take(size)

    def step(self, batch: Any) -> float:
        """Train on a batch."""
        return _loss(self._trained.train_on_batch(*batch))

    def gradient(self, batch: Any) -> Vector:
        """Return the gradient of a batch: the memory of an optimizer that forgets; then the weights again."""
        before = [keras.ops.copy(one.value) for one in self._model.variables]
        self._noted.train_on_batch(*batch)
        synchronise(self._noted)
        parts = [keras.ops.convert_to_numpy(one).reshape(-1) for one in self._gradients.momentums]
        for variable, value in zip(self._model.variables, before, strict=True):
            variable.assign(value)
        return -np.concatenate(parts).astype(np.float32)

    def step_parts(self, batch: Any) -> None:
        """Do nothing: Keras' compiled step has no parts that can be told apart."""

    def begin_memory(self) -> None:
        """Forget the peak before."""
        self._memory.begin()

    def peak_bytes(self) -> int:
        """Return the peak since then."""
        return self._memory.bytes

    def left_bytes(self) -> int | None:
        """Return how much memory is left on the host."""
        return self._memory.left

    def restore(self) -> None:
        """Give the model its weights back."""
        self._model.set_weights(self._kept)


class _AnyBatches:
    """Batches of any size from arrays or from a `PyDataset`.

    Args:
        x, y: as for `fit`.
        batch_size: of arrays; None: 32, as in `fit`.
    """

    def __init__(self, x: Any, y: Any, batch_size: int | None) -> None:
        self._sequence = x if isinstance(x, keras.utils.PyDataset) else None
        self._place = 0
        if self._sequence is None:
            arrays = [one for one in keras.tree.flatten((x, y)) if one is not None]
            if y is None or not all(hasattr(one, "shape") for one in arrays):
                raise ConfigurationError(
                    f"a probe takes arrays x and y, or a PyDataset such as H5Sequence, not {type(x).__name__}"
                )
            self._all = (x, y)
            self.samples = int(arrays[0].shape[0])
            self.batch = 32 if batch_size is None else whole_number("batch_size", batch_size, 1)
            self._order = np.random.default_rng(0).permutation(self.samples)
            return
        if batch_size is not None:
            raise ConfigurationError(f"batch_size={batch_size!r} is for arrays; a PyDataset has its own")
        self._rest: Any = self._next()
        self.batch = _length(self._rest)
        size = getattr(self._sequence, "size", None)
        self.samples = size if isinstance(size, int) else len(self._sequence) * self.batch

    def take(self, size: int) -> Any:
        """Return the next samples."""
        if self._sequence is None:
            rows = [self._order[(self._place + at) % self.samples] for at in range(size)]
            self._place += size
            return keras.tree.map_structure(lambda one: np.asarray(one)[rows], self._all)
        found = self._next() if self._rest is None else self._rest
        while _length(found) < size:
            found = _mapped(lambda *two: np.concatenate(two), found, self._next())
        rest = _mapped(lambda one: one[size:], found)
        self._rest = rest if _length(rest) else None
        return _mapped(lambda one: one[:size], found)

    def _next(self) -> Any:
        assert self._sequence is not None
        count = len(self._sequence)
        if not count:
            raise ConfigurationError("the data has no batches, so there is nothing to try")
        batch = self._sequence[self._place % count]
        self._place += 1
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ConfigurationError(f"a probe takes batches (x, y), and the data yields {batch!r:.60}")
        return _mapped(keras.ops.convert_to_numpy, batch)


def _end(model: Any, name: str) -> Any:
    """Return the inputs or the outputs of a model: one, or as they are arranged; None: it has none."""
    try:
        found = getattr(model, name)
        return (found[0] if len(found) == 1 else getattr(model, name.removesuffix("s"))) if found else None
    except (AttributeError, ValueError):
        return None


def _mapped(change: Any, *some: Any) -> Any:
    return keras.tree.map_structure(change, *some)


def _length(batch: Any) -> int:
    return len(keras.tree.flatten(batch)[0])


def _loss(told: Any) -> float:
    return float(told[0] if isinstance(told, Sequence) else told)
