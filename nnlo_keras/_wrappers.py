"""The algorithms as Keras optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from nnlo_common import ConfigurationError, algorithms
from nnlo_common._numbers import whole_number
from nnlo_keras._wrapper import Wrapper

__all__ = ["AGN", "EASGD", "GEM", "DiLoCo", "Downpour", "DynSGD", "LocalSGD", "Synchronous"]

_registered = keras.saving.register_keras_serializable("nnlo")


@_registered
class Downpour(Wrapper):
    """Downpour SGD: your optimizer steps the centre, with the workers' raw gradients as they come.

    See `nnlo_common.Downpour` for the equations. With one worker and every=1 the weights are those of a plain
    `fit`.

    Args:
        optimizer: yours; it runs on the server.
        every: gradients are summed over this many batches before they are pushed.
        lag: exchanges that may be under way while the worker goes on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.

    Example:
        >>> optimizer = Downpour(keras.optimizers.SGD(0.1), every=5)
        >>> optimizer.get_config()["every"]
        5
    """

    def __init__(
        self, optimizer: Any, *, every: int = 1, lag: int = 0, servers: int = 1, name: str | None = None
    ) -> None:
        rule = algorithms.Downpour(schedule="aligned", lag=lag)
        own = {"every": whole_number("every", every, 1), "lag": lag}
        super().__init__(optimizer, rule, own, every=every, servers=servers, name=name)


@_registered
class Synchronous(Wrapper):
    """Synchronous SGD: your optimizer steps the centre with the mean gradient of each batch.

    See `nnlo_common.Synchronous`. p workers with batches of B are one process with batches of p B.

    Args:
        optimizer: yours; it runs on the server.
        backup: how many of the slowest workers are not waited for.
        lag: exchanges that may be under way while the worker goes on.
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

    See `nnlo_common.EASGD`; the exchange comes after the step.

    Args:
        optimizer: yours; it runs on every worker.
        every: batches between exchanges.
        beta: the workers' common pull; each moves by alpha = beta / p.
        alpha: that moving rate itself, in place of beta.
        lag: exchanges that may be under way while the worker goes on.
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
        lag: int = 0,
        servers: int = 1,
        name: str | None = None,
    ) -> None:
        rule = algorithms.EASGD(every=every, beta=beta, alpha=alpha, order="step_first", lag=lag)
        own = {"every": every, "beta": beta, "alpha": alpha, "lag": lag}
        super().__init__(optimizer, rule, own, servers=servers, name=name)


@_registered
class GEM(Wrapper):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer is not stepped: its learning rate and its momentum define that
    momentum SGD.

    Args:
        optimizer: `keras.optimizers.SGD` with momentum, without Nesterov, weight decay and clipping.
        kappa: how much energy the workers may have together, in units of the momentum SGD's.
        lag: batches that gradients are delayed by.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self, optimizer: Any, *, kappa: float = 1.0, lag: int = 0, servers: int = 1, name: str | None = None
    ) -> None:
        optimizer = keras.optimizers.get(optimizer)
        # The learning rate goes into the gradient, so the rule's own is 1.
        rule = algorithms.GEM(learning_rate=1.0, momentum=_momentum(optimizer), kappa=kappa, lag=lag)
        super().__init__(optimizer, rule, {"kappa": kappa, "lag": lag}, servers=servers, name=name)


@_registered
class AGN(Wrapper):
    """Accumulated gradient normalization: explore with plain SGD, push the mean of the gradients met.

    See `nnlo_common.AGN`.

    Args:
        optimizer: yours; it runs on the server.
        every: local steps per push.
        local_learning_rate: of the local steps; None: that of your optimizer, as callbacks set it (of a
            schedule, what it begins with).
        lag: exchanges that may be under way while the worker goes on.
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
        rule = algorithms.AGN(every=every, local_learning_rate=local_learning_rate or 0.0, lag=lag)
        super().__init__(optimizer, rule, own, servers=servers, name=name)
        self.follows = local_learning_rate is None
        if self.follows:  # now it is known to be an optimizer that has a rate
            self.algorithm = replace(rule, local_learning_rate=self.current_rate)


@_registered
class DynSGD(Wrapper):
    """Staleness-aware SGD: your optimizer steps the centre; the staler a gradient, the smaller it is made.

    See `nnlo_common.DynSGD`.

    Args:
        optimizer: yours; it runs on the server. Plain or momentum SGD is what the paper means.
        every: gradients are summed over this many batches before they are pushed.
        lag: exchanges that may be under way while the worker goes on.
        servers: how many ranks share the serving of the centre.
        name: as for any optimizer.
    """

    def __init__(
        self, optimizer: Any, *, every: int = 1, lag: int = 0, servers: int = 1, name: str | None = None
    ) -> None:
        own = {"every": whole_number("every", every, 1), "lag": lag}
        super().__init__(optimizer, algorithms.DynSGD(lag=lag), own, every=every, servers=servers, name=name)


@_registered
class LocalSGD(Wrapper):
    """Local SGD: your optimizer runs on each worker; every so often all take the mean of their weights.

    See `nnlo_common.LocalSGD`.

    Args:
        optimizer: yours; it runs on every worker.
        every: local steps per round.
        warmup: first steps that are averaged one by one.
        lag: rounds that may be under way while the worker goes on.
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
        lag: rounds that may be under way while the worker goes on.
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


def _momentum(optimizer: Any) -> float:
    """The momentum of a momentum SGD that has nothing else."""
    extras = [
        name
        for name in (
            "nesterov",
            "weight_decay",
            "clipnorm",
            "clipvalue",
            "global_clipnorm",
            "use_ema",
            "gradient_accumulation_steps",
        )
        if getattr(optimizer, name, None)
    ]
    if not isinstance(optimizer, keras.optimizers.SGD) or extras:
        with_extras = f" with {', '.join(extras)}" if extras else ""
        raise ConfigurationError(
            f"GEM needs a keras.optimizers.SGD with a momentum and nothing else; this is "
            f"{type(optimizer).__name__}{with_extras}"
        )
    return float(optimizer.momentum)
