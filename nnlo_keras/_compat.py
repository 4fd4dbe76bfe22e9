"""Private parts of Keras and its back ends that nnlo uses, each behind a function named after its purpose.

If a new Keras has changed one, a `ConfigurationError` names it and the version, or the function works without
it. `tests/keras/test_compat.py` fails on the changed part before a user meets it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat
from typing import Any

import keras

from nnlo_common.plugin import OtherProject, seed_random

__all__ = [
    "EMA_SWAPPED",
    "MADE_AT_ONCE",
    "OptimizerInside",
    "add_all",
    "arguments_of_fit",
    "away",
    "batch_size_of_fit",
    "begin_with",
    "build_metrics",
    "callbacks_of_fit",
    "copy_all",
    "data_of_fit",
    "deal_passes",
    "decays",
    "end_epoch",
    "ending_epoch",
    "first_epoch",
    "give_state",
    "global_seeds",
    "has_no_value_yet",
    "is_spread",
    "kept_by_tensorflow",
    "layers_of",
    "make_data_again",
    "made_to_be_trained",
    "memory_of_tensor",
    "module_of_back_end",
    "parts_of_dataset",
    "put_value",
    "samples_counted",
    "schedule_of",
    "seed_generators",
    "seed_layers",
    "sequence_of",
    "set_length",
    "spec_of",
    "steps_of_dataset",
    "strategy_of",
    "synchronise",
    "taken_state",
    "trained_by",
    "unvalidated",
    "validated",
    "value_of",
    "without_data",
]

# -- private parts of Keras and its back ends, each behind a function named after its purpose -----------

_KERAS = OtherProject("keras", "nnlo_keras/_compat.py")
_TENSORFLOW = OtherProject("tensorflow", "nnlo_keras/_compat.py")
_TORCH = OtherProject("torch", "nnlo_keras/_compat.py")

#: Attribute of SwapEMAWeights: whether the model currently has the averages.
EMA_SWAPPED = "_ema_weights_in_model"
#: Attributes that an optimizer's constructor sets before its options.
MADE_AT_ONCE = ("_iterations", "_learning_rate")


# -- the running fit: callbacks get no reference to it, so these search the call stack --------------------


def callbacks_of_fit() -> Any:
    """Return the list of callbacks on the call stack; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        container = frame.f_locals.get("self")
        if isinstance(container, keras.callbacks.CallbackList):
            return container
        frame = frame.f_back
    return None


def ending_epoch() -> bool:
    """Return whether the running `fit` tells its callbacks that an epoch ends."""
    frame = inspect.currentframe()
    while frame is not None:
        container = frame.f_locals.get("self")
        if isinstance(container, keras.callbacks.CallbackList):
            return frame.f_code.co_name == "on_epoch_end"
        frame = frame.f_back
    return False


def arguments_of_fit() -> dict[str, Any]:
    """Return the arguments of the `fit` on the call stack, and its own names; empty if there is none."""
    frame = inspect.currentframe()
    while frame is not None and "epoch_iterator" not in frame.f_locals:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def data_of_fit() -> Any:
    """Return the epoch iterator of the `fit` on the call stack; None if there is none."""
    return arguments_of_fit().get("epoch_iterator")


def batch_size_of_fit() -> int | None:
    """Return the number of samples in a full batch of the running `fit`; None: Keras does not know."""
    size = getattr(getattr(data_of_fit(), "data_adapter", None), "batch_size", None)
    return size if isinstance(size, int) else None


# Attributes of a `tf.data.Dataset` that tell its samples, or which of them it has.
_OF_TF_DATASET = ("_tensors", "_filenames", "_num_shards", "_index")


def parts_of_dataset(data: Any) -> list[Any]:
    """Return what a data set consists of, as far as that can be seen without loading a sample."""
    if type(data).__module__.startswith("tensorflow."):
        found = []
        while data is not None:  # a pipeline: each step has the one before it
            found += [getattr(data, name, None) for name in _OF_TF_DATASET]
            data = getattr(data, "_input_dataset", None)
        return found
    return [*getattr(data, "__dict__", {}).values()]


@_TENSORFLOW.uses("_inputs")
def steps_of_dataset(data: Any, begins: Callable[[Any], object]) -> list[Any]:
    """Return the steps of a `tf.data` pipeline: this one, and all before it to those where it `begins`."""
    found, open_ends = [], [data]
    while open_ends:
        found.append(step := open_ends.pop())
        open_ends += [] if begins(step) else step._inputs()
    return found


def sequence_of(data: Any) -> Any:
    """Return the `PyDataset` behind `fit`'s epoch iterator; None if the data is something else."""
    return getattr(getattr(data, "data_adapter", None), "py_dataset", None)


@_KERAS.uses("_distributed_dataset")
def spec_of(data: Any) -> Any:
    """Return the shapes and types of a batch from `fit`'s epoch iterator, on TensorFlow."""
    return data._distributed_dataset.element_spec


@_KERAS.uses("_num_batches")
def set_length(data: Any, batches: int) -> None:
    """Set the number of batches in an epoch of `fit`'s epoch iterator."""
    _ = data._num_batches  # raises if Keras has dropped it
    data._num_batches = batches


@_KERAS.uses("_steps_seen")
def end_epoch(data: Any) -> None:
    """End the current epoch of `fit`."""
    set_length(data, data._steps_seen)


@_KERAS.uses("_interrupted_warning")
def make_data_again(data: Any, change: Callable[[Any], Any]) -> None:
    """Make `fit`'s epoch iterator again from the samples that `fit` was given, each argument changed.

    The length of an epoch may be unknown, and of such data Keras warns that it ends.
    """
    _ = data._interrupted_warning  # raises if Keras has dropped it
    given = arguments_of_fit()
    samples = {name: change(given[name]) for name in ("x", "y", "sample_weight")}
    others = {name: given[name] for name in ("batch_size", "steps_per_epoch", "shuffle", "class_weight")}
    if hasattr(data, "_distribute_strategy"):  # on TensorFlow
        others["distribute_strategy"] = data._distribute_strategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all has been said when `fit` made it
        made = type(data)(**samples, **others, steps_per_execution=data.steps_per_execution)
    vars(data).update(vars(made))
    if made.num_batches is None:
        data._interrupted_warning = lambda: None


# What Keras numbers the batches of an execution with: the first and the last; before 3.11 the first alone.
_NUMBERS = 1 if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 11) else 2


def _last_of(numbers: Sequence[int], data: Any) -> int:
    """Return the number of the last batch of an execution."""
    return numbers[1] if _NUMBERS == 2 else numbers[0] + int(data.steps_per_execution) - 1


@_KERAS.uses("_enumerate_iterator")
def deal_passes(
    data: Any,
    over: Callable[[], bool],
    end_pass: Callable[[], object],
    *,
    again: int = 0,
    tell: Callable[[bool], object] = bool,
) -> Callable[[], object]:
    """Let each epoch of `fit` go over its data again and again; return a function that undoes it.

    Args:
        data: `fit`'s epoch iterator.
        over: whether the epoch is over; asked between batches, once a pass has begun.
        end_pass: called at the end of each pass.
        again: so many batches of each pass follow at its end once more.
        tell: called before each batch: whether it is one of these.
    """
    one_pass = data._enumerate_iterator

    def left() -> None:
        """End a pass that is left early, as Keras ends a whole one."""
        data._current_iterator = None
        data.data_adapter.on_epoch_end()

    def enumerate_passes() -> Any:
        first = 0  # of this pass, counted from the epoch's first batch
        while True:
            after = first
            for *numbers, iterator in one_pass():
                if after > first and over():
                    left()
                    return
                after = first + _last_of(numbers, data) + 1
                tell(False)
                yield *(first + number for number in numbers), iterator
            for *numbers, iterator in islice(one_pass(), again):
                if over():
                    break
                tell(True)
                yield *(after + number for number in numbers), iterator
            if again:
                left()
                after += again
            end_pass()
            if after == first or over():
                return
            first = after

    data._enumerate_iterator = enumerate_passes

    def undo() -> None:
        del data._enumerate_iterator

    return undo


@_KERAS.uses("_enumerate_iterator", "_epoch_iterator", "_current_iterator")
def without_data(data: Any, *, inside: bool) -> Callable[[], object]:
    """Give each epoch of `fit` one batch without data from now on; return a function that undoes it.

    Args:
        data: `fit`'s epoch iterator.
        inside: an epoch has begun; the batch comes next, and is its last.
    """
    _ = data._enumerate_iterator, data._current_iterator  # raises if Keras has dropped them

    def last_batch() -> Any:
        yield *[0] * _NUMBERS, repeat(())
        data.data_adapter.on_epoch_end()

    def only_batch() -> Any:
        data.data_adapter.on_epoch_begin()
        yield from last_batch()

    if inside and data._epoch_iterator is not None:
        data._epoch_iterator, data._current_iterator = last_batch(), None
    before = vars(data).get("_enumerate_iterator")  # that of `deal_passes`
    data._enumerate_iterator = only_batch

    def undo() -> None:
        del data._enumerate_iterator
        if before is not None:
            data._enumerate_iterator = before

    return undo


# -- models -----------------------------------------------------------------------------------------------


@_KERAS.uses("_use_weight_decay")
def decays(optimizer: Any, variable: Any) -> bool:
    """Return whether the optimizer's weight decay is for this variable, too."""
    return bool(optimizer._use_weight_decay(variable))


@_KERAS.uses("_initial_epoch")
def first_epoch(model: Any) -> int:
    """Return the epoch that the next `fit` begins with; 0 if none was set."""
    return model._initial_epoch or 0


@_KERAS.uses("_initial_epoch")
def begin_with(model: Any, epoch: int | None) -> None:
    """Set the first epoch of `fit`; None, 0: use its own `initial_epoch`."""
    _ = model._initial_epoch  # raises if Keras has dropped it
    model._initial_epoch = epoch or None


@_KERAS.uses("_flatten_layers")
def layers_of(model: Any, *, itself: bool = True) -> list[Any]:
    """Return all layers of a model, nested ones included."""
    return list(model._flatten_layers(include_self=itself))


@_KERAS.uses("_symbolic_build")
def build_metrics(model: Any, spec: Any) -> None:
    """Build a model's metrics for batches of these shapes and types, on TensorFlow."""
    model._symbolic_build(data_batch=spec)


@_KERAS.uses("_should_eval")
def unvalidated(model: Any) -> list[Callable[[], object]]:
    """Turn off the validation in a worker's `fit`; return functions that undo it."""
    _ = model._should_eval  # raises if Keras has dropped it
    model._should_eval = lambda *_: False

    def validate_again() -> None:
        del model._should_eval

    return [validate_again]


@_KERAS.uses("_should_eval")
def validated(model: Any, callbacks: Any, epoch: int) -> dict[str, Any]:
    """Validate as the running `fit` does at the end of this epoch; return the metrics."""
    given = arguments_of_fit()
    if given.get("validation_data") is None or not model._should_eval(epoch, given["validation_freq"]):
        return {}
    found = model.evaluate(
        x=given["val_x"],
        y=given["val_y"],
        sample_weight=given["val_sample_weight"],
        batch_size=given["validation_batch_size"] or given["batch_size"],
        steps=given["validation_steps"],
        callbacks=callbacks,
        return_dict=True,
    )
    return {f"val_{name}": value for name, value in found.items()}


def kept_by_tensorflow(attribute: str) -> bool:
    """Return whether an attribute of a model is one of TensorFlow's own lists of tracked objects."""
    return attribute.startswith("_self_")


def strategy_of(model: Any) -> Any:
    """Return the TensorFlow distribution strategy that the model was made in; None: there is none."""
    return getattr(model, "_distribute_strategy", None)


def samples_counted(model: Any) -> int:
    """Return the number of samples behind this epoch's mean loss; 0 if Keras does not count them."""
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    return 0 if count is None else int(keras.ops.convert_to_numpy(count))


def synchronise(model: Any) -> None:
    """On JAX copy the state that `fit` holds during an epoch back into the variables."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def give_state(model: Any, state: Iterable[Any]) -> None:
    """On JAX copy the training function's input state into the variables."""
    model._jax_state = dict(zip(_STATE, state, strict=True))
    model.jax_state_sync()


@_KERAS.uses("_get_jax_state")
def taken_state(model: Any) -> Any:
    """On JAX take the state that the training function must return out of the variables."""
    return model._get_jax_state(**dict.fromkeys(_STATE, True))


# -- variables --------------------------------------------------------------------------------------------


def value_of(variable: Any) -> Any:
    """Return the tensor of a variable; faster than `value`, which also autocasts.

    On JAX it is None while `fit` holds the value.
    """
    try:  # runs for each variable at each step, so without `_KERAS.uses` around it
        return variable._value
    except AttributeError as error:
        raise _KERAS.changed(f"{type(variable).__name__} has no _value any more") from error


def put_value(variable: Any, value: Any) -> None:
    """Set the array of a JAX variable; does the same as `assign`, but faster."""
    value_of(variable)  # raises if Keras has dropped it
    variable._value = value


def away(variable: Any) -> bool:
    """Return whether `fit` holds the value of this variable, on JAX."""
    return value_of(variable) is None


@_KERAS.uses("_initializer")
def has_no_value_yet(variable: Any) -> bool:
    """Return whether a variable was never initialized; one whose value `fit` holds was."""
    return value_of(variable) is None and variable._initializer is not None


@_KERAS.uses("_layout")
def is_spread(variable: Any) -> bool:
    """Return whether a variable is spread over devices by a keras.distribution, which only JAX does."""
    # On other back ends variables have a layout only in a newer Keras, and never use it.
    return keras.backend.backend() == "jax" and variable._layout is not None


def made_to_be_trained(layer: Any) -> Sequence[Any]:
    """Return a layer's own variables that were created trainable, frozen ones included.

    Keras has no public name for this. Without it frozen weights are averaged, which is harmless but takes
    time.
    """
    return getattr(layer, "_trainable_variables", ())


def global_seeds(*, make: bool = False) -> Any:
    """Return the seed generator of layers without their own; None if there is none yet.

    Args:
        make: create one if there is none.
    """
    try:
        from keras.src.backend.common.global_state import get_global_attribute
        from keras.src.random.seed_generator import global_seed_generator
    except ImportError as error:
        raise _KERAS.changed(f"its global seed generator is gone ({error})") from error
    return global_seed_generator() if make else get_global_attribute("global_seed_generator")


def seed_layers(number: int) -> None:
    """Seed the layers without a seed generator of their own, as `keras.utils.set_random_seed` does."""
    try:
        from keras.src.backend.common.global_state import set_global_attribute
    except ImportError as error:
        raise _KERAS.changed(f"its global state is gone ({error})") from error
    set_global_attribute("global_random_seed", number)
    set_global_attribute("global_seed_generator", None)  # Keras makes it again, from Python's generator


# -- optimizers -------------------------------------------------------------------------------------------


@_KERAS.uses("_trainable_variables")
def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


@_KERAS.uses("_learning_rate")
def schedule_of(optimizer: Any) -> Any:
    """Return an optimizer's learning rate schedule; None: the rate is a number."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def module_of_back_end(module: str) -> bool:
    """Return whether a Keras module exists only if its back end is installed."""
    return module.startswith("keras.src.backend.")


class OptimizerInside:
    """Private attributes that Keras reads of an optimizer, passed on to `inner_optimizer`."""

    inner_optimizer: Any

    def _track_variable(self, variable: Any) -> None:
        """Track a variable of the wrapper, except the count and rate that Keras' constructor makes."""
        if "inner_optimizer" in vars(self):
            super()._track_variable(variable)  # type: ignore[misc]

    @property
    def _iterations(self) -> Any:
        """The wrapped optimizer's count of gradients."""
        return self.inner_optimizer._iterations

    @property
    def _learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate variable or schedule."""
        return self.inner_optimizer._learning_rate

    @property
    def _accumulated_gradients(self) -> Any:
        return self.inner_optimizer._accumulated_gradients

    @property
    def _model_variables_moving_average(self) -> Any:
        """The wrapped optimizer's averages; SwapEMAWeights reads them here under a LossScaleOptimizer."""
        return self.inner_optimizer._model_variables_moving_average


# -- back ends --------------------------------------------------------------------------------------------


def memory_of_tensor(tensor: Any) -> Any:
    """Return the memory of an eager TensorFlow tensor; `numpy` would copy it."""
    try:  # runs for each variable at each step, so without `_TENSORFLOW.uses` around it
        return tensor._numpy()
    except AttributeError as error:
        raise _TENSORFLOW.changed(f"{type(tensor).__name__} has no _numpy any more") from error


@_TORCH.uses("_version")
def changes_of(tensor: Any) -> int:
    """Return how often a torch tensor was changed in place, as far as autograd counts it."""
    return int(tensor._version)


@_TORCH.uses("_foreach_copy_")
def copy_all(places: list[Any], tensors: list[Any]) -> None:
    """Copy torch tensors into others in one call."""
    import torch

    torch._foreach_copy_(places, tensors)


@_TORCH.uses("_foreach_add_")
def add_all(places: list[Any], tensors: list[Any]) -> None:
    """Add torch tensors to others in one call."""
    import torch

    torch._foreach_add_(places, tensors)


# -- seeding of all random generators, without loading a TensorFlow that nothing uses -------------------


def seed_generators(number: int) -> None:
    """Seed Python, NumPy, Keras and its back end, and TensorFlow where it is loaded.

    `keras.utils.set_random_seed` does the same, but loads an installed TensorFlow on every back end, which
    takes each rank seconds and hundreds of megabytes.
    """
    seed_layers(number)  # an old Keras does not do this itself
    if sys.modules.get("tensorflow") is not None:
        keras.utils.set_random_seed(number)
        return
    seed_random(number)
    if keras.backend.backend() == "torch":
        importlib.import_module("torch").manual_seed(number)
