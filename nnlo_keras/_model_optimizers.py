"""Optimizers of a model that take part in a training, and the variables that each owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_keras._compat import kept_by_tensorflow, trained_by
from nnlo_keras._variable_layout import memory_of
from nnlo_keras._wrapper import Wrapper, wrapper_of

__all__ = ["any_wrapper_in", "assign_variables", "optimizers_of", "wrappers_in"]


def wrappers_in(model: Any) -> dict[str, Wrapper]:
    """Return the wrapped optimizers of a model, by the names of its attributes.

    Most models have one, as `optimizer`; one with a `train_step` of its own may have others.

    Raises:
        ConfigurationError: there is none, one is not wrapped, or they are not wrapped alike.
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
                f"of this model's optimizers {first} is wrapped, {name} is not; wrap all alike: "
                f"{name} = {alike}"
            )
    for name, wrapper in wrappers.items():
        if _kind(wrapper) != _kind(wrappers[first]):
            raise ConfigurationError(
                f"of this model's optimizers {first} is {_described(wrappers[first])} but {name} is "
                f"{_described(wrapper)}; they are exchanged together, so wrap both alike"
            )
    if keras.backend.backend() == "jax" and [*wrappers.values()] != [wrapper_of(model.optimizer)]:
        raise ConfigurationError(
            f"on JAX fit() keeps the state of model.optimizer alone, but this model has {_listed(wrappers)}; "
            "give compile() one optimizer, or choose another back end with KERAS_BACKEND"
        )
    return wrappers


def any_wrapper_in(model: Any) -> Wrapper | None:
    """Return a wrapped optimizer of a model, if it has one; the others are to be like it."""
    found = map(wrapper_of, optimizers_of(model).values())
    return next((wrapper for wrapper in found if wrapper is not None), None)


def assign_variables(model: Any, wrappers: Mapping[str, Wrapper]) -> None:
    """See to it that each optimizer knows which variables it trains, before the first batch.

    Raises:
        ConfigurationError: one of several does not know, or two have the same.
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
                f"this model has the optimizers {_listed(wrappers)}, and {name} is not built, so that nobody "
                f"knows what it trains; {_how_to_build(name)}"
            )
        for variable in wrapper.owned:
            owner = owners.setdefault(memory_of(variable), name)
            if owner != name:
                raise ConfigurationError(
                    f"both {owner} and {name} are built to train {variable.path!r}, which only one can do; "
                    f"{_how_to_build(name)}"
                )


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return all optimizers that are attributes of a model, or stand in a list or dictionary that is one."""
    found: dict[int, tuple[str, Any]] = {}
    # What compile() was given comes last: often it is one of the others.
    for name, value in sorted(vars(model).items(), key=lambda item: item[0] == "optimizer"):
        if not kept_by_tensorflow(name):
            for path, one in _within(name, value):
                if isinstance(one, keras.optimizers.Optimizer):
                    # A loss scale may be around one that is an attribute, too.
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
    """Whether an optimizer that is not wrapped certainly trains none of the model's variables."""
    if name == "optimizer":
        # compile() makes one if it is given none, which a training step with others leaves alone.
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        default = keras.optimizers.RMSprop(name=optimizer.name)
        as_made = type(optimizer) is type(default) and optimizer.get_config() == default.get_config()
        return as_made and type(model).train_step is not keras.Model.train_step
    trained = {memory_of(variable) for variable in model.trainable_variables}
    return optimizer.built and not trained & {memory_of(one) for one in trained_by(optimizer)}


def _kind(wrapper: Wrapper) -> tuple[object, ...]:
    return type(wrapper), wrapper.algorithm, wrapper.describe(), wrapper.servers


def _described(wrapper: Wrapper) -> str:
    of_optimizer = (
        f", momentum={momentum}" if (momentum := getattr(wrapper.algorithm, "momentum", None)) else ""
    )
    return f"{wrapper.describe()}{of_optimizer}, servers={wrapper.servers}"


def _listed(wrappers: Mapping[str, Wrapper]) -> str:
    return ", ".join(wrappers)


def _how_to_build(name: str) -> str:
    return (
        "build each with its own variables before fit(), where compile() gets them, e.g. "
        f"self.{name}.build(self.discriminator.trainable_variables)"
    )
