"""LARS and LARC around a Keras optimizer: a learning rate of its own for each variable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import is_number
from nnlo_keras._compat import MADE_AT_ONCE, OptimizerInside, trained_by
from nnlo_keras._wrapper import Wrapper, serialized

__all__ = ["LARC", "LARS"]

#: Options of the wrapped optimizer that would act on gradients that are already scaled.
_REFUSED = (
    *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
    *("use_ema", "loss_scale_factor", "gradient_accumulation_steps"),
)


class LARS(OptimizerInside, keras.optimizers.Optimizer):
    r"""Scales each variable's gradient by the ratio of norms, then lets your optimizer step.

    With very large batches one learning rate does not suit all layers: where a gradient is long beside its
    weights, the step destroys them. So the gradient g of a variable x becomes

        r (g + weight_decay x)    with    r = trust |x| / (|g| + weight_decay |x| + epsilon)

    (You et al. 2017, arXiv:1708.03888). Biases and the variables of norms keep their gradients, with the
    weight decay, and so does a variable whose norm or whose gradient's norm is 0. Warm the learning rate up
    over the first epochs (`WarmUp`), and wrap LARS in the algorithm: it acts where your optimizer runs.

        optimizer = nnlo_keras.Synchronous(keras.optimizers.SGD(0.1, momentum=0.9))
        optimizer = nnlo_keras.Synchronous(nnlo_keras.LARS(keras.optimizers.SGD(8.0, momentum=0.9)))

    With `Steady`, the gain scales its learning rate. Algorithms that compute with your momentum themselves
    (GEM, EAMSGD) refuse it. For Adam with such ratios Keras has `keras.optimizers.Lamb`.

    Args:
        optimizer: yours, without weight decay, clipping, averages or accumulation.
        trust: how far a step of learning rate 1 moves a variable, in parts of its norm.
        weight_decay: a part of the gradient, as with SGD in PyTorch.
        epsilon: keeps the ratio finite.
        name: as for any optimizer.

    Raises:
        ConfigurationError: an option is out of range, or your optimizer has one that would act twice.

    Example:
        >>> import numpy as np
        >>> x = keras.Variable(np.array([[3.0, 4.0]], "f4"))
        >>> optimizer = LARS(keras.optimizers.SGD(1.0), trust=0.1)
        >>> optimizer.apply([keras.ops.convert_to_tensor(np.array([[100.0, 0.0]], "f4"))], [x])
        >>> keras.ops.convert_to_numpy(x)  # moved by a tenth of its norm
        array([[2.5, 4. ]], dtype=float32)
    """

    clips: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: Any,
        *,
        trust: float = 0.001,
        weight_decay: float = 0.0,
        epsilon: float = 1e-8,
        name: str | None = None,
    ) -> None:
        optimizer, kind = keras.optimizers.get(optimizer), type(self).__name__
        for option, value, zero in (
            *(("trust", trust, False), ("weight_decay", weight_decay, True), ("epsilon", epsilon, True)),
        ):
            if not (is_number(value) and 0 <= value < math.inf and (zero or value)):
                above = "of at least 0" if zero else "above 0"
                raise ConfigurationError(f"{kind}({option}={value!r}) is not possible: use a number {above}")
        if isinstance(optimizer, Wrapper | keras.optimizers.LossScaleOptimizer):
            raise ConfigurationError(
                f"{kind} cannot wrap {type(optimizer).__name__}; wrap your own optimizer in {kind}, and that "
                "in the algorithm"
            )
        for option in _REFUSED:
            if found := getattr(optimizer, option, None):
                meant = f"set weight_decay of {kind}" if option == "weight_decay" else f"leave {option} out"
                raise ConfigurationError(
                    f"{kind} cannot wrap {type(optimizer).__name__} with {option}={found!r}, which would act "
                    f"on gradients that are scaled already; {meant}"
                )
        super().__init__(learning_rate=0.0, name=name or kind.lower())
        self.trust, self.decay, self.epsilon = float(trust), float(weight_decay), float(epsilon)
        self.inner_optimizer = optimizer

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras' constructor makes a count and a rate: your optimizer has them.
        if "inner_optimizer" in vars(self) or name not in MADE_AT_ONCE:
            super().__setattr__(name, value)

    def build(self, variables: Sequence[Any]) -> None:
        """Make your optimizer's variables."""
        if self.built:
            return
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        super().build(variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Scale the gradients, and make a step of your optimizer."""
        if trainable_variables is None:
            variables: Sequence[Any] = trained_by(self.inner_optimizer)
        else:
            variables = list(trainable_variables)
            if not self.built:
                self.build(variables)
        scaled = [
            None if gradient is None else self._scaled(gradient, variable)
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        return self.inner_optimizer.apply(scaled, trainable_variables)

    def _scaled(self, gradient: Any, variable: Any) -> Any:
        ops = keras.ops
        gradient = ops.convert_to_tensor(gradient, sparse=False)
        x = ops.cast(variable, gradient.dtype)
        if len(variable.shape) < 2:
            return gradient + self.decay * x if self.decay else gradient
        length, slope = (ops.sqrt(ops.sum(ops.square(ops.cast(one, "float32")))) for one in (x, gradient))
        ratio = self.trust * length / (slope + self.decay * length + self.epsilon)
        if self.clips:
            rate = ops.cast(self.learning_rate, "float32")
            ratio = ops.where(rate > 0, ops.minimum(ratio / ops.maximum(rate, 1e-30), 1.0), 1.0)
        moves = ops.logical_and(length > 0, slope > 0)
        ratio = ops.cast(ops.where(moves, ratio, 1.0), gradient.dtype)
        if self.decay:
            # Without a direction there is no decay either, as in the core's LARS.
            gradient = gradient + ops.cast(ops.where(moves, self.decay, 0.0), gradient.dtype) * x
        return gradient * ratio

    # -- the interface of an optimizer ----------------------------------------------------------------

    @property
    def variables(self) -> list[Any]:
        """Your optimizer's variables."""
        return [*self.inner_optimizer.variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set `variables`."""
        self.inner_optimizer.set_weights(weights)

    @property
    def iterations(self) -> Any:
        """Your optimizer's iterations."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """Your optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Do nothing: your optimizer keeps no averages."""

    def save_own_variables(self, store: Any) -> None:
        """Save nothing: Keras saves your optimizer as a child."""

    def load_own_variables(self, store: Any) -> None:
        """Load nothing."""

    def get_config(self) -> dict[str, Any]:
        """Return a config that makes an equal optimizer."""
        options = {"trust": self.trust, "weight_decay": self.decay, "epsilon": self.epsilon}
        return {"optimizer": serialized(self.inner_optimizer), **options, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Make an optimizer from what `get_config` returned."""
        config = dict(config)
        if isinstance(config["optimizer"], dict):
            inner = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
            config["optimizer"] = inner
        return cls(config.pop("optimizer"), **config)


class LARC(LARS):
    """LARS that never steps further than your optimizer does: r becomes min(r / learning rate, 1).

    NVIDIA's variant of LARS; it needs no warm-up.

    Example:
        >>> import numpy as np
        >>> x = keras.Variable(np.array([[3.0, 4.0]], "f4"))
        >>> optimizer = LARC(keras.optimizers.SGD(0.5), trust=0.1)
        >>> optimizer.apply([keras.ops.convert_to_tensor(np.array([[0.5, 0.0]], "f4"))], [x])
        >>> keras.ops.convert_to_numpy(x)  # as SGD: the gradient is short
        array([[2.75, 4.  ]], dtype=float32)
    """

    clips = True
