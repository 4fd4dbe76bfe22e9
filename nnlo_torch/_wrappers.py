"""Algorithms as torch optimizers; their constructors are made of the algorithms' declarations.

The stub beside this module has the constructors for editors, type checkers and the site; `make generated`
writes it.
"""

from __future__ import annotations

import torch  # noqa: F401 - of the examples

import nnlo_common
from nnlo_common.plugin import ALGORITHMS, Algorithm, wrapper_class
from nnlo_torch._wrapper import Wrapper

__all__ = ["wrapper"]

#: Of an algorithm that has no class below.
_EXAMPLE = """
Example:
    >>> import torch, nnlo_torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = nnlo_torch.NAME(torch.optim.SGD(model.parameters(), lr=0.1MOMENTUM))
    >>> optimizer.role
    'alone'
"""


class Downpour(Wrapper, algorithm=nnlo_common.Downpour):
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


class Steady(Wrapper, algorithm=nnlo_common.Steady):
    """The accuracy of one process with its settings, on any number of workers, nothing tuned again.

    Change `torch.optim.SGD(parameters, lr=0.03, momentum=0.9)` to
    `nnlo_torch.Steady(torch.optim.SGD(parameters, lr=0.03, momentum=0.9))`, and `shuffle=True` of the loader
    to `sampler=nnlo_torch.ShardSampler(dataset)`. See `nnlo_common.Steady` for the equations. Epochs end
    when the progress of one epoch is made, and schedules by batch follow progress.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Steady(torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9))
        >>> optimizer.param_groups[0]["lr"]  # of one process, whatever the number of workers
        0.03
    """


class Synchronous(Wrapper, algorithm=nnlo_common.Synchronous):
    """Synchronous SGD: your optimizer steps the centre with the mean gradient of each step.

    See `nnlo_common.Synchronous`. p workers with batches of B are one process with batches of p B.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Synchronous(torch.optim.SGD(model.parameters(), lr=0.1), backup=1)
        >>> optimizer.algorithm.backup  # with 4 workers each step waits for the first 3
        1
    """


class EASGD(Wrapper, algorithm=nnlo_common.EASGD):
    """Elastic averaging: your optimizer runs on each worker; each exchange pulls worker and centre together.

    See `nnlo_common.EASGD` for the equations and the stability of each order.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = EASGD(torch.optim.SGD(model.parameters(), lr=0.05), every=10, beta=0.9)
        >>> optimizer.algorithm.every  # steps of a worker between two exchanges
        10
    """


class EAMSGD(Wrapper, algorithm=nnlo_common.EAMSGD):
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


class GEM(Wrapper, algorithm=nnlo_common.GEM):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer, a `torch.optim.SGD`, is not stepped: it only supplies the learning
    rates and the momentum of that SGD.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = GEM(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), kappa=2.0)
        >>> optimizer.algorithm.kappa  # the workers together may have twice the energy of that SGD
        2.0
    """


class AGN(Wrapper, algorithm=nnlo_common.AGN):
    """Accumulated gradient normalization: explore with plain SGD, push the mean of its gradients.

    See `nnlo_common.AGN`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AGN(torch.optim.Adam(model.parameters(), lr=1e-3), every=15)
        >>> optimizer.algorithm.every  # gradients in each mean
        15
    """


class DynSGD(Wrapper, algorithm=nnlo_common.DynSGD):
    """Staleness-aware SGD: your optimizer steps the centre; staler gradients are scaled down more.

    See `nnlo_common.DynSGD`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DynSGD(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.param_groups[0]["lr"]  # after one stale commit: half of it
        0.1
    """


class LocalSGD(Wrapper, algorithm=nnlo_common.LocalSGD):
    """Local SGD: your optimizer runs on each worker; after each round all take the mean of their weights.

    See `nnlo_common.LocalSGD`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=8, warmup=100)
        >>> optimizer.algorithm.every, optimizer.algorithm.warmup  # the first 100 steps are each averaged
        (8, 100)
    """


class DiLoCo(Wrapper, algorithm=nnlo_common.DiLoCo):
    """DiLoCo: your optimizer makes local rounds; their mean displacement drives an outer Nesterov SGD.

    See `nnlo_common.DiLoCo`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), every=50)
        >>> optimizer.algorithm.outer_learning_rate, optimizer.algorithm.outer_momentum
        (0.7, 0.9)
    """


def wrapper(algorithm: type[Algorithm]) -> type[Wrapper]:
    """Return the wrapper of an algorithm, also of one of your own.

    To pickle the class or give it a docstring, write `class MyAlgorithm(nnlo_torch.Wrapper, algorithm=...)`.

    Args:
        algorithm: a subclass of `nnlo_common.algorithms.Algorithm`.

    Example:
        >>> import nnlo_common, nnlo_torch
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Eager(nnlo_common.Downpour):
        ...     every: int = nnlo_common.algorithms.option(1, "steps between exchanges", least=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = nnlo_torch.wrapper(Eager)(torch.optim.SGD(model.parameters(), lr=0.1), lag=1)
        >>> optimizer.algorithm.lag
        1
    """
    found, found_here = globals().get(algorithm.__name__), algorithm in ALGORITHMS.values()
    if isinstance(found, type) and issubclass(found, Wrapper) and found._kind is algorithm:
        return found
    return wrapper_class(Wrapper, algorithm, __name__, _EXAMPLE if found_here else "")


# An algorithm without a class above gets one whose docstring begins like the algorithm's.
for _one in ALGORITHMS.values():
    globals().setdefault(_one.__name__, wrapper(_one))
    __all__ += [_one.__name__]  # noqa: PLE0604
