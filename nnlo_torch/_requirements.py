"""Requirements of the wrappers on the optimizers they wrap; refuses those that do not meet them."""

from __future__ import annotations

import math

import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import AS_YOURS, is_number
from nnlo_torch._compat import stepped
from nnlo_torch._participation import Participation

__all__ = ["local_of", "momentum_of", "refuse"]

_REFUSED = {
    "LBFGS": "it evaluates the model several times per step",
    "SparseAdam": "it needs sparse gradients, which cannot be exchanged",
}


def refuse(optimizer: object, wrapper: str) -> None:
    """Refuse an object that a training of several ranks cannot step."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{wrapper} wraps a torch optimizer, not a {name}; pass e.g. torch.optim.SGD(...)"
        )
    if isinstance(optimizer, Participation):
        raise ConfigurationError(f"{wrapper} cannot wrap another wrapper, {name}; wrap the inner one alone")
    if name in _REFUSED:
        raise ConfigurationError(f"{wrapper} cannot wrap {name}: {_REFUSED[name]}; use another optimizer")


def local_of(
    local: object, optimizer: torch.optim.Optimizer, wrapper: str
) -> tuple[float, torch.optim.Optimizer | None]:
    """Return the learning rate of local steps, or 0, and the optimizer that makes them, or None.

    Raises:
        ConfigurationError: `local` is neither, or an optimizer over other parameters.
    """
    if local is None:
        return 0.0, None
    if local == AS_YOURS:
        return float(optimizer.param_groups[0]["lr"]), None
    if is_number(local) and 0 <= local < math.inf:
        return float(local), None
    if not isinstance(local, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{wrapper}: local={local!r} is not possible: it must be a learning rate, a torch optimizer over "
            "the same parameters, or None"
        )
    refuse(local, f"{wrapper}: local=")
    own, given = ({id(tensor) for tensor in _parameters(one)} for one in (local, optimizer))
    if own != given:
        raise ConfigurationError(
            f"{wrapper}: the optimizer in local= has {len(own - given)} parameters that yours does not have, "
            f"and lacks {len(given - own)} of yours; make both from the same parameters"
        )
    # It is never stepped on a server or in a process alone; keep schedulers from warning of that.
    stepped(local)
    return 0.0, local


def momentum_of(optimizer: torch.optim.Optimizer, wrapper: str, *, nesterov: bool) -> float:
    """Return the momentum of an SGD whose groups all share one; refuse everything else."""
    groups = getattr(optimizer, "param_groups", [])
    momenta = {group.get("momentum") for group in groups}
    extras = [
        name
        for name in ("nesterov", "dampening", "weight_decay", "maximize")
        if any(group.get(name) for group in groups) and not (nesterov and name == "nesterov")
    ]
    lacking = nesterov and not all(group.get("nesterov") for group in groups)
    if not isinstance(optimizer, torch.optim.SGD) or len(momenta) != 1 or extras or lacking:
        kind = "nesterov=True and " if nesterov else ""
        found = f"{type(optimizer).__name__} with momenta {sorted(map(str, momenta))}"
        raise ConfigurationError(
            f"{wrapper} needs a torch.optim.SGD with {kind}one momentum for all groups and nothing else; "
            f"it got {found}{' without nesterov' if lacking else ''}"
            + (f" and {', '.join(extras)}" if extras else "")
        )
    return float(momenta.pop() or 0.0)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]
