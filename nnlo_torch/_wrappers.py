"""Algorithms as torch optimizers; the core's mixins define their options."""

from __future__ import annotations

from typing import Any, Literal

import torch

from nnlo_common import Steady as SteadyAlgorithm
from nnlo_common.plugin import mixins
from nnlo_torch._stretches import refuse_options
from nnlo_torch._wrapper import Wrapper

__all__ = ["AGN", "EAMSGD", "EASGD", "GEM", "DiLoCo", "Downpour", "DynSGD", "LocalSGD", "Synchronous"]


class Downpour(mixins.DownpourMixin[torch.optim.Optimizer], Wrapper):
    """Downpour SGD: your optimizer steps the centre, with the workers' raw gradients as they come.

    See `nnlo_common.Downpour` for the equations. With one worker and every=1 the weights equal those of the
    plain loop, bit for bit. With several, each commit is stale by the others' commits, which a large momentum
    tolerates badly: on a quadratic of curvature h, with one stale commit, the learning rate must be below
    (1 - momentum) / h. Reduce either, or use an optimizer such as Adam.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Downpour(torch.optim.Adam(model.parameters(), lr=1e-3))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.role
        'alone'
    """


class Steady(Wrapper):
    """Steady: the accuracy of one process with its settings, on any number of workers."""

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        passes: Literal["progress", "fixed"] = "progress",
        synchronous: bool = False,
        memory: float | None = None,
        brake: float = 1.5,
        lag: int = 0,
        **options: Any,
    ) -> None:
        own: dict[str, Any] = {"every": every, "passes": passes, "synchronous": synchronous}
        own |= {"memory": memory, "brake": brake, "lag": lag}
        refuse_options(optimizer, "Steady")
        self._wrap(optimizer, SteadyAlgorithm(**own), own, **options)


class Synchronous(mixins.SynchronousMixin[torch.optim.Optimizer], Wrapper):
    """Synchronous SGD: your optimizer steps the centre with the mean gradient of each step.

    See `nnlo_common.Synchronous`. p workers with batches of B are one process with batches of p B.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Synchronous(torch.optim.SGD(model.parameters(), lr=0.1), backup=1)
        >>> optimizer.algorithm.backup  # with 4 workers each step waits for the first 3
        1
    """


class EASGD(mixins.EASGDMixin[torch.optim.Optimizer], Wrapper):
    """Elastic averaging: your optimizer runs on each worker; each exchange pulls worker and centre together.

    See `nnlo_common.EASGD` for the equations and the stability of each order.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = EASGD(torch.optim.SGD(model.parameters(), lr=0.05), every=10, beta=0.9)
        >>> optimizer.algorithm.every  # steps of a worker between two exchanges
        10
    """


class EAMSGD(mixins.EAMSGDMixin[torch.optim.Optimizer], Wrapper):
    """Elastic averaging with Nesterov momentum, exchanged in the paper's order.

    See `nnlo_common.EAMSGD`. Your optimizer, a `torch.optim.SGD`, is not stepped: it only supplies the
    learning rates and the momentum of the equations. Between steps the model holds the look-ahead point,
    where the next gradient is taken; at the end of the training, the worker's weights.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        >>> optimizer = EAMSGD(inner, every=10)
        >>> optimizer.algorithm.every
        10
    """

    def _change_gradient(self) -> None:
        self._scale_by_rates()


class GEM(mixins.GEMMixin[torch.optim.Optimizer], Wrapper):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer, a `torch.optim.SGD`, is not stepped: it only supplies the learning
    rates and the momentum of that SGD.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = GEM(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), kappa=2.0)
        >>> optimizer.algorithm.kappa  # the workers together may have twice the energy of that SGD
        2.0
    """

    def _change_gradient(self) -> None:
        self._scale_by_rates()


class AGN(mixins.AGNMixin[torch.optim.Optimizer], Wrapper):
    """Accumulated gradient normalization: explore with plain SGD, push the mean of its gradients.

    See `nnlo_common.AGN`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AGN(torch.optim.Adam(model.parameters(), lr=1e-3), every=15)
        >>> optimizer.algorithm.every  # gradients in each mean
        15
    """

    def _wrap(
        self, optimizer: Any, algorithm: Any, own: dict[str, Any], local: Any = None, **common: Any
    ) -> None:
        super()._wrap(optimizer, algorithm, own, local, **common)
        self._follows = local == mixins.AS_YOURS

    def _change_gradient(self) -> None:
        if self._follows and self._team is not None:
            self._team.set_local_rate(float(self.param_groups[0]["lr"]))


class DynSGD(mixins.DynSGDMixin[torch.optim.Optimizer], Wrapper):
    """Staleness-aware SGD: your optimizer steps the centre; staler gradients are scaled down more.

    See `nnlo_common.DynSGD`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DynSGD(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.param_groups[0]["lr"]  # after one stale commit: half of it
        0.1
    """


class LocalSGD(mixins.LocalSGDMixin[torch.optim.Optimizer], Wrapper):
    """Local SGD: your optimizer runs on each worker; after each round all take the mean of their weights.

    See `nnlo_common.LocalSGD`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=8, warmup=100)
        >>> optimizer.algorithm.every, optimizer.algorithm.warmup  # the first 100 steps are each averaged
        (8, 100)
    """


class DiLoCo(mixins.DiLoCoMixin[torch.optim.Optimizer], Wrapper):
    """DiLoCo: your optimizer makes local rounds; their mean displacement drives an outer Nesterov SGD.

    See `nnlo_common.DiLoCo`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), every=50)
        >>> optimizer.algorithm.outer_learning_rate, optimizer.algorithm.outer_momentum
        (0.7, 0.9)
    """
