"""What all wrappers share: a Keras optimizer around the user's own that takes part in a training."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Self

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common._joining import launched
from nnlo_common.algorithms import Algorithm
from nnlo_keras._sums import GradientSum, gradient_sum

__all__ = ["Mode", "Wrapper", "wrapper_of"]


class Mode(enum.Enum):
    """What a wrapper does with the gradients that it is given."""

    ALONE = "the wrapped optimizer steps; nobody else is there"
    LOCAL = "the wrapped optimizer steps; weights are exchanged between batches"
    ACCUMULATE = "gradients are added up and sent between batches; nothing steps here"
    SERVE = "the wrapped optimizer steps the centre, outside of the training step"


class Wrapper(keras.optimizers.Optimizer):
    """A Keras optimizer around yours; `nnlo_keras.Distribute` in the callbacks makes it take part.

    Alone it does exactly what yours does. It needs no weight decay, clipping or averages of its own: give
    them to yours, which does what it always does, wherever the algorithm runs it.

    Attributes:
        inner_optimizer: yours.
        algorithm: how it is exchanged.
        every: batches between exchanges, where gradients are added up.
        servers: how many ranks share the serving of the centre.
        mode: what it does with gradients.
        follows: whether local steps of the algorithm's own go by your optimizer's learning rate.
        sum: of gradients, where they are added up.

    Args:
        optimizer: any Keras optimizer.
        algorithm: the options of the algorithm.
        own: the options of this wrapper's own, as its constructor takes them.
        every: batches between exchanges, where gradients are added up.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        algorithm: Algorithm,
        own: dict[str, Any],
        *,
        every: int = 1,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        optimizer = keras.optimizers.get(optimizer)
        _refuse(optimizer, type(self).__name__)
        super().__init__(learning_rate=0.0, name=name or type(self).__name__.lower())
        self.inner_optimizer, self.algorithm = optimizer, algorithm
        self.every, self.servers = every, servers
        self._own = own
        self.mode, self.follows = Mode.ALONE, False
        self.attached = False  # whether a Distribute callback drives it
        self.rate_set: float | None = None  # by a callback, since the training began
        self.sum: GradientSum | None = None

    def build(self, variables: Sequence[Any]) -> None:
        """Make the wrapped optimizer's variables and, among several ranks, the sum of gradients."""
        if self.built:
            return
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        super().build(variables)
        if self.algorithm.optimizer_runs != "worker" and (self.attached or launched() is not None):
            self.sum = gradient_sum(self, variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Do with the gradients what the mode says; within the compiled training step."""
        if not self.attached and launched() is not None:
            raise ConfigurationError(
                f"{type(self).__name__} is used by one of several ranks without the callback that exchanges; "
                "add nnlo_keras.Distribute() to the callbacks of fit()"
            )
        if not self.built and trainable_variables is not None:
            self.build(list(trainable_variables))
        if self.mode is Mode.ACCUMULATE:
            self._accumulate(
                grads, self._trainable_variables if trainable_variables is None else trainable_variables
            )
            return None
        return self.inner_optimizer.apply(grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> Any:
        """Do as `apply` does; return how often the wrapped optimizer has stepped."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def _accumulate(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        assert self.sum is not None  # build has made it
        given = {self._var_key(variable): grad for variable, grad in zip(variables, grads, strict=True)}
        for variable in variables:
            if self._var_key(variable) not in self._trainable_variables_indices:
                raise ConfigurationError(
                    f"{type(self).__name__} got a gradient of {variable.path!r}, which it was not built for; "
                    "build it with all variables that it is to train before fit() begins"
                )
        self.sum.add([given.get(self._var_key(variable)) for variable in self._trainable_variables])

    @property
    def owned(self) -> list[Any]:
        """The variables that it was built for."""
        return list(self._trainable_variables)

    # -- what others ask of an optimizer --------------------------------------------------------------

    @property
    def variables(self) -> list[Any]:
        """Its own and the wrapped optimizer's."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def _model_variables_moving_average(self) -> Any:
        """The wrapped optimizer's: SwapEMAWeights looks for it here if a LossScaleOptimizer is around."""
        return self.inner_optimizer._model_variables_moving_average

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set `variables`."""
        own = len(self._variables)
        super().set_weights(weights[:own])
        self.inner_optimizer.set_weights(weights[own:])

    @property
    def iterations(self) -> Any:
        """The wrapped optimizer's."""
        return self.inner_optimizer.iterations

    @property
    def current_rate(self) -> float:
        """The wrapped optimizer's learning rate, as a number."""
        return float(keras.ops.convert_to_numpy(self.learning_rate))

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value
        if isinstance(value, int | float | np.number):
            self.rate_set = float(value)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the wrapped optimizer wants it."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Set the variables to their averages, if the wrapped optimizer keeps some, where it runs."""
        steps_here = self.mode is not Mode.SERVE or self.algorithm.optimizer_runs == "center"
        if self.mode is not Mode.ACCUMULATE and steps_here:
            self.inner_optimizer.finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Save nothing: what there is to save is the wrapped optimizer's, which is saved as a child."""

    def load_own_variables(self, store: Any) -> None:
        """Load nothing."""

    def get_config(self) -> dict[str, Any]:
        """Return what makes an equal wrapper."""
        inner = keras.optimizers.serialize(self.inner_optimizer)
        # On the torch back end Keras names modules that exist only where torch is installed.
        if str(inner.get("module", "")).startswith("keras.src.backend."):
            inner = {**inner, "module": "keras.optimizers", "registered_name": None}
            inner["class_name"] = type(self.inner_optimizer).__name__
        return {"optimizer": inner, "servers": self.servers, "name": self.name, **self._own}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Make a wrapper from what `get_config` returned."""
        config = dict(config)
        # keras.optimizers.deserialize knows a list of optimizers, on which Lamb is missing.
        optimizer = keras.saving.deserialize_keras_object(
            config.pop("optimizer"), custom_objects=custom_objects
        )
        return cls(optimizer, **config)


def wrapper_of(optimizer: Any) -> Wrapper | None:
    """Return the wrapper that an optimizer is or, under a mixed precision policy, holds."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, Wrapper):
        return optimizer
    return inner if isinstance(inner, Wrapper) else None


def _refuse(optimizer: Any, wrapper: str) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            f"{wrapper} cannot wrap a LossScaleOptimizer: the loss would be scaled twice. Wrap the optimizer "
            "in it; Keras puts the loss scale around the wrapper where the policy is mixed_float16"
        )
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ConfigurationError(
            f"{wrapper} cannot wrap a MultiOptimizer, which has no learning rate of its own and steps all "
            "variables or none; wrap one optimizer for all variables"
        )
    if isinstance(optimizer, Wrapper):
        name = type(optimizer).__name__
        raise ConfigurationError(f"{wrapper} cannot wrap another wrapper, {name}; wrap the inner one alone")
