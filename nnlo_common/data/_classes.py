"""Classes of the samples: one value for each, and what makes all of them come equally often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, plural
from nnlo_common.data._source import Array

__all__ = ["evenly", "value_of_each"]

# Read rows of one-hot labels in pieces and keep only their classes.
_PIECE = 1 << 16
_MOST_CLASSES, _MOST_TIMES = 1000, 10_000


class _Valued(Protocol):
    """A source of samples whose only features are the values."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, start: int, stop: int) -> Any:
        """Return the samples [start, stop) as a batch."""


def value_of_each(source: _Valued, asked: str) -> Array:
    """Return one value for each sample, of one-hot rows the class.

    Args:
        source: of the values.
        asked: the option and the name that it has, for errors.

    Raises:
        ConfigurationError: a sample has more than one value.
    """
    starts = range(0, len(source), _PIECE)
    return np.concatenate([_values(source, start, asked) for start in starts])


def _values(source: _Valued, start: int, asked: str) -> Array:
    (rows,) = source.take(start, min(start + _PIECE, len(source)))
    if isinstance(rows, tuple):
        raise ConfigurationError(
            f"{asked} is a group of {len(rows)} datasets; name a dataset with one value for each sample"
        )
    values: Array = rows
    if values.ndim == 2 and values.shape[1] > 1 and _one_hot(values):
        return np.asarray(values.argmax(1))
    if values.shape not in {(len(values),), (len(values), 1)}:
        raise ConfigurationError(
            f"{asked} has rows of shape {list(values.shape[1:])}, which are not one-hot; name a dataset with "
            "one value for each sample"
        )
    return values.reshape(-1)


def _one_hot(rows: Array) -> bool:
    return bool(np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all())


def evenly(values: Array, asked: str) -> Iterator[npt.NDArray[np.int64]]:
    """Yield rising numbers of samples, first all of them, then those of rare classes again and again.

    Together each class has as many as the largest; the samples of a class differ by at most one in how often
    they come.

    Args:
        values: the class of each sample.
        asked: the option and the name that it has, for errors.

    Raises:
        ConfigurationError: these are no classes, or one is so rare that it could only be learnt by heart.

    Example:
        >>> [one.tolist() for one in evenly(np.array([0, 0, 1, 0, 1, 0, 0]), "balance='label'")]
        [[0, 1, 2, 3, 4, 5, 6], [2, 4], [2]]
    """
    classes, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    with np.errstate(invalid="ignore"):
        whole = np.isfinite(classes) & (np.floor(classes) == classes)
    if len(classes) > _MOST_CLASSES or not whole.all():
        example = classes[int(whole.argmin())]
        raise ConfigurationError(
            f"{asked} has {plural(len(classes), 'different value')}, such as {example}: these are no "
            "classes; name the column of the classes, which are whole numbers"
        )
    times, more = np.divmod(counts.max(), counts)
    if (rarest := times.max()) > _MOST_TIMES:
        index = int(times.argmax())
        raise ConfigurationError(
            f"{asked}: {plural(int(counts[index]), 'sample')} of {len(values)} with the value "
            f"{classes[index]} would come {rarest} times; leave it out by select=, or give it a weight"
        )
    # The place of each sample among those of its class; `more` of these, evenly spread, come once more.
    order = np.argsort(which, kind="stable")
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    once_more = place * more[which] % counts[which] < more[which]
    left, wanted = np.arange(len(values)), times[which] + once_more
    while len(left):
        yield left
        again = wanted > 1
        left, wanted = left[again], wanted[again] - 1
