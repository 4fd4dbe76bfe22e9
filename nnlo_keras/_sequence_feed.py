"""SequenceFeed: feeds `fit` from `Batches`, with epochs in step and leased batches.

Keras needs the number of batches in an epoch, and on TensorFlow prefetches them in its own threads, which
must not query a server. So Keras's data always yields one sample, and the training function gets the leased
batches instead. When none are left, the feed sets Keras's epoch to complete.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import MOST_PASSES, LeasedBatches, Session, warn
from nnlo_keras._compat import data_of_fit, end_epoch, sequence_of, set_length
from nnlo_keras._hdf5 import Batches

__all__ = ["SequenceFeed"]

_ASKED = "Batches with assignment='dynamic' was given"


class SequenceFeed:
    """Feeds `fit` through the epochs of its `Batches`.

    Args:
        batches: `fit`'s epoch iterator.
        data: the sequence behind it.
    """

    def __init__(self, batches: Any, data: Batches) -> None:
        self._fit, self._data = batches, data
        self._leases: LeasedBatches | None = None
        self._ready: deque[Any] = deque()  # batches for TensorFlow's iterator
        self._iterator: Any = None
        self._batch: Any = None  # leased for the step that comes
        self._over: Callable[[], bool] | None = None  # if an epoch takes passes until its progress is made
        self._pass = 0  # of the epoch
        self._repeats = False  # whether the leased batch is one that another rank of the group has, too
        self.idle = False

    @classmethod
    def of_fit(cls) -> SequenceFeed | None:
        """Make a feed for the running `fit`; None if its data is not Batches."""
        batches = data_of_fit()
        data = sequence_of(batches)
        if not isinstance(data, Batches):
            return None
        steps = getattr(batches, "steps_per_epoch", None) or math.inf
        if steps < len(data) and not (data.shuffles or data.leased):
            warn(
                f"with shuffle=False and steps_per_epoch={steps} each epoch takes the same {steps} of "
                f"{len(data)} batches; leave out steps_per_epoch to take all, or shuffle=False to take others"
            )
        return cls(batches, data)

    @property
    def size(self) -> int:
        """The number of samples in an epoch of all workers."""
        return self._data.size

    @property
    def batch_size(self) -> int:
        """The number of samples in a full batch."""
        return self._data.batch_size

    def lease(self, model: Any, team: Session) -> list[Callable[[], object]]:
        """Train a worker's model on leased batches, if the data is leased; return functions that undo it."""
        if not self._data.leased:
            return []
        for name in ("steps_per_epoch", "steps_per_execution"):
            if (getattr(self._fit, name, None) or 1) > 1:
                raise ConfigurationError(
                    f"{_ASKED} together with {name}={getattr(self._fit, name)}, but the leases define the "
                    f"length of an epoch; leave {name} out, or use assignment='static'"
                )
        leases = self._leases = self._data.lease_from(team)
        team.before_epoch_ends = leases.give_back
        step = model.train_function
        backend = keras.backend.backend()
        model.train_function = getattr(self, f"_{backend}_step", self._torch_step)(step)

        def undo() -> None:
            self._data.fed = False
            model.train_function = None  # fit makes a new one

        return [undo]

    def train(self, worker: int, workers: int) -> None:
        """Have a worker's share: this rank was a spare, and trains from now on."""
        self._data.train(worker, workers)

    def take_passes(self, over: Callable[[], bool]) -> None:
        """Lease pass after pass until an epoch is over."""
        self._over = over

    @property
    def _number(self) -> int:
        """The number of the pass in which samples are leased."""
        epoch = self._data.epoch
        return epoch if self._over is None else epoch * MOST_PASSES + self._pass

    def _more(self) -> bool:
        """Whether this epoch has another batch for this worker."""
        assert self._leases is not None  # installed by `lease` only
        if self._over is None:
            return self._leases.more(self._number)
        while not self._over():
            if self._leases.more(self._number):
                return True
            self._pass += 1
        return False

    def repeats(self, batch: int) -> bool:
        """Return whether a batch of this epoch has no weight, because another rank of the group has it."""
        return self._repeats if self._leases is not None else self._data.repeats(batch)

    @property
    def dynamic(self) -> bool:
        """Whether workers lease the batches."""
        return self._data.dynamic

    @property
    def has_position(self) -> bool:
        """Whether a training can resume in mid-epoch."""
        fit = self._fit
        return fit.steps_per_epoch is None and (getattr(fit, "steps_per_execution", None) or 1) == 1

    def state(self, taken: int | None, team: Session | None) -> dict[str, Any]:
        """Return this rank's position in its data: after this many batches of an epoch; None: between two."""
        # In a process alone nobody may call `turn_to`.
        state = self._data.state(0 if taken is None and team is None else taken)
        if self._leases is not None:
            state["leases"] = self._leases.left()
        if self._data.dynamic and team is not None and team.role == "server 0":
            state["ledger"] = self._data.ledger(team).state()
        return state

    def described(self) -> dict[str, Any]:
        """Return what a checkpoint compares of the data set, on any number of workers."""
        return self._data.described()

    def load(self, state: Mapping[str, Any], team: Session | None) -> None:
        """Resume at that position; call it before any rank leases."""
        self._data.load(state)
        if "ledger" in state and team is not None and team.role == "server 0":
            self._data.ledger(team).load(state["ledger"])

    def resume_epoch(self, state: Mapping[str, Any] | None) -> None:
        """Let `fit` train on the remaining batches of this epoch, from the loaded `state`."""
        if state is not None and self._leases is not None and "leases" in state:
            self._leases.resume(state["leases"])
        if self.has_position:
            set_length(self._fit, len(self._data))

    def begin_epoch(self, epoch: int) -> None:
        """Turn to the next epoch, but not to one before that of a resumed `fit`."""
        self._data.turn_to(epoch)
        if self._leases is not None:
            # Passes until its progress is made: as many batches as anybody may ask for.
            set_length(self._fit, len(self._data) if self._over is None else sys.maxsize)
            self._pass = 0
            self.idle = not self._more()

    def begin_batch(self) -> None:
        """Take the batch of the next step, which may ask the server for another lease.

        Not within that step: on JAX the variables have no values there, and this rank may begin to serve.
        """
        if self._leases is not None and not self.idle:
            self._batch = self._leased()

    def serve(self) -> None:
        """Give `fit` no more batches: this rank was a worker, and serves from now on."""
        self._leases, self.idle = None, True
        self._data.serve()

    def end_batch(self) -> None:
        """End the epoch if no batches are left."""
        if self._leases is not None and (self.idle or not self._more()):
            end_epoch(self._fit)

    # -- replacements of Keras's training function ----------------------------------------------------

    def _torch_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def train(batches: Any) -> Any:
            # If other workers took the whole epoch, Keras still makes one step.
            return {} if self.idle else step([self._next(len(batches[0]))])

        return train

    def _jax_step(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def train(state: Any, batches: Iterator[Any]) -> Any:
            like = next(batches)
            return ({}, state) if self.idle else step(state, iter([self._next(len(like))]))

        return train

    def _tensorflow_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def train(batches: Any) -> Any:
            if self.idle:
                return {}
            if self._iterator is None:
                self._iterator = self._as_tensorflow(batches.element_spec)
            self._ready.append(self._next(len(batches.element_spec)))
            return step(self._iterator)

        return train

    def _as_tensorflow(self, like: Any) -> Any:
        """Return an iterator over `_ready` that does not prefetch."""
        import tensorflow as tf

        def batches() -> Iterator[Any]:
            while True:
                yield self._ready.popleft()

        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        return iter(tf.data.Dataset.from_generator(batches, output_signature=like).with_options(options))

    def _leased(self) -> Any:
        """Take the next leased batch."""
        assert self._leases is not None  # the caller looks
        if not self._leases.more(self._number):
            raise ConfigurationError(
                f"{_ASKED}, but Keras {keras.__version__} continues after the end of an epoch; use "
                "assignment='static'"
            )
        batch, size = self._leases.take(self._number)
        self._repeats = not size
        return batch

    def _next(self, parts: int) -> Any:
        batch, self._batch = self._batch, None
        if len(batch) != parts:
            raise ConfigurationError(
                f"{_ASKED} together with class_weight, which Keras cannot apply to leased batches; write "
                "weights into the files and pass weights=, or use assignment='static'"
            )
        if keras.backend.backend() == "tensorflow":
            return batch
        return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
