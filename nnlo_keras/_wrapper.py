"""Base of all wrappers: a Keras optimizer around the user's own that takes part in a training."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    AS_YOURS,
    Algorithm,
    RankOptions,
    RankWorld,
    Topology,
    WrapperBase,
    launched,
    planned,
)
from nnlo_keras._compat import MADE_AT_ONCE, OptimizerInside, module_of_back_end, trained_by
from nnlo_keras._stretches import own_momentum, refuse_options
from nnlo_keras._sums import GradientAccumulator, gradient_sum

__all__ = ["Delegation", "OPTIONS", "StepMode", "Wrapper", "serialized", "wrapper_of"]

# -- delegation of a wrapper's attributes and methods to the wrapped optimizer -------------------------

#: Options that every Keras optimizer has; the wrapped optimizer's apply, as it is the one that steps.
OPTIONS = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


#: Attributes that Keras' constructor sets on the wrapper; they are dropped, as nothing reads them.
_DROPPED = (*MADE_AT_ONCE, *OPTIONS)


class Delegation(OptimizerInside):
    """Passes reads, writes and calls of a wrapper on to `inner_optimizer`.

    Keras' base class would store each of these on the wrapper and never use it. Nothing is passed on before
    the wrapper has its `inner_optimizer`.
    """

    algorithm: Algorithm
    servers: int

    _only_itself = False

    def __getattr__(self, name: str) -> Any:
        """Read a public attribute that only the wrapped optimizer has, such as `momentum`."""
        inner = vars(self).get("inner_optimizer")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("inner_optimizer")
        if inner is None and name in _DROPPED:
            return
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if inner is None or (own and name not in OPTIONS) or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            self._pass_on(inner, name, value)

    def _pass_on(self, inner: Any, name: str, value: Any) -> None:
        before = getattr(inner, name)
        if self.algorithm.optimizer_runs == "nowhere" and value != before:
            raise ConfigurationError(
                f"{type(self).__name__} reads its optimizer's options when it is made, so {name} cannot be "
                f"set to {value!r} now; make a new wrapper and compile the model with it"
            )
        setattr(inner, name, value)
        try:
            self.check_options()
        except ConfigurationError:
            setattr(inner, name, before)
            raise

    def check_options(self) -> None:
        """Refuse options of the wrapped optimizer that the algorithm does not support.

        Raises:
            ConfigurationError: there is one.
        """
        rule, inner, name = self.algorithm, self.inner_optimizer, type(self).__name__
        if self.ranks.overlap and keras.backend.backend() != "torch":
            raise ConfigurationError(
                f"{name} with overlap=True is possible only on the back end torch, which says when a "
                f"gradient is made, but Keras runs on {keras.backend.backend()}; leave overlap out, or use "
                "lag=1"
            )
        if inner.global_clipnorm and self.ranks.servers > 1 and rule.optimizer_runs == "center":
            raise ConfigurationError(
                f"{name} with servers={self.ranks.servers} cannot wrap an optimizer with "
                f"global_clipnorm={inner.global_clipnorm}: each server would clip its part of the gradient "
                "by the norm of that part; use servers=1 or clipnorm"
            )
        if inner.gradient_accumulation_steps and rule.scales_by_staleness:
            steps = inner.gradient_accumulation_steps
            raise ConfigurationError(
                f"{name} cannot wrap an optimizer with gradient_accumulation_steps={steps}: it divides each "
                "gradient by its staleness, but most of the gradients counted there would not move the "
                f"centre; use every={steps}"
            )

    @contextmanager
    def only_itself(self) -> Iterator[None]:
        """Let Keras build only the wrapper: averages and accumulators belong to the wrapped optimizer."""
        vars(self)["_only_itself"] = True
        try:
            yield
        finally:
            vars(self)["_only_itself"] = False

    # -- methods --------------------------------------------------------------------------------------

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Exclude variables from the weight decay of the wrapped optimizer, as Keras does before `build`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        """Step one variable as the wrapped optimizer does."""
        return self.inner_optimizer.update_step(gradient, variable, learning_rate)

    def assign(self, variable: Any, value: Any) -> None:
        """Assign as the wrapped optimizer does."""
        self.inner_optimizer.assign(variable, value)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Add as the wrapped optimizer does."""
        self.inner_optimizer.assign_add(variable, value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Subtract as the wrapped optimizer does."""
        self.inner_optimizer.assign_sub(variable, value)


def _option(name: str) -> Any:
    """Make a property: an option of the wrapped optimizer, or None while Keras builds the wrapper."""

    def read(wrapper: Any) -> Any:
        return None if wrapper._only_itself else getattr(wrapper.inner_optimizer, name)

    return property(read, doc=f"`{name}` of the wrapped optimizer.")


for _name in OPTIONS:
    setattr(Delegation, _name, _option(_name))


class StepMode(enum.Enum):
    """Mode of a wrapper: whether gradients step an optimizer here, are added up, or are kept."""

    ALONE = "the wrapped optimizer steps; there are no other ranks"
    LOCAL = "the wrapped optimizer steps; weights are exchanged between batches"
    ACCUMULATE = "gradients are added up and sent between batches; nothing steps here"
    KEEP = "gradients are kept for the mean over the group, which is made between batches"
    SERVE = "the wrapped optimizer steps the centre, outside of the training step"


class Wrapper(WrapperBase, Delegation, keras.optimizers.Optimizer):
    """A Keras optimizer around yours; `nnlo_keras.Distribute` in the callbacks makes it take part.

    In a process alone it does exactly what yours does. It takes no weight decay, clipping or averages itself:
    set them on your optimizer, which applies them wherever the algorithm runs it.

    Attributes:
        inner_optimizer: yours.
        algorithm: the algorithm that exchanges it.
        ranks: what the ranks of a training do.
        mode: what it does with gradients.
        local_optimizer: moves a worker's weights between exchanges, if gradients are added up.
        local_rate: the learning rate of plain SGD that moves them if there is no local_optimizer; None:
            nothing moves them; "as yours": your optimizer's rate.
        sum: the sum of gradients, if they are added up or kept.
        applied: how often it was applied, or traced.

    Args:
        optimizer: any Keras optimizer.
        algorithm: the options of the algorithm.
        own: this wrapper's own options, as its constructor takes them.
        local: moves a worker's weights between exchanges, if gradients are added up: a Keras optimizer, the
            learning rate of plain SGD, "as yours", or nothing.
        ranks: what the ranks of a training do.
        name: as for any optimizer.

    Example:
        >>> import nnlo_keras
        >>> optimizer = nnlo_keras.EASGD(keras.optimizers.SGD(0.1))
        >>> isinstance(optimizer, Wrapper), isinstance(optimizer, keras.optimizers.Optimizer)
        (True, True)
    """

    def __init__(
        self,
        optimizer: Any,
        algorithm: Algorithm,
        own: dict[str, Any],
        *,
        ranks: RankOptions,
        local: Any = None,
        name: str | None = None,
    ) -> None:
        optimizer = keras.optimizers.get(optimizer)
        _refuse(optimizer, type(self).__name__)
        if algorithm.steps_in_place:
            refuse_options(optimizer, type(self).__name__)
        rate = local is None or local == AS_YOURS or isinstance(local, int | float | np.number)
        super().__init__(learning_rate=0.0, name=name or type(self).__name__.lower())
        if algorithm.wire == "topk":
            momentum, nesterov = own_momentum(optimizer, f"{type(self).__name__} with wire='topk'")
            algorithm = replace(algorithm, topk_momentum=momentum, topk_nesterov=nesterov)
        self.algorithm, self.ranks = algorithm, ranks
        if not rate:  # `get_config` serializes it
            own = {option: value for option, value in own.items() if option != _local_name(algorithm)}
        self._own, self.mode = own, StepMode.ALONE
        self.local_optimizer = None if rate else _local(local, type(self).__name__)
        self.local_rate = local if rate else None
        self.attached = False  # whether a Distribute callback drives it
        self.several = False  # whether it has found several ranks
        self.rate_set: float | None = None  # by a callback, since the training began
        self.sum: GradientAccumulator | None = None
        self.applied = 0
        self.inner_optimizer = optimizer  # last: from here on attributes may be set on it instead
        self.check_options()

    def _wrap(
        self,
        optimizer: Any,
        algorithm: Algorithm,
        own: dict[str, Any],
        ranks: RankOptions,
        local: Any = None,
        **common: Any,
    ) -> None:
        Wrapper.__init__(self, optimizer, algorithm, own, ranks=ranks, local=local, **common)

    def _momentum(self, optimizer: Any, *, nesterov: bool) -> float:
        return _momentum_of(keras.optimizers.get(optimizer), type(self).__name__, nesterov=nesterov)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the wrapped optimizer's variables and, among several ranks, the sum of gradients."""
        if self.built:
            return
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        if self.local_optimizer is not None and not self.local_optimizer.built:
            self.local_optimizer.build(variables)
        with self.only_itself():  # otherwise Keras makes averages and accumulators for the wrapper, too
            super().build(variables)
        sums = self.ranks.grouped or self.algorithm.optimizer_runs != "worker"
        if sums and (self.several or launched() is not None):
            self.sum = gradient_sum(self, variables, changed=self.ranks.grouped)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Use the gradients as the mode says; runs within the compiled training step."""
        self.applied += 1
        self.check_attached()
        if not self.built and trainable_variables is not None:
            self.build(list(trainable_variables))
        if self.mode in (StepMode.ACCUMULATE, StepMode.KEEP):
            variables = self.owned if trainable_variables is None else trainable_variables
            self._accumulate(grads, variables)
            if self.mode is StepMode.ACCUMULATE:
                self._step_locally(grads, variables)
            return None
        return self.inner_optimizer.apply(grads, trainable_variables)

    def check_attached(self) -> None:
        """Refuse to train without a callback that exchanges, in the first fit or in a later one."""
        nothing_steps = self.mode in (StepMode.ACCUMULATE, StepMode.KEEP)
        if not self.attached and (nothing_steps or launched() is not None):
            raise ConfigurationError(
                f"{type(self).__name__} is used in a training of several ranks, but no callback exchanges; "
                "add nnlo_keras.Distribute() to the callbacks of fit(), or, to train on this rank alone, "
                "compile the model with a plain optimizer"
            )

    def _accumulate(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        assert self.sum is not None  # build has made it
        given = {id(variable): grad for variable, grad in zip(variables, grads, strict=True)}
        owned = dict.fromkeys(id(variable) for variable in self.owned)
        for variable in variables:
            if id(variable) not in owned:
                raise ConfigurationError(
                    f"{type(self).__name__} got a gradient of {variable.path!r}, for which it was not built; "
                    "build it with all variables that it trains before fit()"
                )
        self.sum.add([given.get(identity) for identity in owned])

    def _step_locally(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Move this worker's weights until the next centre arrives."""
        if scale := self.loss_scale_factor:  # the centre's optimizer unscales its own gradients
            grads = [gradient if gradient is None else gradient / scale for gradient in grads]
        if self.local_optimizer is not None:
            self.local_optimizer.apply(grads, variables)
        elif self.local_rate:
            rate = self.learning_rate if self.local_rate == AS_YOURS else self.local_rate
            for gradient, variable in zip(grads, variables, strict=True):
                if gradient is not None:
                    dense = keras.ops.cast(
                        keras.ops.convert_to_tensor(gradient, sparse=False), variable.dtype
                    )
                    variable.assign_sub(dense * keras.ops.cast(rate, variable.dtype))
                    if (constraint := getattr(variable, "constraint", None)) is not None:
                        variable.assign(constraint(variable))

    def topology(self, world: RankWorld) -> Topology:
        """Return the roles of all ranks; with sub-servers all ranks call it (collective)."""
        return planned(world, self.ranks.roles(self.algorithm.tree()))

    @property
    def steps_workers(self) -> bool:
        """Whether your optimizer steps each worker's weights."""
        return self.ranks.servers == 0 or self.algorithm.optimizer_runs == "worker"

    @property
    def moves_locally(self) -> bool:
        """Whether a worker moves its weights between exchanges although the server steps the centre."""
        return self.local_optimizer is not None or bool(self.local_rate)

    def describe(self) -> str:
        """Return one line that is equal for equal options, to compare ranks and optimizers."""
        moved = self.local_optimizer
        local = "" if moved is None else f"{_local_name(self.algorithm)}={type(moved).__name__}"
        own = [f"{name}={value!r}" for name, value in self._own.items() if value is not None]
        return f"{type(self).__name__}({', '.join([*own, *filter(None, [local])])})"

    @property
    def owned(self) -> list[Any]:
        """Variables that it was built for."""
        return trained_by(self)

    # -- the interface of an optimizer ----------------------------------------------------------------

    @property
    def variables(self) -> list[Any]:
        """Its own variables, the wrapped optimizer's, and the local optimizer's."""
        local = [] if self.local_optimizer is None else self.local_optimizer.variables
        return [*super().variables, *self.inner_optimizer.variables, *local]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set `variables`."""
        own = len(super().variables)
        inner = own + len(self.inner_optimizer.variables)
        super().set_weights(weights[:own])
        self.inner_optimizer.set_weights(weights[own:inner])
        if self.local_optimizer is not None:
            self.local_optimizer.set_weights(weights[inner:])

    @property
    def iterations(self) -> Any:
        """The wrapped optimizer's iterations."""
        return self.inner_optimizer.iterations

    @property
    def current_rate(self) -> float:
        """The wrapped optimizer's learning rate, as a number."""
        return float(keras.ops.convert_to_numpy(self.learning_rate))

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value
        if isinstance(value, int | float | np.number):
            self.rate_set = float(value)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the wrapped optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Set the variables to the wrapped optimizer's averages, if it keeps any, on ranks where it runs."""
        steps_here = {
            StepMode.ACCUMULATE: False,
            StepMode.KEEP: self.steps_workers,
            StepMode.SERVE: self.algorithm.optimizer_runs == "center",
        }
        if steps_here.get(self.mode, True):
            self.inner_optimizer.finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Save nothing: Keras saves the wrapped optimizer as a child."""

    def load_own_variables(self, store: Any) -> None:
        """Load nothing."""

    def get_config(self) -> dict[str, Any]:
        """Return a config that makes an equal wrapper."""
        config = {"optimizer": serialized(self.inner_optimizer), "name": self.name, **self.ranks.given()}
        if self.local_optimizer is not None:
            config[_local_name(self.algorithm)] = serialized(self.local_optimizer)
        return {**config, **self._own}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Make a wrapper from what `get_config` returned."""
        config = dict(config)
        # keras.optimizers.deserialize has a fixed list of optimizers, which lacks Lamb.
        for name in ("optimizer", _local_name(cls._kind)):
            if isinstance(config.get(name), dict):
                one = keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
                config[name] = one
        return cls(config.pop("optimizer"), **config)


def wrapper_of(optimizer: Any) -> Wrapper | None:
    """Return the wrapper that an optimizer is or, under a mixed precision policy, holds."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, Wrapper):
        return optimizer
    return inner if isinstance(inner, Wrapper) else None


def _local_name(algorithm: Algorithm | type[Algorithm]) -> str:
    """Return the name of the option that may be an optimizer for local steps; empty if there is none."""
    one = algorithm.local_option()
    return "" if one is None else one.name


def serialized(optimizer: Any) -> dict[str, Any]:
    one: dict[str, Any] = keras.optimizers.serialize(optimizer)
    # On the torch back end Keras names modules that exist only if torch is installed.
    if module_of_back_end(str(one.get("module", ""))):
        one = {**one, "module": "keras.optimizers", "registered_name": None}
        one["class_name"] = type(optimizer).__name__
    return one


def _momentum_of(optimizer: Any, wrapper: str, *, nesterov: bool) -> float:
    """Return the momentum of an SGD without other options; refuse everything else."""
    extras = [
        name
        for name in (
            "weight_decay",
            "clipnorm",
            "clipvalue",
            "global_clipnorm",
            "use_ema",
            "loss_scale_factor",
            "gradient_accumulation_steps",
        )
        if getattr(optimizer, name, None)
    ]
    found = bool(getattr(optimizer, "nesterov", False))
    extras += ["nesterov"] if found and not nesterov else []
    if not isinstance(optimizer, keras.optimizers.SGD) or extras or found < nesterov:
        with_extras = f" with {', '.join(extras)}" if extras else ""
        kind = "a momentum, nesterov=True" if nesterov else "a momentum"
        raise ConfigurationError(
            f"{wrapper} needs a keras.optimizers.SGD with {kind} and nothing else; it got "
            f"{type(optimizer).__name__}{with_extras}"
        )
    return float(optimizer.momentum)


def _local(optimizer: Any, wrapper: str) -> Any:
    """Return the optimizer for local steps."""
    try:
        optimizer = keras.optimizers.get(optimizer)
    except ValueError as error:
        raise ConfigurationError(
            f"{wrapper}: local={optimizer!r} is not possible: it must be a learning rate, a Keras optimizer "
            "or None"
        ) from error
    _refuse(optimizer, wrapper)
    return optimizer


def _refuse(optimizer: Any, wrapper: str) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            f"{wrapper} cannot wrap a LossScaleOptimizer: the loss would be scaled twice; wrap the optimizer "
            "inside it: with the policy mixed_float16 Keras puts the loss scale around the wrapper"
        )
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ConfigurationError(
            f"{wrapper} cannot wrap a MultiOptimizer: it has no learning rate of its own and steps all "
            "variables or none; wrap one optimizer for all variables"
        )
    if isinstance(optimizer, Wrapper):
        name = type(optimizer).__name__
        raise ConfigurationError(f"{wrapper} cannot wrap another wrapper, {name}; wrap the inner one alone")
