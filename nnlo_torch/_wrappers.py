"""The algorithms as torch optimizers."""

from __future__ import annotations

from typing import Any, Literal

import torch

from nnlo_common.plugin import algorithms, whole_number
from nnlo_torch._requirements import local_of, momentum_of, refuse
from nnlo_torch._wrapper import Wrapper

__all__ = ["AGN", "EAMSGD", "EASGD", "GEM", "DiLoCo", "Downpour", "DynSGD", "LocalSGD", "Synchronous"]


class Downpour(Wrapper):
    """Downpour SGD: your optimizer steps the centre, with the workers' raw gradients as they come.

    See `nnlo_common.Downpour` for the equations. With one worker and every=1 the weights are those of
    the plain loop, bit for bit. With several, each commit comes late by those of the others, and a large
    momentum does not bear that well: on a quadratic of curvature h, with one stale commit, the learning rate
    has to be below (1 - momentum) / h. Use less of either, or an optimizer such as Adam.

    Between exchanges a worker stays at the centre that it has fetched and adds up its gradients; with `local`
    it also moves its own weights in each step, as the paper has it.

    Args:
        optimizer: yours; it runs on the server.
        every: steps between exchanges: gradients are summed over them, pushed, and the centre is fetched.
        n_push: steps between pushes, if not as many.
        n_fetch: steps between fetches, if not as many.
        local: moves a worker's weights between exchanges: the learning rate of plain SGD, or a torch
            optimizer over the same parameters; None: nothing does.
        warm_start: commits that the first worker makes alone before the others are let in.
        lag: exchanges that may be under way while the worker goes on.
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
        n_push: int | None = None,
        n_fetch: int | None = None,
        local: float | torch.optim.Optimizer | None = None,
        warm_start: int = 0,
        lag: int = 0,
        **options: Any,
    ) -> None:
        refuse(optimizer, type(self).__name__)
        whole_number("every", every, 1)
        rate, moves = local_of(local, optimizer, "Downpour")
        rule = algorithms.Downpour(
            n_push=every if n_push is None else n_push,
            n_fetch=every if n_fetch is None else n_fetch,
            schedule="aligned",
            local_learning_rate=rate,
            warm_start=warm_start,
            lag=lag,
        )
        super().__init__(optimizer, rule, local=moves, **options)


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
        beta_per: "exchange", or "step": alpha = beta / (p every).
        order: "step_first": your step, then the exchange; "paper": the other way round.
        synchronous: wait for all workers at each exchange.
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
        beta_per: Literal["exchange", "step"] = "exchange",
        order: Literal["paper", "step_first"] = "step_first",
        synchronous: bool = False,
        lag: int = 0,
        **options: Any,
    ) -> None:
        pull: dict[str, Any] = {"beta": beta, "alpha": alpha, "beta_per": beta_per}
        rule = algorithms.EASGD(every=every, order=order, synchronous=synchronous, lag=lag, **pull)
        super().__init__(optimizer, rule, **options)


class EAMSGD(Wrapper):
    """Elastic averaging with Nesterov momentum, exchanged in the paper's order.

    See `nnlo_common.EAMSGD`. Your optimizer is not stepped: its learning rates and its momentum are those of
    the equations. Between steps the model has the point that lies a momentum ahead, where the next gradient
    is taken; at the end of the training, the worker's weights.

    Args:
        optimizer: `torch.optim.SGD` with momentum and nesterov=True, without dampening and weight decay.
        every: steps between exchanges.
        beta: the workers' common pull; each moves by alpha = beta / p.
        alpha: that moving rate itself, in place of beta.
        beta_per: "exchange", or "step": alpha = beta / (p every).
        synchronous: wait for all workers at each exchange.
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
        beta_per: Literal["exchange", "step"] = "exchange",
        synchronous: bool = False,
        lag: int = 0,
        **options: Any,
    ) -> None:
        pull: dict[str, Any] = {"beta": beta, "alpha": alpha, "beta_per": beta_per}
        # The groups' learning rates go into the gradient, so the rule's own is 1.
        pull |= {"learning_rate": 1.0, "momentum": momentum_of(optimizer, "EAMSGD", nesterov=True)}
        rule = algorithms.EAMSGD(every=every, synchronous=synchronous, lag=lag, **pull)
        super().__init__(optimizer, rule, **options)

    def _change_gradient(self) -> None:
        self._scale_by_rates()


class GEM(Wrapper):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer is not stepped: its learning rates and its momentum define that
    momentum SGD.

    Args:
        optimizer: `torch.optim.SGD` with momentum, without Nesterov, dampening and weight decay.
        every: steps whose mean gradient makes a step of GEM.
        kappa: how much energy the workers may have together, in units of the momentum SGD's.
        clip: upper bound of how much larger than the gradient's a step may be; None: none (for study).
        primed: begin with the first centre as the one that gradients are stale against; False is for study.
        lag: steps that gradients are delayed by; it hides no round trip.
        options: `servers`, `model`, `stall_timeout_s`, `world`; see `Wrapper`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 1,
        kappa: float = 1.0,
        clip: float | None = 5.0,
        primed: bool = True,
        lag: int = 0,
        **options: Any,
    ) -> None:
        # The groups' learning rates go into the gradient, so the rule's own is 1.
        momentum = momentum_of(optimizer, "GEM", nesterov=False)
        own: dict[str, Any] = {"every": every, "kappa": kappa, "clip": clip, "primed": primed, "lag": lag}
        rule = algorithms.GEM(learning_rate=1.0, momentum=momentum, **own)
        super().__init__(optimizer, rule, **options)

    def _change_gradient(self) -> None:
        self._scale_by_rates()


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
