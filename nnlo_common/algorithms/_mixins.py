"""Constructors of the wrappers: the options of each algorithm, as every framework's optimizer takes them.

A framework package makes its wrapper of a mixin and of its own `Wrapper`. Names, types and defaults are
literals, for editors and type checkers; a test compares them with those of the algorithms.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, Literal, TypeVar

from nnlo_common.algorithms._agn import AGN
from nnlo_common.algorithms._diloco import DiLoCo
from nnlo_common.algorithms._downpour import Downpour
from nnlo_common.algorithms._dynsgd import DynSGD
from nnlo_common.algorithms._easgd import EAMSGD, EASGD
from nnlo_common.algorithms._gem import GEM
from nnlo_common.algorithms._localsgd import LocalSGD
from nnlo_common.algorithms._rule import Algorithm
from nnlo_common.algorithms._synchronous import Synchronous
from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError

__all__ = [
    "AS_YOURS",
    "AGNMixin",
    "DiLoCoMixin",
    "DownpourMixin",
    "DynSGDMixin",
    "EAMSGDMixin",
    "EASGDMixin",
    "GEMMixin",
    "LocalSGDMixin",
    "TREE_ONLY_ELASTIC",
    "SynchronousMixin",
    "WrapperBase",
]

#: Take the learning rate of local steps from the wrapped optimizer.
AS_YOURS: Final = "as yours"

_OF_TREES = ("sub_servers", "sub_every", "sub_alpha")

#: Why only elastic averaging has sub-servers, and what else to do.
TREE_ONLY_ELASTIC: Final = (
    "is for EASGD and EAMSGD only: in a tree of servers any other algorithm would move the centre late, by "
    "sums whose staleness adds up from level to level, and gain nothing; use servers=M or a larger every"
)

Optimizer = TypeVar("Optimizer")


class WrapperBase:
    """Base of the mixins and of a framework's `Wrapper`, which fills both methods."""

    def _wrap(
        self, optimizer: Any, algorithm: Algorithm, own: dict[str, Any], local: Any = None, **common: Any
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: the user's.
            algorithm: how it is exchanged.
            own: the options of the constructor.
            local: moves a worker's weights between exchanges: a learning rate, `AS_YOURS` or an optimizer.
            common: options that all wrappers of the framework take.
        """
        raise NotImplementedError

    def _refuse_unknown(self, names: Iterable[str], taken_by: Callable[..., None]) -> None:
        """Refuse misspelt options as Python does, but name the nearest.

        Args:
            names: the options that are not the algorithm's.
            taken_by: the constructor of the framework's `Wrapper`, which takes them.
        """
        common = _keywords(taken_by)
        unknown = next((name for name in names if name not in common), None)
        if unknown is None:
            return
        if unknown in _OF_TREES:
            raise ConfigurationError(f"{type(self).__name__}: {unknown} {TREE_ONLY_ELASTIC}")
        possible = sorted({*_keywords(type(self).__init__), *common})
        near = difflib.get_close_matches(unknown, possible, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(possible)}"
        raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {unknown!r}; {advice}")

    def _momentum(self, optimizer: Any, *, nesterov: bool) -> float:
        """Return the momentum of a plain momentum SGD; refuse any other optimizer."""
        raise NotImplementedError


class DownpourMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of a `Downpour` wrapper."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 1,
        n_push: int | None = None,
        n_fetch: int | None = None,
        local: float | Optimizer | None = None,
        warm_start: int = 0,
        lag: int = 0,
        **options: Any,
    ) -> None:
        """Wrap an optimizer.

        Between exchanges a worker stays at the centre that it has fetched and adds up its gradients; with
        `local` it also moves its own weights in each step, as in the paper.

        Args:
            optimizer: yours; it runs on the server.
            every: steps between exchanges: gradients are summed over them, pushed, and the centre is fetched.
            n_push: steps between pushes, if not as many.
            n_fetch: steps between fetches, if not as many.
            local: moves a worker's weights between exchanges: the learning rate of plain SGD, or an optimizer
                of the framework over the same parameters; None: nothing does.
            warm_start: commits that the first worker makes alone before the others are let in.
            lag: exchanges that may be under way while the worker trains on.
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": whole_number("every", every, 1), "n_push": n_push, "n_fetch": n_fetch}
        own |= {"warm_start": warm_start, "lag": lag, "local": local}
        rule = Downpour(
            n_push=every if n_push is None else n_push,
            n_fetch=every if n_fetch is None else n_fetch,
            schedule="aligned",
            warm_start=warm_start,
            lag=lag,
        )
        self._wrap(optimizer, rule, own, local, **options)


class SynchronousMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of a `Synchronous` wrapper."""

    def __init__(self, optimizer: Optimizer, *, backup: int = 0, lag: int = 0, **options: Any) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server.
            backup: how many of the slowest workers are not waited for.
            lag: exchanges that may be under way while the worker trains on.
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"backup": backup, "lag": lag}
        self._wrap(optimizer, Synchronous(**own), own, **options)


class EASGDMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of an `EASGD` wrapper."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 10,
        beta: float = 0.9,
        alpha: float | None = None,
        beta_per: Literal["exchange", "step"] = "exchange",
        order: Literal["paper", "step_first"] = "step_first",
        synchronous: bool = False,
        lag: int = 0,
        sub_servers: int | Literal["host"] = 0,
        sub_every: int = 10,
        sub_alpha: float | None = None,
        **options: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on every worker.
            every: steps between exchanges.
            beta: the workers' common pull; each moves by alpha = beta / p.
            alpha: that moving rate itself, in place of beta.
            beta_per: "exchange", or "step": alpha = beta / (p every).
            order: "step_first": your step, then the exchange; "paper": the other way round.
            synchronous: wait for all workers at each exchange.
            lag: exchanges that may be under way while the worker trains on.
            sub_servers: servers between the top server and the workers; "host": one on each host; 0: none.
            sub_every: exchanges of a sub-server's workers between two of its own with the top server.
            sub_alpha: its moving rate with the top server; None: beta / (sub-servers + 1).
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": every, "alpha": alpha, "beta": beta, "beta_per": beta_per}
        own |= {"order": order, "synchronous": synchronous, "lag": lag}
        own |= _given(sub_servers=(sub_servers, 0), sub_every=(sub_every, 10), sub_alpha=(sub_alpha, None))
        self._wrap(optimizer, EASGD(**own), own, **options)


class EAMSGDMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of an `EAMSGD` wrapper."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 10,
        beta: float = 0.9,
        alpha: float | None = None,
        beta_per: Literal["exchange", "step"] = "exchange",
        synchronous: bool = False,
        lag: int = 0,
        sub_servers: int | Literal["host"] = 0,
        sub_every: int = 10,
        sub_alpha: float | None = None,
        **options: Any,
    ) -> None:
        """Wrap an optimizer that makes no steps: the algorithm takes its learning rate and momentum.

        Args:
            optimizer: the framework's SGD with momentum and nesterov=True, and nothing else.
            every: steps between exchanges.
            beta: the workers' common pull; each moves by alpha = beta / p.
            alpha: that moving rate itself, in place of beta.
            beta_per: "exchange", or "step": alpha = beta / (p every).
            synchronous: wait for all workers at each exchange.
            lag: exchanges that may be under way while the worker trains on.
            sub_servers: servers between the top server and the workers; "host": one on each host; 0: none.
            sub_every: exchanges of a sub-server's workers between two of its own with the top server.
            sub_alpha: its moving rate with the top server; None: beta / (sub-servers + 1).
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": every, "alpha": alpha, "beta": beta, "beta_per": beta_per}
        own |= {"synchronous": synchronous, "lag": lag}
        own |= _given(sub_servers=(sub_servers, 0), sub_every=(sub_every, 10), sub_alpha=(sub_alpha, None))
        # The learning rate goes into the gradient, so the rule's own is 1.
        rule = EAMSGD(learning_rate=1.0, momentum=self._momentum(optimizer, nesterov=True), **own)
        self._wrap(optimizer, rule, own, **options)


class GEMMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of a `GEM` wrapper."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 1,
        kappa: float = 1.0,
        clip: float | None = 5.0,
        primed: bool = True,
        lag: int = 0,
        **options: Any,
    ) -> None:
        """Wrap an optimizer that makes no steps: the algorithm takes its learning rate and momentum.

        Args:
            optimizer: the framework's SGD with momentum, and nothing else.
            every: steps whose mean gradient makes a step of GEM.
            kappa: how much energy the workers may have together, in units of the momentum SGD's.
            clip: upper bound of how much larger than the gradient's a step may be; None: none (for study).
            primed: begin with the first centre as the one that gradients are stale against; False: for study.
            lag: steps that gradients are delayed by; it hides no round trip.
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": every, "kappa": kappa, "clip": clip, "primed": primed, "lag": lag}
        # The learning rate goes into the gradient, so the rule's own is 1.
        rule = GEM(learning_rate=1.0, momentum=self._momentum(optimizer, nesterov=False), **own)
        self._wrap(optimizer, rule, own, **options)


class AGNMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of an `AGN` wrapper."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 10,
        local_learning_rate: float | None = None,
        lag: int = 0,
        **options: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server.
            every: local steps per push.
            local_learning_rate: of the local steps; None: that of your optimizer, as it is set (of its first
                group, and of a schedule of Keras what it begins with).
            lag: exchanges that may be under way while the worker trains on.
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": every, "local_learning_rate": local_learning_rate, "lag": lag}
        local = AS_YOURS if local_learning_rate is None else local_learning_rate
        AGN(every=every, local_learning_rate=local_learning_rate or 0.0)  # refuses what is not possible
        rule = AGN(every=every, local_learning_rate=0.0, lag=lag)
        self._wrap(optimizer, rule, own, local, **options)


class DynSGDMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of a `DynSGD` wrapper."""

    def __init__(self, optimizer: Optimizer, *, every: int = 1, lag: int = 0, **options: Any) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server. Plain or momentum SGD is what the paper means.
            every: steps between exchanges: gradients are summed over them, pushed, and the centre is fetched.
            lag: exchanges that may be under way while the worker trains on.
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": every, "lag": lag}
        self._wrap(optimizer, DynSGD(**own), own, **options)


class LocalSGDMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of a `LocalSGD` wrapper."""

    def __init__(
        self, optimizer: Optimizer, *, every: int = 10, warmup: int = 0, lag: int = 0, **options: Any
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on every worker.
            every: local steps per round.
            warmup: first steps that are averaged one by one.
            lag: rounds that may be under way while the worker trains on.
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": every, "warmup": warmup, "lag": lag}
        self._wrap(optimizer, LocalSGD(**own), own, **options)


class DiLoCoMixin(WrapperBase, Generic[Optimizer]):
    """Constructor of a `DiLoCo` wrapper."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int = 500,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        lag: int = 0,
        **options: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours, the inner one; it runs on every worker.
            every: inner steps per round.
            outer_learning_rate: of the outer SGD, on the server.
            outer_momentum: of the outer SGD.
            lag: rounds that may be under way while the worker trains on.
            options: `servers` and the others that all wrappers take; see `Wrapper`.
        """
        own: dict[str, Any] = {"every": every, "outer_learning_rate": outer_learning_rate}
        own |= {"outer_momentum": outer_momentum, "lag": lag}
        self._wrap(optimizer, DiLoCo(**own), own, **options)


def _keywords(constructor: Callable[..., None]) -> list[str]:
    parameters = inspect.signature(constructor).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


def _given(**options: tuple[Any, Any]) -> dict[str, Any]:
    """Return the options that are not at their default."""
    return {name: value for name, (value, default) in options.items() if value != default}
