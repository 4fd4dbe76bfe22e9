"""The algorithms as torch optimizers."""

from __future__ import annotations

from typing import Any, Literal

import torch

from nnlo_common import ConfigurationError, algorithms
from nnlo_torch._wrapper import Wrapper

__all__ = ["AGN", "EASGD", "GEM", "DiLoCo", "Downpour", "DynSGD", "LocalSGD", "Synchronous"]


class Downpour(Wrapper):
    """Downpour SGD: your optimizer steps the centre, with the workers' raw gradients as they come.

    See `nnlo_common.Downpour` for the equations. With one worker and every=1 the weights are those of
    the plain loop, bit for bit. With several, each commit comes late by those of the others, and a large
    momentum does not bear that well: on a quadratic of curvature h, with one stale commit, the learning rate
    has to be below (1 - momentum) / h. Use less of either, or an optimizer such as Adam.

    Args:
        optimizer: yours; it runs on the server.
        every: gradients are summed over this many steps before they are pushed.
        lag: exchanges that may be under way while the worker goes on.
        warm_start: commits that the first worker makes alone before the others are let in.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Downpour(torch.optim.Adam(model.parameters(), lr=1e-3))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.role
        'alone'
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 1,
        lag: int = 0,
        warm_start: int = 0,
        **options: Any,
    ) -> None:
        rule = algorithms.Downpour(
            n_push=every, n_fetch=every, schedule="aligned", lag=lag, warm_start=warm_start
        )
        super().__init__(optimizer, rule, **options)


class Synchronous(Wrapper):
    """Synchronous SGD: your optimizer steps the centre with the mean gradient of each step.

    See `nnlo_common.Synchronous`. p workers with batches of B are one process with batches of p B.

    Args:
        optimizer: yours; it runs on the server.
        backup: how many of the slowest workers are not waited for.
        lag: exchanges that may be under way while the worker goes on.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, backup: int = 0, lag: int = 0, **options: Any
    ) -> None:
        super().__init__(optimizer, algorithms.Synchronous(backup=backup, lag=lag), **options)


class EASGD(Wrapper):
    """Elastic averaging: your optimizer runs on each worker; every so often worker and centre attract.

    See `nnlo_common.EASGD` for the equations and for where each order is stable.

    Args:
        optimizer: yours; it runs on every worker.
        every: steps between exchanges.
        beta: the workers' common pull; each moves by alpha = beta / p.
        alpha: that moving rate itself, in place of beta.
        order: "step_first": your step, then the exchange; "paper": the other way round.
        lag: exchanges that may be under way while the worker goes on.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 10,
        beta: float = 0.9,
        alpha: float | None = None,
        order: Literal["paper", "step_first"] = "step_first",
        lag: int = 0,
        **options: Any,
    ) -> None:
        rule = algorithms.EASGD(every=every, beta=beta, alpha=alpha, order=order, lag=lag)
        super().__init__(optimizer, rule, **options)


class GEM(Wrapper):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer is not stepped: its learning rates and its momentum define that
    momentum SGD.

    Args:
        optimizer: `torch.optim.SGD` with momentum, without Nesterov, dampening and weight decay.
        kappa: how much energy the workers may have together, in units of the momentum SGD's.
        lag: steps that gradients are delayed by.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, kappa: float = 1.0, lag: int = 0, **options: Any
    ) -> None:
        # The groups' learning rates go into the gradient, so the rule's own is 1.
        rule = algorithms.GEM(learning_rate=1.0, momentum=_momentum(optimizer), kappa=kappa, lag=lag)
        super().__init__(optimizer, rule, **options)

    def _change_gradient(self) -> None:
        assert self._bridge is not None  # alone nobody asks
        index = 0
        for group in self.param_groups:
            for _ in group["params"]:
                self._bridge.gradient_views[index].mul_(group["lr"])
                index += 1


class AGN(Wrapper):
    """Accumulated gradient normalization: explore with plain SGD, push the mean of the gradients met.

    See `nnlo_common.AGN`.

    Args:
        optimizer: yours; it runs on the server.
        every: local steps per push.
        local_learning_rate: of the local steps; None: that of your optimizer's first group, as it is set.
        lag: exchanges that may be under way while the worker goes on.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 10,
        local_learning_rate: float | None = None,
        lag: int = 0,
        **options: Any,
    ) -> None:
        rate = optimizer.param_groups[0]["lr"] if local_learning_rate is None else local_learning_rate
        rule = algorithms.AGN(every=every, local_learning_rate=float(rate), lag=lag)
        super().__init__(optimizer, rule, **options)
        self._follows = local_learning_rate is None

    def _change_gradient(self) -> None:
        if self._follows and self._team is not None:
            self._team.set_local_rate(float(self.param_groups[0]["lr"]))


class DynSGD(Wrapper):
    """Staleness-aware SGD: your optimizer steps the centre; the staler a gradient, the smaller it is made.

    See `nnlo_common.DynSGD`.

    Args:
        optimizer: yours; it runs on the server. Plain or momentum SGD is what the paper means.
        every: gradients are summed over this many steps before they are pushed.
        lag: exchanges that may be under way while the worker goes on.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, every: int = 1, lag: int = 0, **options: Any
    ) -> None:
        super().__init__(optimizer, algorithms.DynSGD(every=every, lag=lag), **options)


class LocalSGD(Wrapper):
    """Local SGD: your optimizer runs on each worker; every so often all take the mean of their weights.

    See `nnlo_common.LocalSGD`.

    Args:
        optimizer: yours; it runs on every worker.
        every: local steps per round.
        warmup: first steps that are averaged one by one.
        lag: rounds that may be under way while the worker goes on.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 10,
        warmup: int = 0,
        lag: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, algorithms.LocalSGD(every=every, warmup=warmup, lag=lag), **options)


class DiLoCo(Wrapper):
    """DiLoCo: your optimizer makes local rounds; their mean displacement drives an outer Nesterov SGD.

    See `nnlo_common.DiLoCo`.

    Args:
        optimizer: yours, the inner one; it runs on every worker.
        every: inner steps per round.
        outer_learning_rate: of the outer SGD, on the server.
        outer_momentum: of the outer SGD.
        lag: rounds that may be under way while the worker goes on.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 500,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        lag: int = 0,
        **options: Any,
    ) -> None:
        rule = algorithms.DiLoCo(
            every=every, outer_learning_rate=outer_learning_rate, outer_momentum=outer_momentum, lag=lag
        )
        super().__init__(optimizer, rule, **options)


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    """The one momentum of all groups of a momentum SGD."""
    groups = optimizer.param_groups
    momenta = {group.get("momentum") for group in groups}
    extras = [
        name
        for name in ("nesterov", "dampening", "weight_decay", "maximize")
        if any(group.get(name) for group in groups)
    ]
    if not isinstance(optimizer, torch.optim.SGD) or len(momenta) != 1 or extras:
        found = f"{type(optimizer).__name__} with momenta {sorted(map(str, momenta))}"
        raise ConfigurationError(
            f"GEM needs a torch.optim.SGD with one momentum for all groups and nothing else; this is {found}"
            + (f" and {', '.join(extras)}" if extras else "")
        )
    return float(momenta.pop() or 0.0)
