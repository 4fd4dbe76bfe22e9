"""Algorithms as Keras optimizers; the core's mixins define their options."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common.plugin import mixins
from nnlo_keras._wrapper import Wrapper

__all__ = ["AGN", "EAMSGD", "EASGD", "GEM", "DiLoCo", "Downpour", "DynSGD", "LocalSGD", "Synchronous"]

_registered = keras.saving.register_keras_serializable("nnlo")


@_registered
class Downpour(mixins.DownpourMixin[Any], Wrapper):
    """Downpour SGD: your optimizer steps the centre, with the workers' raw gradients as they come.

    See `nnlo_common.Downpour` for the equations. With one worker and every=1 the weights equal those of a
    plain `fit`.

    Example:
        >>> optimizer = Downpour(keras.optimizers.SGD(0.1), every=5, local=0.02)
        >>> optimizer.get_config()["every"]
        5
    """


@_registered
class Synchronous(mixins.SynchronousMixin[Any], Wrapper):
    """Synchronous SGD: your optimizer steps the centre with the mean gradient of each batch.

    See `nnlo_common.Synchronous`. p workers with batches of B are one process with batches of p B.

    Example:
        >>> optimizer = Synchronous(keras.optimizers.SGD(0.1), backup=1)
        >>> optimizer.get_config()["backup"]  # with 4 workers each step waits for the first 3
        1
    """


@_registered
class EASGD(mixins.EASGDMixin[Any], Wrapper):
    """Elastic averaging: your optimizer runs on each worker; each exchange pulls worker and centre together.

    See `nnlo_common.EASGD` for the equations and the stability of each order.

    Example:
        >>> optimizer = EASGD(keras.optimizers.SGD(0.05), every=10, beta=0.9)
        >>> optimizer.get_config()["every"]  # batches of a worker between two exchanges
        10
    """


@_registered
class EAMSGD(mixins.EAMSGDMixin[Any], Wrapper):
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
class GEM(mixins.GEMMixin[Any], Wrapper):
    """Gradient energy matching: the workers together move with the energy of one momentum SGD.

    See `nnlo_common.GEM`. Your optimizer, a `keras.optimizers.SGD`, is not stepped: it only supplies the
    learning rate and the momentum of that SGD.

    Example:
        >>> optimizer = GEM(keras.optimizers.SGD(0.05, momentum=0.9), kappa=2.0)
        >>> optimizer.get_config()["kappa"]  # the workers together may have twice the energy of that SGD
        2.0
    """


@_registered
class AGN(mixins.AGNMixin[Any], Wrapper):
    """Accumulated gradient normalization: explore with plain SGD, push the mean of its gradients.

    See `nnlo_common.AGN`.

    Example:
        >>> optimizer = AGN(keras.optimizers.Adam(1e-3), every=15)
        >>> optimizer.get_config()["every"]  # gradients in each mean
        15
    """


@_registered
class DynSGD(mixins.DynSGDMixin[Any], Wrapper):
    """Staleness-aware SGD: your optimizer steps the centre; staler gradients are scaled down more.

    See `nnlo_common.DynSGD`.

    Example:
        >>> optimizer = DynSGD(keras.optimizers.SGD(0.1), every=2)
        >>> optimizer.get_config()["every"]
        2
    """


@_registered
class LocalSGD(mixins.LocalSGDMixin[Any], Wrapper):
    """Local SGD: your optimizer runs on each worker; after each round all take the mean of their weights.

    See `nnlo_common.LocalSGD`.

    Example:
        >>> optimizer = LocalSGD(keras.optimizers.SGD(0.1), every=8, warmup=100)
        >>> optimizer.get_config()["warmup"]  # the first 100 batches are each averaged
        100
    """


@_registered
class DiLoCo(mixins.DiLoCoMixin[Any], Wrapper):
    """DiLoCo: your optimizer makes local rounds; their mean displacement drives an outer Nesterov SGD.

    See `nnlo_common.DiLoCo`.

    Example:
        >>> optimizer = DiLoCo(keras.optimizers.AdamW(1e-3), every=50)
        >>> optimizer.get_config()["every"]
        50
    """
