"""Optimizers of a model that take part in a training, and the variables that each one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import readable
from nnlo_keras import _compat
from nnlo_keras._compat import kept_by_tensorflow, schedule_of, trained_by
from nnlo_keras._stretches import OVERWRITTEN, rule_of
from nnlo_keras._variable_layout import memory_of
from nnlo_keras._wrapper import Wrapper, wrapper_of

__all__ = [
    "any_wrapper_in",
    "assign_variables",
    "attach",
    "build",
    "build_metrics",
    "detach",
    "optimizers_of",
    "refuse_constraints",
    "wrappers_in",
]

# -- building of models and metrics that have no variables before they know their data -----------------


def build(model: Any) -> None:
    """Build the model's unbuilt layers, as Keras does on torch and JAX when `fit` begins.

    On TensorFlow `fit` builds them with the first batch, but the exchange needs all variables before. Call it
    from a callback.
    """
    if keras.backend.backend() != "tensorflow" or _built(model):
        return
    try:
        model(_symbolic_inputs())
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} has layers that are not built, and building them from the shapes of the "
            f"data failed ({type(error).__name__}: {error}); build it, or call it on a batch, before fit()"
        ) from error


def build_metrics(model: Any) -> None:
    """Build the model's metrics, as Keras does on torch and JAX when `fit` begins."""
    if keras.backend.backend() == "tensorflow":
        _compat.build_metrics(model, _spec())


def _built(model: Any) -> bool:
    if type(model).call is keras.Model.call:
        return True  # it has no call(): it only holds models that its training step calls
    own_build = type(model).build is not keras.Model.build
    return all(layer.built for layer in _compat.layers_of(model, itself=own_build))


def _symbolic_inputs() -> Any:
    """Return symbolic tensors with the data's shapes; a real batch taken here might be lost to training."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(_spec())
    return keras.tree.map_structure(lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), x)


def _spec() -> Any:
    """Return the shapes and types of a batch."""
    return _compat.spec_of(_compat.data_of_fit())


def wrappers_in(model: Any) -> dict[str, Wrapper]:
    """Return the wrapped optimizers of a model, by the names of its attributes.

    Most models have one, as `optimizer`; a model with its own `train_step` may have several.

    Raises:
        ConfigurationError: there is none, one is not wrapped, or they are wrapped differently.
    """
    optimizers = optimizers_of(model)
    wrappers = {name: wrapper for name, one in optimizers.items() if (wrapper := wrapper_of(one)) is not None}
    if not wrappers:
        found = type(model.optimizer).__name__
        raise ConfigurationError(
            f"Distribute() found {found} as the model's optimizer; wrap it in the algorithm, e.g. "
            f"model.compile(optimizer=nnlo_keras.Downpour({found}(...)))"
        )
    first = next(iter(wrappers))
    for name, one in optimizers.items():
        if name not in wrappers and not _idle(model, name, one):
            alike = f"nnlo_keras.{type(wrappers[first]).__name__}({type(one).__name__}(...))"
            raise ConfigurationError(
                f"of this model's optimizers {first} is wrapped but {name} is not; wrap all alike: "
                f"{name} = {alike}"
            )
    for name, wrapper in wrappers.items():
        if _kind(wrapper) != _kind(wrappers[first]):
            raise ConfigurationError(
                f"of this model's optimizers {first} is {_described(wrappers[first])} but {name} is "
                f"{_described(wrapper)}; both are exchanged together, so wrap them alike"
            )
    if keras.backend.backend() == "jax" and [*wrappers.values()] != [wrapper_of(model.optimizer)]:
        raise ConfigurationError(
            f"on JAX fit() keeps only the state of model.optimizer, but this model has {_listed(wrappers)}; "
            "give compile() one optimizer, or choose another back end with KERAS_BACKEND"
        )
    return wrappers


def any_wrapper_in(model: Any) -> Wrapper | None:
    """Return one wrapped optimizer of a model, or None; all others must be wrapped alike."""
    found = map(wrapper_of, optimizers_of(model).values())
    return next((wrapper for wrapper in found if wrapper is not None), None)


def assign_variables(model: Any, wrappers: Mapping[str, Wrapper]) -> None:
    """Build a single optimizer; check that each of several is built for its own variables.

    Raises:
        ConfigurationError: one of several is not built, or two train the same variable.
    """
    if len(wrappers) == 1:
        (only,) = wrappers.values()
        if not only.built:
            only.build(model.trainable_variables)
        return
    owners: dict[int, str] = {}
    for name, wrapper in wrappers.items():
        if not wrapper.owned:
            raise ConfigurationError(
                f"this model has the optimizers {_listed(wrappers)}, but {name} is not built, so its "
                f"variables are unknown; {_how_to_build(name)}"
            )
        for variable in wrapper.owned:
            owner = owners.setdefault(memory_of(variable), name)
            if owner != name:
                raise ConfigurationError(
                    f"both {owner} and {name} are built to train {variable.path!r}, but only one may; "
                    f"{_how_to_build(name)}"
                )


def refuse_constraints(wrappers: Sequence[Wrapper], *, alone: bool) -> None:
    """Refuse variables with a constraint if not only a Keras optimizer would move them.

    Args:
        wrappers: the wrapped optimizers, built.
        alone: whether one worker's optimizer steps as in a process alone.

    Raises:
        ConfigurationError: there is such a variable.
    """
    first = wrappers[0]
    rule, name, problem = first.algorithm, type(first).__name__, ""
    if first.ranks.servers and (rule.optimizer_runs == "nowhere" or getattr(rule, "outer_momentum", 0)):
        problem = (
            f"but {name} moves the weights by a momentum of its own, which does not keep it; leave it out, "
            "or use an algorithm that steps with your optimizer only, such as Downpour or LocalSGD"
        )
    elif rule.steps_in_place and not alone and schedule_of(first.inner_optimizer) is not None:
        problem = (
            f"so {name} scales the learning rate of {type(first.inner_optimizer).__name__}, which must be a "
            "number, not a LearningRateSchedule; leave out one of them, or use a LearningRateScheduler"
        )
    for variable in (one for wrapper in wrappers for one in wrapper.owned):
        found = rule_of(variable)
        if found == OVERWRITTEN:
            problem = problem or _not_its_own(first, alone=alone)
        if problem and found:
            error = ConfigurationError(f"the variable {variable.path!r} has {found}, {problem}")
            error.collective = True  # all ranks have the same model
            raise error


def _not_its_own(wrapper: Wrapper, *, alone: bool) -> str:
    """Return why a variable would not be overwritten by the gradient of one batch; empty: it is."""
    rule, name = wrapper.algorithm, type(wrapper).__name__
    if wrapper.steps_workers:
        return ""
    if not rule.worker(1, 1).sends_each_gradient:
        does = "adds up gradients of several batches; send each of them (every=1)"
    elif wrapper.local_rate:
        does = "moves it by plain SGD in each local step; give local= an optimizer, or leave it out"
    elif rule.wire != "float32":
        does = f"sends only a part of each gradient with wire={rule.wire!r}; leave wire out"
    elif rule.scales_by_staleness:
        does = "divides each gradient by its staleness; use Downpour"
    elif rule.steps_in_place and not alone:
        does = "measures gradients, of which this is none; use Downpour or Synchronous"
    else:
        return ""
    return f"but {name} {does}, or an algorithm whose optimizer runs on workers, such as LocalSGD"


class _Unattached:
    """The training function of a model between two trainings: a traced one would not ask its optimizers."""

    def __init__(self, train: Callable[..., Any], wrappers: Sequence[Wrapper]) -> None:
        self.train, self._wrappers = train, wrappers

    def __call__(self, *args: Any) -> Any:
        for one in self._wrappers:
            one.check_attached()
        return self.train(*args)


def attach(model: Any, wrappers: Sequence[Wrapper]) -> None:
    """Let a callback drive these optimizers of a model, whose training function `fit` has made."""
    for one in wrappers:
        one.attached = True
    if isinstance(model.train_function, _Unattached):
        model.train_function = model.train_function.train


def detach(model: Any, wrappers: Sequence[Wrapper]) -> None:
    """End that: a later `fit` without the callback is refused."""
    for one in wrappers:
        one.attached = False
    if model.train_function is not None:
        model.train_function = _Unattached(model.train_function, wrappers)


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return all optimizers in a model's attributes, also within a list or dictionary."""
    found: dict[int, tuple[str, Any]] = {}
    # The optimizer given to compile() comes last: it is often one of the others.
    for name, value in sorted(vars(model).items(), key=lambda item: item[0] == "optimizer"):
        if not kept_by_tensorflow(name):
            for path, one in _within(name, value):
                if isinstance(one, keras.optimizers.Optimizer):
                    # The same optimizer may also be an attribute wrapped in a loss scale.
                    found.setdefault(id(wrapper_of(one) or one), (path, one))
    inner = {id(wrapper.inner_optimizer) for _, one in found.values() if (wrapper := wrapper_of(one))}
    return {name: one for name, one in found.values() if id(one) not in inner}


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", one) for index, one in enumerate(value))
    else:
        yield name, value


def _idle(model: Any, name: str, optimizer: Any) -> bool:
    """Return whether an unwrapped optimizer certainly trains none of the model's variables."""
    if name == "optimizer":
        # compile() makes a default one if given none; a custom training step with others does not use it.
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        default = keras.optimizers.RMSprop(name=optimizer.name)
        as_made = type(optimizer) is type(default) and optimizer.get_config() == default.get_config()
        return as_made and type(model).train_step is not keras.Model.train_step
    trained = {memory_of(variable) for variable in model.trainable_variables}
    return optimizer.built and not trained & {memory_of(one) for one in trained_by(optimizer)}


def _kind(wrapper: Wrapper) -> tuple[object, ...]:
    return type(wrapper), wrapper.algorithm, wrapper.describe(), wrapper.ranks


def _described(wrapper: Wrapper) -> str:
    of_optimizer = (
        f", momentum={momentum}" if (momentum := getattr(wrapper.algorithm, "momentum", None)) else ""
    )
    return f"{readable(wrapper.describe())}{of_optimizer}, {wrapper.ranks.describe()}"


def _listed(wrappers: Mapping[str, Wrapper]) -> str:
    return ", ".join(wrappers)


def _how_to_build(name: str) -> str:
    return (
        "build each with its own variables before fit(), where you call compile(), e.g. "
        f"self.{name}.build(self.discriminator.trainable_variables)"
    )
