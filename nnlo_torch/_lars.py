"""LARS and LARC around an optimizer of torch: a learning rate of its own for each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import function_given, is_number
from nnlo_torch._compat import stepped
from nnlo_torch._stretches import decouples
from nnlo_torch._wrapper import refuse

__all__ = ["LARC", "LARS"]


def has_direction(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix or more: biases and the scales of norms are vectors."""
    return parameter.ndim > 1


class LARS(torch.optim.Optimizer):
    r"""Scales each parameter's gradient by the ratio of norms, then lets your optimizer step.

    With very large batches one learning rate does not suit all layers: where a gradient is long beside its
    weights, the step destroys them. So the gradient g of a parameter x becomes

        r (g + weight_decay x)    with    r = trust |x| / (|g| + weight_decay |x| + epsilon)

    (You et al. 2017, arXiv:1708.03888), with the weight decay of your optimizer, which then adds none itself
    (AdamW does, as do others with a decoupled decay: it is no part of the gradient). Biases and the
    parameters of norms keep their gradients, and so does a parameter whose norm or whose gradient's norm is
    0. Warm the learning rate up over the first epochs, and wrap LARS in the algorithm: it acts where your
    optimizer runs.

        optimizer = nnlo_torch.Synchronous(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = nnlo_torch.Synchronous(nnlo_torch.LARS(torch.optim.SGD(model.parameters(), lr=8)))

    `param_groups` and `state` are your optimizer's, so schedulers and checkpoints know nothing of it. With
    `Steady`, the gain scales its learning rates. Algorithms that compute with your momentum themselves (GEM,
    EAMSGD) refuse it.

    Args:
        optimizer: yours.
        trust: how far a step of learning rate 1 moves a parameter, in parts of its norm.
        epsilon: keeps the ratio finite.
        adapts: says for a parameter whether it is scaled; None: those with two dimensions or more.

    Raises:
        ConfigurationError: an option is out of range, or it is no torch optimizer.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = LARS(torch.optim.SGD([x], lr=1.0), trust=0.1)
        >>> x.grad = torch.tensor([[100.0, 0.0]])
        >>> optimizer.step()
        >>> x.data  # moved by a tenth of its norm
        tensor([[2.5000, 4.0000]])
    """

    clips: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        trust: float = 0.001,
        epsilon: float = 1e-8,
        adapts: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        name = type(self).__name__
        refuse(optimizer, name)
        function_given(f"{name}(): adapts", adapts, may_miss=True)
        for option, value, least in (("trust", trust, 0.0), ("epsilon", epsilon, -1.0)):
            if not (is_number(value) and least < value < math.inf and value >= 0):
                above = "above 0" if least == 0 else "of at least 0"
                raise ConfigurationError(f"{name}({option}={value!r}) is not possible: use a number {above}")
        super().__init__([{"params": []}], optimizer.defaults)  # your optimizer has checked its groups
        self.optimizer, self.trust, self.epsilon = optimizer, float(trust), float(epsilon)
        self.adapts = has_direction if adapts is None else adapts
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        stepped(optimizer)  # a scheduler made for yours would warn that it never was

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, and make a step of your optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kept: list[tuple[dict[str, Any], float]] = []
        for group in self.param_groups:
            decay = 0.0 if decouples(self.optimizer, group) else float(group.get("weight_decay") or 0.0)
            sign = -1.0 if group.get("maximize") else 1.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._scale(parameter, parameter.grad, decay, sign, group["lr"])
            if decay:
                kept.append((group, group["weight_decay"]))
                group["weight_decay"] = 0.0
        try:
            self.optimizer.step()
        finally:
            for group, own in kept:
                group["weight_decay"] = own
        return loss

    def _scale(
        self, parameter: torch.Tensor, gradient: torch.Tensor, decay: float, sign: float, rate: Any
    ) -> None:
        if not self.adapts(parameter):
            if decay:
                gradient.add_(parameter, alpha=sign * decay)
            return
        length, slope = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(gradient)
        ratio = self.trust * length / (slope + decay * length + self.epsilon)
        if self.clips:
            ratio = torch.clamp(ratio / rate, max=1.0) if float(rate) > 0 else torch.ones_like(ratio)
        still = (length == 0) | (slope == 0)
        if decay:
            # Without a direction there is no decay either, as in the core's LARS.
            gradient.add_(torch.where(still, 0.0, 1.0) * parameter, alpha=sign * decay)
        gradient.mul_(torch.where(still, torch.ones_like(ratio), ratio))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to your optimizer."""
        inner = vars(self).get("optimizer")
        if inner is None:  # torch's constructor
            super().add_param_group(param_group)
        else:
            inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return your optimizer's state: LARS has none."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of your optimizer."""
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optimizer", "trust", "epsilon", "adapts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LARS.__init__(self, **state)


class LARC(LARS):
    """LARS that never steps further than your optimizer does: r becomes min(r / learning rate, 1).

    NVIDIA's variant of LARS; it needs no warm-up.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = LARC(torch.optim.SGD([x], lr=0.5), trust=0.1)
        >>> x.grad = torch.tensor([[0.1, 0.0]])
        >>> optimizer.step()
        >>> x.data  # as SGD: the gradient is short
        tensor([[2.9500, 4.0000]])
    """

    clips = True
