"""Algorithms as Keras optimizers; their constructors are made of the algorithms' declarations.

The stub beside this module has the constructors for editors, type checkers and the site; `make generated`
writes it.
"""

from __future__ import annotations

import keras

import nnlo_common
from nnlo_common.plugin import ALGORITHMS, Algorithm, wrapper_class
from nnlo_keras._wrapper import Wrapper

__all__ = ["wrapper"]

#: Of an algorithm that has no class below.
_EXAMPLE = """
Example:
    >>> import keras, nnlo_keras
    >>> optimizer = nnlo_keras.NAME(keras.optimizers.SGD(0.1MOMENTUM), servers=2)
    >>> optimizer.get_config()["servers"]
    2
"""

_registered = keras.saving.register_keras_serializable("nnlo")


@_registered
class Downpour(Wrapper, algorithm=nnlo_common.Downpour):
    """Downpour SGD: your optimizer steps the centre, with the workers' raw gradients as they come.

    See `nnlo_common.Downpour` for the equations. With one worker and every=1 the weights equal those of a
    plain `fit`.

    Example:
        >>> optimizer = Downpour(keras.optimizers.SGD(0.1), every=5, local=0.02)
        >>> optimizer.get_config()["every"]
        5
    """


@_registered
class Steady(Wrapper, algorithm=nnlo_common.Steady):
    """The accuracy of one process with its settings, on any number of workers, nothing tuned again.

    Change `keras.optimizers.Adam(1e-3)` to `nnlo_keras.Steady(keras.optimizers.Adam(1e-3))`. See
    `nnlo_common.Steady` for the equations. An epoch of `fit` ends when the progress of one epoch is made: a
    worker goes over its data again, in a new order, until then. A `LearningRateSchedule` follows progress.
    Clipping and weight decay are your optimizer's.

    Example:
        >>> optimizer = Steady(keras.optimizers.SGD(0.03, momentum=0.9))
        >>> float(optimizer.learning_rate)  # of one process, whatever the number of workers
        0.029999999329447746
    """


@_registered
class Synchronous(Wrapper, algorithm=nnlo_common.Synchronous):
    """Synchronous SGD: your optimizer steps the centre with the mean gradient of each batch.

    See `nnlo_common.Synchronous`. p workers with batches of B are one process with batches of p B.

    Example:
        >>> optimizer = Synchronous(keras.optimizers.SGD(0.1), backup=1)
        >>> optimizer.get_config()["backup"]  # with 4 workers each step waits for the first 3
        1
    """


@_registered
class EASGD(Wrapper, algorithm=nnlo_common.EASGD):
    """Elastic averaging: your optimizer runs on each worker; each exchange pulls worker and centre together.

    See `nnlo_common.EASGD` for the equations and the stability of each order.

    Example:
        >>> optimizer = EASGD(keras.optimizers.SGD(0.05), every=10, beta=0.9)
        >>> optimizer.get_config()["every"]  # batches of a worker between two exchanges
        10
    """


@_registered
class EAMSGD(Wrapper, algorithm=nnlo_common.EAMSGD):
    """Elastic averaging with Nesterov momentum, exchanged in the paper's order.

    See `nnlo_common.EAMSGD`. Your optimizer, a `keras.optimizers.SGD`, is not stepped: it only supplies the
    learning rate and the momentum of the equations. Between batches the model holds the look-ahead point,
    where the next gradient is taken.

    Example:
        >>> optimizer = EAMSGD(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), every=10)
        >>> optimizer.get_config()["every"]
        10
    """


@_registered
class GEM(Wrapper, algorithm=nnlo_common.GEM):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer, a `keras.optimizers.SGD`, is not stepped: it only supplies the
    learning rate and the momentum of that SGD.

    Example:
        >>> optimizer = GEM(keras.optimizers.SGD(0.05, momentum=0.9), kappa=2.0)
        >>> optimizer.get_config()["kappa"]  # the workers together may have twice the energy of that SGD
        2.0
    """


@_registered
class AGN(Wrapper, algorithm=nnlo_common.AGN):
    """Accumulated gradient normalization: explore with plain SGD, push the mean of its gradients.

    See `nnlo_common.AGN`.

    Example:
        >>> optimizer = AGN(keras.optimizers.Adam(1e-3), every=15)
        >>> optimizer.get_config()["every"]  # gradients in each mean
        15
    """


@_registered
class DynSGD(Wrapper, algorithm=nnlo_common.DynSGD):
    """Staleness-aware SGD: your optimizer steps the centre; staler gradients are scaled down more.

    See `nnlo_common.DynSGD`.

    Example:
        >>> optimizer = DynSGD(keras.optimizers.SGD(0.1), every=2)
        >>> optimizer.get_config()["every"]
        2
    """


@_registered
class LocalSGD(Wrapper, algorithm=nnlo_common.LocalSGD):
    """Local SGD: your optimizer runs on each worker; after each round all take the mean of their weights.

    See `nnlo_common.LocalSGD`.

    Example:
        >>> optimizer = LocalSGD(keras.optimizers.SGD(0.1), every=8, warmup=100)
        >>> optimizer.get_config()["warmup"]  # the first 100 batches are each averaged
        100
    """


@_registered
class DiLoCo(Wrapper, algorithm=nnlo_common.DiLoCo):
    """DiLoCo: your optimizer makes local rounds; their mean displacement drives an outer Nesterov SGD.

    See `nnlo_common.DiLoCo`.

    Example:
        >>> optimizer = DiLoCo(keras.optimizers.AdamW(1e-3), every=50)
        >>> optimizer.get_config()["every"]
        50
    """


def wrapper(algorithm: type[Algorithm]) -> type[Wrapper]:
    """Return the wrapper of an algorithm, also of one of your own; Keras can save models that have it.

    To pickle the class or give it a docstring, write `class MyAlgorithm(nnlo_keras.Wrapper, algorithm=...)`.

    Args:
        algorithm: a subclass of `nnlo_common.algorithms.Algorithm`.

    Example:
        >>> import nnlo_common, nnlo_keras
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Eager(nnlo_common.Downpour):
        ...     every: int = nnlo_common.algorithms.option(1, "steps between exchanges", least=1)
        >>> optimizer = nnlo_keras.wrapper(Eager)(keras.optimizers.SGD(0.1), lag=1)
        >>> optimizer.get_config()["lag"]
        1
    """
    found, found_here = globals().get(algorithm.__name__), algorithm in ALGORITHMS.values()
    if isinstance(found, type) and issubclass(found, Wrapper) and found._kind is algorithm:
        return found
    made: type[Wrapper] = _registered(
        wrapper_class(Wrapper, algorithm, __name__, _EXAMPLE if found_here else "")
    )
    return made


# An algorithm without a class above gets one whose docstring begins like the algorithm's.
for _one in ALGORITHMS.values():
    globals().setdefault(_one.__name__, wrapper(_one))
    __all__ += [_one.__name__]  # noqa: PLE0604
