"""The algorithms as Keras optimizers."""

from __future__ import annotations

from typing import Any, Literal

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import algorithms, whole_number
from nnlo_keras._wrapper import AS_YOURS, Wrapper

__all__ = ["AGN", "EAMSGD", "EASGD", "GEM", "DiLoCo", "Downpour", "DynSGD", "LocalSGD", "Synchronous"]

_registered = keras.saving.register_keras_serializable("nnlo")


@_registered
class Downpour(Wrapper):
    """Downpour SGD: your optimizer steps the centre, with the workers' raw gradients as they come.

    See `nnlo_common.Downpour` for the equations. With one worker and every=1 the weights are those of a plain
    `fit`.

    Between exchanges a worker stays at the centre that it has fetched and adds up its gradients; with `local`
    it also moves its own weights after each batch, as the paper has it.

    Args:
        optimizer: yours; it runs on the server.
        every: batches between exchanges: gradients are summed over them, pushed, and the centre is fetched.
        n_push: batches between pushes, if not as many.
        n_fetch: batches between fetches, if not as many.
        local: moves a worker's weights between exchanges: the learning rate of plain SGD, or a Keras
            optimizer; None: nothing does.
        warm_start: commits that the first worker makes alone before the others are let in.
        lag: exchanges that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.

    Example:
        >>> optimizer = Downpour(keras.optimizers.SGD(0.1), every=5, local=0.02)
        >>> optimizer.get_config()["every"]
        5
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        n_push: int | None = None,
        n_fetch: int | None = None,
        local: Any = None,
        warm_start: int = 0,
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        own: dict[str, Any] = {"every": whole_number("every", every, 1), "n_push": n_push, "n_fetch": n_fetch}
        own |= {"warm_start": warm_start, "lag": lag}
        if local is None or isinstance(local, int | float):
            own["local"] = local
        rule = algorithms.Downpour(
            n_push=every if n_push is None else n_push,
            n_fetch=every if n_fetch is None else n_fetch,
            schedule="aligned",
            warm_start=warm_start,
            lag=lag,
        )
        super().__init__(optimizer, rule, own, local=local, servers=servers, name=name)


@_registered
class Synchronous(Wrapper):
    """Synchronous SGD: your optimizer steps the centre with the mean gradient of each batch.

    See `nnlo_common.Synchronous`. p workers with batches of B are one process with batches of p B.

    Args:
        optimizer: yours; it runs on the server.
        backup: how many of the slowest workers are not waited for.
        lag: exchanges that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self, optimizer: Any, *, backup: int = 0, lag: int = 0, servers: int = 1, name: str | None = None
    ) -> None:
        own = {"backup": backup, "lag": lag}
        super().__init__(optimizer, algorithms.Synchronous(**own), own, servers=servers, name=name)


@_registered
class EASGD(Wrapper):
    """Elastic averaging: your optimizer runs on each worker; every so often worker and centre attract.

    See `nnlo_common.EASGD` for the equations and for where each order is stable.

    Args:
        optimizer: yours; it runs on every worker.
        every: batches between exchanges.
        beta: the workers' common pull; each moves by alpha = beta / p.
        alpha: that moving rate itself, in place of beta.
        beta_per: "exchange", or "step": alpha = beta / (p every).
        order: "step_first": your step, then the exchange; "paper": the other way round.
        synchronous: wait for all workers at each exchange.
        lag: exchanges that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        beta: float = 0.9,
        alpha: float | None = None,
        beta_per: Literal["exchange", "step"] = "exchange",
        order: Literal["paper", "step_first"] = "step_first",
        synchronous: bool = False,
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        own: dict[str, Any] = {"every": every, "beta": beta, "alpha": alpha, "beta_per": beta_per}
        own |= {"order": order, "synchronous": synchronous, "lag": lag}
        super().__init__(optimizer, algorithms.EASGD(**own), own, servers=servers, name=name)


@_registered
class EAMSGD(Wrapper):
    """Elastic averaging with Nesterov momentum, exchanged in the paper's order.

    See `nnlo_common.EAMSGD`. Your optimizer is not stepped: its learning rate and its momentum are those of
    the equations. Between batches the model has the point that lies a momentum ahead, where the next gradient
    is taken.

    Args:
        optimizer: `keras.optimizers.SGD` with momentum and nesterov=True, without weight decay and clipping.
        every: batches between exchanges.
        beta: the workers' common pull; each moves by alpha = beta / p.
        alpha: that moving rate itself, in place of beta.
        beta_per: "exchange", or "step": alpha = beta / (p every).
        synchronous: wait for all workers at each exchange.
        lag: exchanges that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        beta: float = 0.9,
        alpha: float | None = None,
        beta_per: Literal["exchange", "step"] = "exchange",
        synchronous: bool = False,
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        own: dict[str, Any] = {"every": every, "beta": beta, "alpha": alpha, "beta_per": beta_per}
        own |= {"synchronous": synchronous, "lag": lag}
        optimizer = keras.optimizers.get(optimizer)
        # The learning rate goes into the gradient, so the rule's own is 1.
        momentum = _momentum(optimizer, "EAMSGD", nesterov=True)
        rule = algorithms.EAMSGD(learning_rate=1.0, momentum=momentum, **own)
        super().__init__(optimizer, rule, own, servers=servers, name=name)


@_registered
class GEM(Wrapper):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer is not stepped: its learning rate and its momentum define that
    momentum SGD.

    Args:
        optimizer: `keras.optimizers.SGD` with momentum, without Nesterov, weight decay and clipping.
        every: batches whose mean gradient makes a step.
        kappa: how much energy the workers may have together, in units of the momentum SGD's.
        clip: upper bound of how much larger than the gradient's a step may be; None: none (for study).
        primed: begin with the first centre as the one that gradients are stale against; False is for study.
        lag: steps that gradients are delayed by; it hides no round trip.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        kappa: float = 1.0,
        clip: float | None = 5.0,
        primed: bool = True,
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        own: dict[str, Any] = {"every": every, "kappa": kappa, "clip": clip, "primed": primed, "lag": lag}
        optimizer = keras.optimizers.get(optimizer)
        # The learning rate goes into the gradient, so the rule's own is 1.
        momentum = _momentum(optimizer, "GEM", nesterov=False)
        rule = algorithms.GEM(learning_rate=1.0, momentum=momentum, **own)
        super().__init__(optimizer, rule, own, servers=servers, name=name)


@_registered
class AGN(Wrapper):
    """Accumulated gradient normalization: explore with plain SGD, push the mean of the gradients met.

    See `nnlo_common.AGN`.

    Args:
        optimizer: yours; it runs on the server.
        every: local steps per push.
        local_learning_rate: of the local steps; None: that of your optimizer, as callbacks set it (of a
            schedule, what it begins with).
        lag: exchanges that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        local_learning_rate: float | None = None,
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        own: dict[str, Any] = {"every": every, "local_learning_rate": local_learning_rate, "lag": lag}
        # The local steps are made within the training step, so the rule makes none.
        algorithms.AGN(every=every, local_learning_rate=local_learning_rate or 0.0)
        rule = algorithms.AGN(every=every, local_learning_rate=0.0, lag=lag)
        local = AS_YOURS if local_learning_rate is None else local_learning_rate
        super().__init__(optimizer, rule, own, local=local, servers=servers, name=name)


@_registered
class DynSGD(Wrapper):
    """Staleness-aware SGD: your optimizer steps the centre; the staler a gradient, the smaller it is made.

    See `nnlo_common.DynSGD`.

    Args:
        optimizer: yours; it runs on the server. Plain or momentum SGD is what the paper means.
        every: batches between exchanges: gradients are summed over them, pushed, and the centre is fetched.
        lag: exchanges that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self, optimizer: Any, *, every: int = 1, lag: int = 0, servers: int = 1, name: str | None = None
    ) -> None:
        own = {"every": every, "lag": lag}
        super().__init__(optimizer, algorithms.DynSGD(**own), own, servers=servers, name=name)


@_registered
class LocalSGD(Wrapper):
    """Local SGD: your optimizer runs on each worker; every so often all take the mean of their weights.

    See `nnlo_common.LocalSGD`.

    Args:
        optimizer: yours; it runs on every worker.
        every: local steps per round.
        warmup: first steps that are averaged one by one.
        lag: rounds that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        warmup: int = 0,
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        own = {"every": every, "warmup": warmup, "lag": lag}
        super().__init__(optimizer, algorithms.LocalSGD(**own), own, servers=servers, name=name)


@_registered
class DiLoCo(Wrapper):
    """DiLoCo: your optimizer makes local rounds; their mean displacement drives an outer Nesterov SGD.

    See `nnlo_common.DiLoCo`.

    Args:
        optimizer: yours, the inner one; it runs on every worker.
        every: inner steps per round.
        outer_learning_rate: of the outer SGD, on the server.
        outer_momentum: of the outer SGD.
        lag: rounds that may be under way while the worker trains on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 500,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        own = {
            "every": every,
            "outer_learning_rate": outer_learning_rate,
            "outer_momentum": outer_momentum,
            "lag": lag,
        }
        super().__init__(optimizer, algorithms.DiLoCo(**own), own, servers=servers, name=name)  # type: ignore[arg-type]


def _momentum(optimizer: Any, wrapper: str, *, nesterov: bool) -> float:
    """The momentum of a momentum SGD that has nothing else."""
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
            f"{wrapper} needs a keras.optimizers.SGD with {kind} and nothing else; this is "
            f"{type(optimizer).__name__}{with_extras}"
        )
    return float(optimizer.momentum)
