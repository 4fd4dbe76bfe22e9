"""Parts of Keras and its back ends that are not public, all in one place, named by what they give.

Where Keras has changed one of them a `ConfigurationError` names it and the version of Keras, or the function
does without. `tests/test_keras_compat.py` says which part it is before a user meets it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from nnlo_common.plugin import OtherProject

__all__ = [
    "EMA_SWAPPED",
    "MADE_AT_ONCE",
    "OptimizerInside",
    "add_all",
    "away",
    "begin_with",
    "build_metrics",
    "callbacks_of_fit",
    "copy_all",
    "data_of_fit",
    "end_epoch",
    "first_epoch",
    "give_state",
    "global_seeds",
    "has_no_value_yet",
    "is_spread",
    "kept_by_tensorflow",
    "layers_of",
    "made_to_be_trained",
    "memory_of_tensor",
    "module_of_back_end",
    "put_value",
    "samples_counted",
    "schedule_of",
    "sequence_of",
    "set_length",
    "spec_of",
    "strategy_of",
    "synchronise",
    "taken_state",
    "trained_by",
    "unvalidated",
    "value_of",
]

_KERAS = OtherProject("keras", "nnlo_keras/_compat.py")
_TENSORFLOW = OtherProject("tensorflow", "nnlo_keras/_compat.py")
_TORCH = OtherProject("torch", "nnlo_keras/_compat.py")

#: Where SwapEMAWeights notes whether the model has the averages.
EMA_SWAPPED = "_ema_weights_in_model"
#: What an optimizer's constructor makes before its options are set.
MADE_AT_ONCE = ("_iterations", "_learning_rate")


# -- the running fit: what called is found among the callers, for callbacks are not told ------------------


def callbacks_of_fit() -> Any:
    """Return the list of callbacks that has called, directly or not; None if none has."""
    frame = inspect.currentframe()
    while frame is not None:
        container = frame.f_locals.get("self")
        if isinstance(container, keras.callbacks.CallbackList):
            return container
        frame = frame.f_back
    return None


def data_of_fit() -> Any:
    """Return what the `fit` loops over that has called, directly or not; None if none has."""
    frame = inspect.currentframe()
    while frame is not None and "epoch_iterator" not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["epoch_iterator"]


def sequence_of(data: Any) -> Any:
    """Return the `PyDataset` behind what `fit` loops over; None if it is something else."""
    return getattr(getattr(data, "data_adapter", None), "py_dataset", None)


@_KERAS.uses("_distributed_dataset")
def spec_of(data: Any) -> Any:
    """Return what a batch looks like of what `fit` loops over, on TensorFlow."""
    return data._distributed_dataset.element_spec


@_KERAS.uses("_num_batches")
def set_length(data: Any, batches: int) -> None:
    """Let an epoch of what `fit` loops over have so many batches."""
    _ = data._num_batches  # what is not there would not be looked at
    data._num_batches = batches


@_KERAS.uses("_steps_seen")
def end_epoch(data: Any) -> None:
    """Let the epoch end that `fit` is in."""
    set_length(data, data._steps_seen)


# -- models -----------------------------------------------------------------------------------------------


@_KERAS.uses("_initial_epoch")
def first_epoch(model: Any) -> int:
    """Return the epoch that the next `fit` begins with, if it was set."""
    return model._initial_epoch or 0


@_KERAS.uses("_initial_epoch")
def begin_with(model: Any, epoch: int | None) -> None:
    """Let `fit` begin to count with this epoch; None, 0: as it was told."""
    _ = model._initial_epoch  # what is not there would not be looked at
    model._initial_epoch = epoch or None


@_KERAS.uses("_flatten_layers")
def layers_of(model: Any, *, itself: bool = True) -> list[Any]:
    """Return the layers of a model, those within others too."""
    return list(model._flatten_layers(include_self=itself))


@_KERAS.uses("_symbolic_build")
def build_metrics(model: Any, spec: Any) -> None:
    """Build what a model is measured by for batches that look like this, on TensorFlow."""
    model._symbolic_build(data_batch=spec)


@_KERAS.uses("_should_eval")
def unvalidated(model: Any) -> list[Callable[[], object]]:
    """Put the validation of a worker's `fit` to rest; return what undoes it."""
    _ = model._should_eval  # what is not there would not be asked
    model._should_eval = lambda *_: False

    def validate_again() -> None:
        del model._should_eval

    return [validate_again]


def kept_by_tensorflow(attribute: str) -> bool:
    """Whether an attribute of a model is TensorFlow's own list of others."""
    return attribute.startswith("_self_")


def strategy_of(model: Any) -> Any:
    """Return the distribution strategy of TensorFlow that is around a model; None: there is none."""
    return getattr(model, "_distribute_strategy", None)


def samples_counted(model: Any) -> int:
    """Return how many samples the mean loss of this epoch is of; 0 where Keras does not count them."""
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    return 0 if count is None else int(keras.ops.convert_to_numpy(count))


def synchronise(model: Any) -> None:
    """On JAX let the variables hold what `fit` has in their place during an epoch."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def give_state(model: Any, state: Iterable[Any]) -> None:
    """On JAX let the variables hold the state that the training function was given."""
    model._jax_state = dict(zip(_STATE, state, strict=True))
    model.jax_state_sync()


@_KERAS.uses("_get_jax_state")
def taken_state(model: Any) -> Any:
    """On JAX take the state out of the variables that the training function is to return."""
    return model._get_jax_state(**dict.fromkeys(_STATE, True))


# -- variables --------------------------------------------------------------------------------------------


def value_of(variable: Any) -> Any:
    """Return the tensor of a variable; what `value` does besides, such as autocasting, takes longer.

    On JAX it is None while `fit` has taken the value away.
    """
    try:  # for each variable at each step, so without a guard around it
        return variable._value
    except AttributeError as error:
        raise _KERAS.changed(f"{type(variable).__name__} has no _value any more") from error


def put_value(variable: Any, value: Any) -> None:
    """Let a variable of JAX be this array; `assign` would do no more, and takes longer."""
    value_of(variable)  # what is not there would not be looked at
    variable._value = value


def away(variable: Any) -> bool:
    """Whether `fit` has taken the value of a variable away, on JAX."""
    return value_of(variable) is None


@_KERAS.uses("_initializer")
def has_no_value_yet(variable: Any) -> bool:
    """Whether a variable waits for its first value; one that is away has had it, and will have it back."""
    return value_of(variable) is None and variable._initializer is not None


@_KERAS.uses("_layout")
def is_spread(variable: Any) -> bool:
    """Whether a variable of JAX lies on the devices of a keras.distribution."""
    return variable._layout is not None


def made_to_be_trained(layer: Any) -> Sequence[Any]:
    """Return the variables of a layer itself that were made to be trained, frozen ones too.

    Keras asks only once, when a variable is made, and has no public name for the answer; without it frozen
    weights are averaged, which does no harm but takes time.
    """
    return getattr(layer, "_trainable_variables", ())


def global_seeds(*, make: bool = False) -> Any:
    """Return the generator that layers draw from without one of their own; None if there is none yet.

    Args:
        make: one, if there is none.
    """
    try:
        from keras.src.backend.common.global_state import get_global_attribute
        from keras.src.random.seed_generator import global_seed_generator
    except ImportError as error:
        raise _KERAS.changed(f"its global seed generator is gone ({error})") from error
    return global_seed_generator() if make else get_global_attribute("global_seed_generator")


# -- optimizers -------------------------------------------------------------------------------------------


@_KERAS.uses("_trainable_variables")
def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


@_KERAS.uses("_learning_rate")
def schedule_of(optimizer: Any) -> Any:
    """Return the schedule that is the learning rate of an optimizer; None: the rate is a number."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def module_of_back_end(module: str) -> bool:
    """Whether a module of Keras exists only where its back end is installed."""
    return module.startswith("keras.src.backend.")


class OptimizerInside:
    """What Keras itself reads of an optimizer, for one that is around another, `inner_optimizer`."""

    inner_optimizer: Any

    def _track_variable(self, variable: Any) -> None:
        """Track a variable of the wrapper, but for the count and the rate that Keras' constructor makes."""
        if "inner_optimizer" in vars(self):
            super()._track_variable(variable)  # type: ignore[misc]

    @property
    def _iterations(self) -> Any:
        """The count of the wrapped optimizer, of gradients as they come."""
        return self.inner_optimizer._iterations

    @property
    def _learning_rate(self) -> Any:
        """The variable or schedule of the wrapped optimizer."""
        return self.inner_optimizer._learning_rate

    @property
    def _accumulated_gradients(self) -> Any:
        return self.inner_optimizer._accumulated_gradients

    @property
    def _model_variables_moving_average(self) -> Any:
        """The wrapped optimizer's: SwapEMAWeights looks for it here if a LossScaleOptimizer is around."""
        return self.inner_optimizer._model_variables_moving_average


# -- back ends --------------------------------------------------------------------------------------------


def memory_of_tensor(tensor: Any) -> Any:
    """Return the memory of an eager tensor of TensorFlow; `numpy` would copy it."""
    try:  # for each variable at each step, so without a guard around it
        return tensor._numpy()
    except AttributeError as error:
        raise _TENSORFLOW.changed(f"{type(tensor).__name__} has no _numpy any more") from error


@_TORCH.uses("_foreach_copy_")
def copy_all(places: list[Any], tensors: list[Any]) -> None:
    """Copy tensors of torch into others, by one call."""
    import torch

    torch._foreach_copy_(places, tensors)


@_TORCH.uses("_foreach_add_")
def add_all(places: list[Any], tensors: list[Any]) -> None:
    """Add tensors of torch to others, by one call."""
    import torch

    torch._foreach_add_(places, tensors)
