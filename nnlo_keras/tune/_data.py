"""Data of `search`: this fold's samples, held-out ones, and this rank's share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import split
from nnlo_keras._hdf5 import H5Sequence
from nnlo_keras._shard import shard

__all__ = ["Folds", "held_out", "shared"]

_NAMES = ("x", "y")  # as the first arguments of fit()


class Folds:
    """How samples are split into folds.

    Args:
        asked: how many, or the indices of the training and of the validation samples of each.

    Attributes:
        count: how many there are.

    Example:
        >>> training, validation = Folds(3).split(6, 0, seed=0)
        >>> len(training), len(validation)
        (4, 2)
    """

    def __init__(self, asked: int | Sequence[tuple[Any, Any]]) -> None:
        self._asked = asked
        self.count = asked if isinstance(asked, int) else len(asked)

    def split(self, samples: int, fold: int, seed: int) -> tuple[Any, Any]:
        """Return the indices of the training and of the validation samples of a fold.

        Args:
            samples: how many there are.
            fold: which fold.
            seed: of the splitting, where the indices are not given.
        """
        if isinstance(self._asked, int):
            return split(samples, self._asked, fold, seed=seed)
        training, validation = map(np.asarray, self._asked[fold])
        if max(training.max(), validation.max()) >= samples:
            raise ConfigurationError(
                f"folds=: fold {fold} names sample {max(training.max(), validation.max())} of {samples}"
            )
        return training, validation


def held_out(
    args: tuple[Any, ...], options: Mapping[str, Any], folds: Folds, fold: int | None, seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `fit` with the validation samples set apart.

    Args:
        args: as given to `search`.
        options: the same, by name.
        folds: how samples are split.
        fold: which fold trains; None: there are none.
        seed: of the splitting.
    """
    options = dict(options)
    part = options.pop("validation_split", 0.0)
    if fold is None and not part:
        return args, options
    asked = f"validation_split={part}" if fold is None else f"folds={folds.count}"
    if options.get("validation_data") is not None or (part and fold is not None):
        raise ConfigurationError(f"{asked} holds samples back, so leave other validation data out")
    given = _given(args, options)
    samples = _samples(given.get("x"), asked)
    if fold is None:  # as Keras does: the last ones
        border = math.floor(samples * (1 - part))
        training, validation = np.arange(border), np.arange(border, samples)
    else:
        training, validation = folds.split(samples, fold, seed)
    held = [_taken(given[name], validation) for name in ("x", "y", "sample_weight") if name in given]
    options["validation_data"] = tuple(held)
    return _put(args, options, {name: _taken(value, training) for name, value in given.items()})


def shared(
    args: tuple[Any, ...], options: Mapping[str, Any], servers: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `fit` with this rank's part of the samples."""
    given = _given(args, options)
    if isinstance(given.get("x"), H5Sequence):
        raise ConfigurationError(
            "search() was given an H5Sequence, which was made before the ranks of a block were known; make "
            "it in the fit() of a HyperModel, and give MPITuner shard=False"
        )
    if not given:
        return args, dict(options)
    parts = shard(*given.values(), servers=servers)
    parts = parts if len(given) > 1 else (parts,)
    return _put(args, options, dict(zip(given, parts, strict=True)))


def _given(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what there is of features, targets and weights."""
    found = dict(zip(_NAMES, args, strict=False))
    names = (*_NAMES, "sample_weight")
    found |= {name: options[name] for name in names if options.get(name) is not None}
    return {name: value for name, value in found.items() if value is not None}


def _put(
    args: tuple[Any, ...], options: Mapping[str, Any], parts: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with these values, each where it was."""
    placed = [parts.get(name, value) for name, value in zip(_NAMES, args, strict=False)]
    kept = {name: parts.get(name, value) for name, value in options.items()}
    return (*placed, *args[len(placed) :]), kept


def _samples(features: Any, asked: str) -> int:
    leaves = [] if features is None else keras.tree.flatten(features)
    if not leaves or not all(getattr(leaf, "shape", ()) for leaf in leaves):
        raise ConfigurationError(
            f"{asked} needs arrays, not a {type(features).__name__}, of which samples cannot be taken"
        )
    return int(leaves[0].shape[0])


def _taken(data: Any, indices: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: np.asarray(leaf)[indices], data)
