"""Standardisation of features: mean 0 and spread 1, by numbers that belong to the model from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_JSON, parsed_json
from nnlo_common.data._source import Array

__all__ = ["STANDARD", "Moments", "Standard", "as_lists", "changed_leaves", "from_lists", "leaves_of"]

#: The file of the numbers, in the folder of a run.
STANDARD = "standard.json"
_Floats = npt.NDArray[np.float64]


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of the finite numbers in each column of an input.

    Example:
        >>> moments = Moments.of(np.array([[1.0, 5.0], [3.0, 5.0]]))
        >>> moments.mean.tolist(), moments.spread.tolist()
        ([2.0, 5.0], [1.0, 0.0])
    """

    count: _Floats
    mean: _Floats
    squares: _Floats

    @classmethod
    def of(cls, array: Array, mask: Array | None = None) -> Moments:
        """Return those of an array: of each column of its last axis; of entries that `mask` leaves."""
        rows = array if mask is None else array[mask]
        columns = rows.shape[-1] if array.ndim > 1 and not (mask is not None and array.ndim == 2) else 1
        numbers = np.asarray(rows, np.float64).reshape(-1, columns)
        there = np.isfinite(numbers)
        count = there.sum(axis=0).astype(np.float64)
        safe = np.maximum(count, 1)
        numbers = np.where(there, numbers, 0.0)
        mean = numbers.sum(axis=0) / safe
        return cls(count, mean, (np.where(there, numbers - mean, 0.0) ** 2).sum(axis=0))

    def add(self, other: Moments) -> Moments:
        """Return those of both together (Chan et al. 1983)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        part = other.count / np.maximum(count, 1)
        squares = self.squares + other.squares + apart**2 * self.count * part
        return Moments(count, self.mean + apart * part, squares)

    @property
    def spread(self) -> _Floats:
        """The standard deviation."""
        found: _Floats = np.sqrt(self.squares / np.maximum(self.count, 1))
        return found


class Standard:
    """Mean and spread of the inputs of a model, to train and predict with the same.

    A number becomes (number - mean) / spread; where the spread is 0, number - mean. An input of samples with
    several axes has a mean for each column of the last one. Zeros that fill up rows of unequal length do not
    count, and stay zero. True and false stay, too.

    Args:
        inputs: the moments of each input, in the order of the batch; None: it stays as it is.

    Example:
        >>> standard = Standard([Moments.of(np.array([1.0, 3.0]))])
        >>> standard.applied(np.array([1.0, 3.0, 5.0]))
        array([-1.,  1.,  3.], dtype=float32)
    """

    def __init__(self, inputs: Sequence[Moments | None]) -> None:
        self._inputs = list(inputs)
        self._numbers = [None if one is None else _numbers(one) for one in inputs]

    @classmethod
    def measured(cls, parts: Sequence[Sequence[Moments | None]]) -> Standard:
        """Return the standard of samples in several parts, in this order on all ranks."""
        known = [part for part in parts if part]  # a rank may have got no samples
        if not known:
            raise ConfigurationError(
                "there are no samples to take mean and spread of; name files with samples"
            )
        found: list[Moments | None] = list(known[0])
        for part in known[1:]:
            found = [
                None if one is None or other is None else one.add(other)
                for one, other in zip(found, part, strict=True)
            ]
        return cls(found)

    def applied(self, features: Any, masks: Sequence[Array | None] = ()) -> Any:
        """Return the features of a batch in units of the spread.

        Args:
            features: an array, or a structure of them.
            masks: which entries are no filling, for each of them.

        Raises:
            ConfigurationError: there are other inputs than those that it was made of.
        """
        leaves = leaves_of(features)
        if len(leaves) != len(self._numbers):
            raise ConfigurationError(
                f"mean and spread were taken of {len(self._numbers)} inputs, but the batch has "
                f"{len(leaves)}; read the same columns as in the training"
            )
        masked = [*masks, *[None] * (len(leaves) - len(masks))]
        made = iter(
            [
                _scaled(leaf, numbers, mask)
                for leaf, numbers, mask in zip(leaves, self._numbers, masked, strict=True)
            ]
        )
        return changed_leaves(features, lambda _: next(made))

    def state(self) -> list[Any]:
        """Return it for a file of JSON."""
        return [
            None
            if one is None
            else {"mean": one.mean.tolist(), "spread": one.spread.tolist(), "count": one.count.tolist()}
            for one in self._inputs
        ]

    @classmethod
    def load(cls, path: str | Path) -> Standard:
        """Return the standard in a file.

        Raises:
            ConfigurationError: it cannot be read, or is none.
        """
        try:
            found = parsed_json(read_whole(path, LARGEST_JSON))
            return cls([_moments(one) for one in found["features"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} has no mean and spread of features ({error}); name the file {STANDARD} of a run"
            ) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Standard) and self.state() == other.state()

    def __hash__(self) -> int:
        return hash(str(self.state()))


def as_lists(inputs: Sequence[Moments | None]) -> list[Any]:
    """Return moments as JSON can have them, exactly."""
    return [
        None if one is None else [one.count.tolist(), one.mean.tolist(), one.squares.tolist()]
        for one in inputs
    ]


def from_lists(found: Sequence[Any]) -> list[Moments | None]:
    """Return the moments of `as_lists`."""
    return [
        None if one is None else Moments(*(np.asarray(part, np.float64) for part in one)) for one in found
    ]


def leaves_of(features: Any) -> list[Any]:
    """Return the arrays of a structure, in order."""
    if isinstance(features, Mapping):
        features = list(features.values())
    if isinstance(features, list | tuple):
        return [leaf for one in features for leaf in leaves_of(one)]
    return [features]


def changed_leaves(features: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure with each of its arrays changed."""
    if isinstance(features, Mapping):
        return {name: changed_leaves(one, change) for name, one in features.items()}
    if isinstance(features, list | tuple):
        return type(features)(changed_leaves(one, change) for one in features)
    return change(features)


def _numbers(moments: Moments) -> tuple[Array, Array]:
    """Return mean and scale as they are used."""
    spread = moments.spread
    scale = np.divide(1.0, spread, out=np.ones_like(spread), where=spread > 0)
    return moments.mean.astype(np.float32), scale.astype(np.float32)


def _scaled(leaf: Any, numbers: tuple[Array, Array] | None, mask: Array | None) -> Any:
    if numbers is None:
        return leaf
    mean, scale = numbers
    columns = leaf.shape[-1] if leaf.ndim > 1 else 1
    if len(mean) not in (1, columns):
        raise ConfigurationError(
            f"mean and spread were taken of {len(mean)} columns, but the batch has {columns}; read the same "
            "columns as in the training"
        )
    made = (leaf.astype(np.float32) - mean) * scale
    if mask is not None:
        made[~mask] = 0
    return made


def _moments(found: Any) -> Moments | None:
    if found is None:
        return None
    count, mean, spread = (np.asarray(found[name], np.float64) for name in ("count", "mean", "spread"))
    arrays = (count, mean, spread)
    if not len(mean) or any(one.shape != (len(mean),) or not np.isfinite(one).all() for one in arrays):
        raise ValueError("mean, spread and count are lists of as many finite numbers")
    return Moments(count, mean, spread**2 * count)
