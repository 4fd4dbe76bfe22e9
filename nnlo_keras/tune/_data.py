"""Data passed to `search`: this fold's samples, held-out ones, and this rank's share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import RankOptions, split
from nnlo_keras._hdf5 import Batches
from nnlo_keras._shard import shard

__all__ = ["Folds", "held_out", "shared"]

_NAMES = ("x", "y")  # as the first arguments of fit()


class Folds:
    """Splits samples into folds.

    Args:
        asked: the number of folds, or each fold's training and validation indices.

    Attributes:
        count: the number of folds.
        only: the number of the fold, if there is one that was given; else None.

    Example:
        >>> training, validation = Folds(3).split(6, 0, seed=0)
        >>> len(training), len(validation)
        (4, 2)
    """

    def __init__(self, asked: int | Iterable[tuple[Any, Any]]) -> None:
        self._asked = asked if isinstance(asked, int) else list(asked)
        self.count = self._asked if isinstance(self._asked, int) else len(self._asked)
        if not self.count:
            raise ConfigurationError("folds= has no fold; give a number, or each fold's indices")
        self.only = 0 if self.count == 1 and not isinstance(asked, int) else None

    def split(self, samples: int, fold: int, seed: int) -> tuple[Any, Any]:
        """Return the training and the validation indices of a fold.

        Args:
            samples: the number of samples.
            fold: the fold, from 0.
            seed: seeds the split, unless the indices are given.
        """
        if isinstance(self._asked, int):
            return split(samples, self._asked, fold, seed=seed)
        training, validation = map(np.asarray, self._asked[fold])
        if max(training.max(), validation.max()) >= samples:
            raise ConfigurationError(
                f"folds=: fold {fold} has index {max(training.max(), validation.max())}, but there are "
                f"{samples} samples; give indices from 0 to {samples - 1}"
            )
        return training, validation


def held_out(
    args: tuple[Any, ...], options: Mapping[str, Any], folds: Folds, fold: int | None, seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `fit` with the validation samples set apart.

    Args:
        args: the positional arguments of `search`.
        options: its keyword arguments.
        folds: the split into folds.
        fold: the fold to train; None: there are none.
        seed: seeds the split.
    """
    options = dict(options)
    part = options.pop("validation_split", 0.0)
    if fold is None and not part:
        return args, options
    asked = f"validation_split={part}" if fold is None else f"folds={folds.count}"
    if options.get("validation_data") is not None or (part and fold is not None):
        raise ConfigurationError(f"{asked} sets validation samples apart; leave other validation data out")
    given = _given(args, options)
    samples = _samples(given.get("x"), asked)
    if fold is None:  # like Keras: the last samples
        border = math.floor(samples * (1 - part))
        training, validation = np.arange(border), np.arange(border, samples)
    else:
        training, validation = folds.split(samples, fold, seed)
    places = ("x", "y", "sample_weight") if "sample_weight" in given else given  # Keras tells them by these
    options["validation_data"] = tuple(
        _taken(given[name], validation) if name in given else None for name in places
    )
    return _put(args, options, {name: _taken(value, training) for name, value in given.items()})


def shared(
    args: tuple[Any, ...], options: Mapping[str, Any], ranks: RankOptions
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `fit` with this rank's part of the samples."""
    given = _given(args, options)
    if isinstance(given.get("x"), Batches):
        raise ConfigurationError(
            "search() was given Batches made before the ranks of a block were known; make it in the "
            "fit() of a HyperModel, and give MPITuner shard=False"
        )
    if not given:
        return args, dict(options)
    parts = shard(*given.values(), servers=ranks.servers, group_size=ranks.group_size)
    parts = parts if len(given) > 1 else (parts,)
    return _put(args, options, dict(zip(given, parts, strict=True)))


def _given(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features, targets and weights that were given."""
    found = dict(zip(_NAMES, args, strict=False))
    names = (*_NAMES, "sample_weight")
    found |= {name: options[name] for name in names if options.get(name) is not None}
    return {name: value for name, value in found.items() if value is not None}


def _put(
    args: tuple[Any, ...], options: Mapping[str, Any], parts: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with these values in their places."""
    placed = [parts.get(name, value) for name, value in zip(_NAMES, args, strict=False)]
    kept = {name: parts.get(name, value) for name, value in options.items()}
    return (*placed, *args[len(placed) :]), kept


def _samples(features: Any, asked: str) -> int:
    leaves = [] if features is None else keras.tree.flatten(features)
    if not leaves or not all(getattr(leaf, "shape", ()) for leaf in leaves):
        raise ConfigurationError(
            f"{asked} needs arrays to take samples from, not a {type(features).__name__}"
        )
    return int(leaves[0].shape[0])


def _taken(data: Any, indices: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: np.asarray(leaf)[indices], data)
