"""Delegation of a wrapper's attributes and methods to the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Algorithm
from nnlo_keras._compat import MADE_AT_ONCE, OptimizerInside

__all__ = ["OPTIONS", "Delegation"]

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
