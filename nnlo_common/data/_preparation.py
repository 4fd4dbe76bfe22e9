"""Preparation of samples: measured on those to train on, kept with the model, applied to all that it gets.

A kind is a class here, which `PREPARATIONS` names, and an option of that name of `FileSource` and of
`nnlo train`.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._arguments import whole_in
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_JSON, parsed_json
from nnlo_common.data._ledger import Range
from nnlo_common.data._source import Array

__all__ = [
    "PREPARATIONS",
    "STATISTICS",
    "TEXTS_STAY",
    "Coder",
    "Counts",
    "Moments",
    "NewValues",
    "Preparation",
    "Quantiles",
    "Standard",
    "StatisticsName",
    "Vocabulary",
    "as_lists",
    "changed_leaves",
    "check_size",
    "coder_of",
    "from_lists",
    "leaves_of",
    "texts_of",
    "together",
]

_Floats = npt.NDArray[np.float64]


class Preparation(Protocol):
    """What is measured on the samples to train on, kept with the model, and applied to all that it gets.

    Attributes:
        file: where it is kept, in the folder of a run.
    """

    file: ClassVar[str]

    @staticmethod
    def part(source: Any, pieces: Sequence[Range], asked: Any) -> list[Any]:
        """Return what some pieces of the samples tell, as JSON can have it.

        Args:
            source: a `FileSource` of the samples to train on.
            pieces: of them.
            asked: the value of the option.
        """

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[Any]], asked: Any) -> Self:
        """Return it, of the parts of all ranks in their order.

        Raises:
            ConfigurationError: the samples do not tell it.
        """

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the one in a file.

        Raises:
            ConfigurationError: it cannot be read, or is none.
        """

    def kept(self) -> dict[str, Any]:
        """Return what its file has."""

    def mark(self) -> str:
        """Return a short text, the same for all that do the same to samples."""


# -- standardisation of features: middle 0 and spread 1 ------------------------------------------------


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
        numbers = _columns(array, mask)
        there = np.isfinite(numbers)
        count = there.sum(axis=0).astype(np.float64)
        safe = np.maximum(count, 1)
        first = np.zeros(numbers.shape[1])
        if len(numbers):  # sums of what is left beside it are exact where a column is constant
            first = np.where(count, numbers[there.argmax(axis=0), np.arange(len(first))], 0.0)
        apart = np.where(there, numbers - first, 0.0)
        mean = apart.sum(axis=0) / safe
        return cls(count, first + mean, (np.where(there, apart - mean, 0.0) ** 2).sum(axis=0))

    @classmethod
    def together(cls, parts: Sequence[Moments]) -> Moments:
        """Return those of all parts together."""
        return reduce(cls._add, parts)

    def _add(self, other: Moments) -> Moments:
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


# The shares of a normal distribution below its mean, and within one standard deviation below and above.
_LOWER, _MIDDLE, _UPPER = 0.15865525393145707, 0.5, 0.8413447460685429
# Numbers that stand for a column at most; fewer in a message, which has 64 parts of the samples.
_POINTS, _SENT_POINTS = 4097, 257


@dataclass
class Quantiles:
    """Count of the finite numbers in each column of an input, and some, sorted, that stand for them.

    Up to a few hundred numbers all are kept; of more, quantiles at equal distances. The middle is then the
    median, and the spread half the distance of those quantiles that are two standard deviations apart where
    numbers are normal, so that a few far ones change nothing.

    Example:
        >>> found = Quantiles.of(np.array([*range(99), 1e9]))
        >>> found.mean.tolist(), round(found.spread.item(), 1)
        ([49.5], 34.1)
    """

    count: _Floats
    points: list[_Floats]

    @classmethod
    def of(cls, array: Array, mask: Array | None = None) -> Quantiles:
        """Return those of an array: of each column of its last axis; of entries that `mask` leaves."""
        found = [column[np.isfinite(column)] for column in _columns(array, mask).T]
        return cls(np.array([len(one) for one in found], np.float64), [_thinned([one]) for one in found])

    @classmethod
    def together(cls, parts: Sequence[Quantiles]) -> Quantiles:
        """Return those of all parts together."""
        columns = zip(*(one.points for one in parts), strict=True)
        counts = np.array([one.count for one in parts])
        points = [_thinned(some, weights) for some, weights in zip(columns, counts.T, strict=True)]
        return cls(counts.sum(axis=0), points)

    def thinned(self, most: int) -> Quantiles:
        """Return them with so many points at most."""
        return Quantiles(self.count, [_thinned([one], most=most) for one in self.points])

    def at(self, share: float) -> _Floats:
        """Return the number in each column that this share of all is below; 0 of none."""
        found = [np.interp(share, _places(len(one)), one) if len(one) else 0.0 for one in self.points]
        return np.array(found, np.float64)

    @property
    def mean(self) -> _Floats:
        """The median."""
        return self.at(_MIDDLE)

    @property
    def spread(self) -> _Floats:
        """Half the distance between the quantiles at 16 % and 84 %."""
        return (self.at(_UPPER) - self.at(_LOWER)) / 2


def _places(points: int) -> _Floats:
    """Return the shares of a column that are below its sorted points."""
    found: _Floats = (np.arange(points) + 0.5) / points
    return found


def _thinned(parts: Sequence[_Floats], counts: _Floats | None = None, most: int = _POINTS) -> _Floats:
    """Return sorted numbers that stand for those of several parts.

    Args:
        parts: the points of each.
        counts: of the numbers that each part stands for; None: of its points.
        most: the number of points, at most.
    """
    numbers = np.concatenate([*parts])
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    whole = counts is None or all(len(one) == count for one, count in zip(parts, counts, strict=True))
    if whole and len(numbers) <= most:
        return numbers
    each = [1.0] * len(parts) if counts is None else counts / [max(len(one), 1) for one in parts]
    weights = np.repeat(each, [len(one) for one in parts])[order]
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    found: _Floats = np.interp(_places(min(most, len(numbers))), places, numbers)
    return found


def _columns(array: Array, mask: Array | None) -> _Floats:
    """Return the numbers of an array as a table: with a column for each of its last axis."""
    rows = array if mask is None else array[mask]
    columns = rows.shape[-1] if array.ndim > 1 and not (mask is not None and array.ndim == 2) else 1
    return np.asarray(rows, np.float64).reshape(-1, columns)


Statistics: TypeAlias = Moments | Quantiles
StatisticsName: TypeAlias = Literal["spread", "quantiles"]
#: What numbers can be brought to 0 and 1 by.
STATISTICS: Mapping[StatisticsName, type[Statistics]] = {"spread": Moments, "quantiles": Quantiles}


class Standard:
    """Mean and spread of the inputs of a model, to train and predict with the same.

    A number becomes (number - mean) / spread; where the spread is 0, number - mean. With `Quantiles` the
    median takes the place of the mean. An input of samples with several axes has a mean for each column of
    the last one. Zeros that fill up rows of unequal length do not
    count, and stay zero. True and false stay, too.

    Args:
        inputs: moments or quantiles of each input, in the order of the batch; None: it stays as it is.

    Example:
        >>> standard = Standard([Moments.of(np.array([1.0, 3.0]))])
        >>> standard.applied(np.array([1.0, 3.0, 5.0]))
        array([-1.,  1.,  3.], dtype=float32)
    """

    file: ClassVar[str] = "standard.json"

    def __init__(self, inputs: Sequence[Statistics | None]) -> None:
        self._inputs = list(inputs)
        self._numbers = [None if one is None else _numbers(one) for one in inputs]

    @staticmethod
    def part(source: Any, pieces: Sequence[Range], asked: StatisticsName) -> list[Any]:
        """Return the statistics of each piece: added up one by one, they have the same bits for any ranks."""
        return [as_lists(source.statistics(*piece, asked)) for piece in pieces]

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[Any]], asked: StatisticsName) -> Standard:  # noqa: ARG003
        """Return the standard of the parts of all ranks."""
        return cls.measured([from_lists(piece) for part in parts for piece in part])

    @classmethod
    def measured(cls, parts: Sequence[Sequence[Statistics | None]]) -> Standard:
        """Return the standard of samples in several parts, in this order on all ranks."""
        known = [part for part in parts if part]  # a rank may have got no samples
        if not known:
            raise ConfigurationError(
                "there are no samples to take mean and spread of; name files with samples"
            )
        return cls(together(known))

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

    def kept(self) -> dict[str, Any]:
        """Return what its file has."""
        return {"features": self.state()}

    def mark(self) -> str:
        """Return a short text, the same for all with the same mean and spread."""
        rounded = [one and [part.astype(np.float32).tolist() for part in one] for one in self._numbers]
        return _marked(rounded)

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
                f"{path} has no mean and spread of features ({error}); name the file {cls.file} of a run"
            ) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Standard) and self.state() == other.state()

    def __hash__(self) -> int:
        return hash(str(self.state()))


def together(parts: Sequence[Sequence[Statistics | None]]) -> list[Statistics | None]:
    """Return the statistics of each input of several parts of the samples, in this order on all ranks."""

    def of_input(some: Sequence[Any]) -> Statistics | None:
        if any(one is None for one in some):
            return None
        found: Statistics = type(some[0]).together(some)
        return found

    return [of_input(some) for some in zip(*parts, strict=True)]


def as_lists(inputs: Sequence[Statistics | None]) -> list[Any]:
    """Return statistics as JSON can have them: moments exactly, of quantiles some hundred for each column."""
    found = list[Any]()
    for one in inputs:
        if isinstance(one, Quantiles):
            points = one.thinned(_SENT_POINTS).points
            found.append({"count": one.count.tolist(), "points": [some.tolist() for some in points]})
        else:
            found.append(
                None if one is None else [part.tolist() for part in (one.count, one.mean, one.squares)]
            )
    return found


def from_lists(found: Sequence[Any]) -> list[Statistics | None]:
    """Return the statistics of `as_lists`."""

    def read(one: Any) -> Statistics | None:
        if one is None:
            return None
        if isinstance(one, dict):
            points = [np.asarray(some, np.float64) for some in one["points"]]
            return Quantiles(np.asarray(one["count"], np.float64), points)
        return Moments(*(np.asarray(part, np.float64) for part in one))

    return [read(one) for one in found]


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


# Less than this part of the mean is what rounding leaves of the spread of a constant column.
_NO_SPREAD = 1e-12


def _numbers(statistics: Statistics) -> tuple[_Floats, Array]:
    """Return mean and scale as they are used."""
    mean, spread = statistics.mean, statistics.spread
    scale = np.divide(1.0, spread, out=np.ones_like(spread), where=spread > _NO_SPREAD * abs(mean))
    return mean, scale.astype(np.float32)


def _scaled(leaf: Any, numbers: tuple[_Floats, Array] | None, mask: Array | None) -> Any:
    if numbers is None:
        return leaf
    mean, scale = numbers
    columns = leaf.shape[-1] if leaf.ndim > 1 else 1
    if len(mean) not in (1, columns):
        raise ConfigurationError(
            f"mean and spread were taken of {len(mean)} columns, but the batch has {columns}; read the same "
            "columns as in the training"
        )
    if leaf.dtype.itemsize > 4 or (leaf.dtype.kind in "iu" and leaf.dtype.itemsize == 4):
        made = ((leaf - mean) * scale).astype(np.float32)  # float32 may not tell it from its mean
    else:
        made = (leaf.astype(np.float32) - mean.astype(np.float32)) * scale
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


# -- vocabularies: indices for the values in columns of categories --------------------------------------

# Values of a column unless it is asked for more, and at most; one for each sample is no category.
_MOST_VALUES, _LARGEST_VOCABULARY = 10_000, 1_000_000
_LONGEST_TEXT = 1000
_NUMBERS = "biu"

#: A category.
Value: TypeAlias = str | int
#: How often each value comes, by column; None stands for all that a vocabulary does not know.
Counts: TypeAlias = dict[str, dict[Value | None, int]]
_Indices: TypeAlias = npt.NDArray[np.int64]


class Coder(Protocol):
    """What turns the values of columns into indices."""

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns."""

    def indices(self, column: str, values: Array) -> _Indices:
        """Return the index of each value."""

    def values_of(self, column: str) -> Sequence[Value | None]:
        """Return the value of each index."""


class NewValues:
    """Indices of the values of columns as they come, to count them before there is a vocabulary.

    Args:
        asked: names of columns; ``pid:50000`` allows for so many different values, not 10 000.

    Attributes:
        most: how many different values each column may have.

    Example:
        >>> values = NewValues(["pid"])
        >>> values.indices("pid", np.array([211, -13, 211])).tolist(), values.values_of("pid")
        ([2, 1, 2], [None, -13, 211])
    """

    def __init__(self, asked: Sequence[str]) -> None:
        self.most = dict(map(_with_limit, asked))
        self.begin()

    def begin(self) -> None:
        """Forget all values."""
        self._known: dict[str, dict[Value, int]] = {column: {} for column in self.most}

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns."""
        return [*self.most]

    def indices(self, column: str, values: Array) -> _Indices:
        """Return the index of each value: new ones have indices after all that came before."""
        known = self._known[column]
        if values.dtype.kind in _NUMBERS:
            some, place = np.unique(values, return_inverse=True)
            found = [known.setdefault(int(one), len(known) + 1) for one in some]
            return np.asarray(found, np.int64)[place.reshape(values.shape)]
        texts = texts_of(values)
        if (longest := max(map(len, texts), default=0)) > _LONGEST_TEXT:
            raise ConfigurationError(
                f"a text of {longest} characters is no category, which has up to {_LONGEST_TEXT}; leave "
                f"{column!r} out of vocabulary= (--vocabulary)"
            )
        numbers = [known.setdefault(one, len(known) + 1) for one in texts]
        return np.asarray(numbers, np.int64).reshape(values.shape)

    def values_of(self, column: str) -> Sequence[Value | None]:
        """Return the value of each index."""
        return [None, *self._known[column]]


class Vocabulary:
    """Indices of the values in columns of categories: texts, or whole numbers such as types of particles.

    The values of a column become 1, 2, 3 and so on in rising order; any other becomes 0. They are ordered by
    value and not by how often they come, so that samples with the same values have the same indices: those
    of another fold, or of a second training that begins with these weights.

    Args:
        columns: the values of each column, and how often they came in the samples to train on.

    Example:
        >>> vocabulary = Vocabulary.measured([{"pid": {211: 3, -13: 1}}, {"pid": {22: 5}}])
        >>> vocabulary.values_of("pid"), vocabulary.indices("pid", np.array([22, 211, 5])).tolist()
        ([None, -13, 22, 211], [2, 3, 0])
    """

    file: ClassVar[str] = "vocabulary.json"

    def __init__(self, columns: Mapping[str, Mapping[Any, int]]) -> None:
        self._counts = {name: {one: some[one] for one in sorted(some)} for name, some in columns.items()}
        self._known = {name: [*some] for name, some in self._counts.items()}
        self._places = {
            name: dict(zip(some, range(1, len(some) + 1), strict=True)) for name, some in self._known.items()
        }
        self._of_type: dict[tuple[str, str], tuple[int, Array]] = {}

    @classmethod
    def measured(cls, parts: Sequence[Counts], most: int | Mapping[str, int] = _MOST_VALUES) -> Vocabulary:
        """Return the vocabulary of samples in several parts, of `FileSource.values`.

        Args:
            parts: how often each value comes in them.
            most: how many different values a column may have: each, or by name.

        Raises:
            ConfigurationError: a column has more, both texts and numbers, or no values at all.
        """
        found: dict[str, Counter[Any]] = {}
        for part in parts:
            for name, counts in part.items():
                found.setdefault(name, Counter()).update(counts)
        for name, values in found.items():
            limit = most if isinstance(most, int) else most[name]
            check_size(name, values, limit)
            if not values or len({isinstance(one, str) for one in values}) > 1:
                what = "both texts and numbers" if values else "no values"
                raise ConfigurationError(
                    f"the column {name!r} of vocabulary= (--vocabulary) has {what} in the samples to train "
                    "on; make the files again, or leave it out"
                )
        if not found:
            raise ConfigurationError("there are no samples to take values of; name files with samples")
        return cls(found)

    @staticmethod
    def part(source: Any, pieces: Sequence[Range], asked: Sequence[str]) -> list[Any]:
        """Return how often each value comes in all pieces together: counts are exact in any order."""
        found: dict[str, Counter[Any]] = {}
        most = dict(map(_with_limit, asked))
        for piece in pieces:
            for name, counts in source.values(*piece).items():
                found.setdefault(name, Counter()).update(counts)
                check_size(name, found[name], most[name])
        return [[name, [*map(list, counts.items())]] for name, counts in found.items()]

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[Any]], asked: Sequence[str]) -> Vocabulary:
        """Return the vocabulary of the parts of all ranks."""
        counts: list[Counts] = [{name: dict(some) for name, some in part} for part in parts]
        return cls.measured(counts, dict(map(_with_limit, asked)))

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns."""
        return [*self._known]

    def values_of(self, column: str) -> Sequence[Value | None]:
        """Return the value of each index, from 0; that has none."""
        return [None, *self._known[column]]

    def indices(self, column: str, values: Array) -> _Indices:
        """Return the index of each value.

        Raises:
            ConfigurationError: the column has texts, and had numbers in the training, or the other way round.
        """
        numbers = values.dtype.kind in _NUMBERS
        if numbers == isinstance(self._known[column][0], str):
            now, then = ("whole numbers", "texts") if numbers else ("texts", "whole numbers")
            raise ConfigurationError(
                f"it has {now}, but had {then} in the training; read the same column as there"
            )
        if not numbers:
            place = self._places[column].get
            found = np.asarray([place(one, 0) for one in texts_of(values)], np.int64)
            return found.reshape(values.shape)
        values = values.astype(np.uint8) if values.dtype.kind == "b" else values
        before, known = self._as_type(column, values.dtype)
        if not len(known):
            return np.zeros(values.shape, np.int64)
        places = np.minimum(np.searchsorted(known, values), len(known) - 1)
        return np.where(known[places] == values, places + (1 + before), 0)

    def __repr__(self) -> str:
        return f"Vocabulary({self._known})"

    def kept(self) -> dict[str, Any]:
        """Return what its file has."""
        columns = {
            name: {"values": [*counts], "counts": [*counts.values()]} for name, counts in self._counts.items()
        }
        return {"columns": columns}

    def mark(self) -> str:
        """Return a short text, the same for all with the same values, however often these come."""
        return _marked(sorted(self._known.items()))

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Return the vocabulary in a file.

        Raises:
            ConfigurationError: it cannot be read, or is none.
        """
        try:
            found = parsed_json(read_whole(path, LARGEST_JSON))
            return cls({name: _kept_counts(**one) for name, one in found["columns"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} has no values of columns ({error}); name the file {cls.file} of a run, or give a "
                "list of columns to measure"
            ) from None

    def _as_type(self, column: str, dtype: np.dtype[Any]) -> tuple[int, Array]:
        """Return the values that a type of whole numbers can have, and how many are below them."""
        key = column, dtype.str
        if key not in self._of_type:
            known: list[Any] = self._known[column]
            limits = np.iinfo(dtype)
            low, high = bisect_left(known, limits.min), bisect_right(known, limits.max)
            self._of_type[key] = low, np.array(known[low:high], dtype)
        return self._of_type[key]


#: Given as the vocabulary of a source, it lets texts be read as they are: of classes, or of groups.
TEXTS_STAY = Vocabulary({})


def coder_of(vocabulary: Vocabulary | Sequence[str] | str | Path | None) -> Coder:
    """Return what turns columns into indices; without a vocabulary, none."""
    if isinstance(vocabulary, Vocabulary):
        return vocabulary
    if isinstance(vocabulary, str | Path):
        return Vocabulary.load(vocabulary)
    names = list(vocabulary or ())
    if not all(isinstance(one, str) and one.strip("/") for one in names):
        raise ConfigurationError(
            f"vocabulary={vocabulary!r:.80}: give a Vocabulary, the file of one, or a list of columns"
        )
    return NewValues(names) if names else Vocabulary({})


def check_size(column: str, values: Mapping[Any, int], most: int) -> None:
    """Refuse a column with more different values than it may have."""
    if len(values) > most:
        example = next(iter(values))
        raise ConfigurationError(
            f"the column {column!r} of vocabulary= (--vocabulary) has more than {most} different values, "
            f"such as {example!r:.60}; if they are categories, write {column}:N to allow N; else leave it out"
        )


def _with_limit(asked: str) -> tuple[str, int]:
    """Return the name of a column, and how many values it may have."""
    name, colon, number = asked.rpartition(":")
    if not (colon and name and number.isdecimal()):
        return asked.strip("/"), _MOST_VALUES
    limit = whole_in(number)
    if limit is None or not 1 <= limit <= _LARGEST_VOCABULARY:
        raise ConfigurationError(
            f"vocabulary={asked!r:.40} (--vocabulary): give a limit from 1 to {_LARGEST_VOCABULARY} "
            "different values"
        )
    return name.strip("/"), limit


def texts_of(values: Array) -> list[str]:
    """Return the texts of an array, one after the other."""
    found: list[Any] = values.reshape(-1).tolist()
    kinds = set(map(type, found))
    if kinds <= {str}:
        return found
    if not kinds <= {str, bytes}:
        other = next(one for one in found if not isinstance(one, str | bytes))
        raise ConfigurationError(f"a value is {other!r:.60}, which is no text; fill or drop it")
    return [one.decode() if isinstance(one, bytes) else str(one) for one in found]


def _marked(state: Any) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:12]


def _kept_counts(values: list[Any], counts: list[Any]) -> dict[Any, int]:
    """Return how often each value came, as a file has it."""
    kinds = {type(one) for one in values}
    if not values or len(kinds) > 1 or not kinds <= {str, int} or {type(one) for one in counts} != {int}:
        raise ValueError("values are texts or whole numbers, and counts whole numbers")
    found = dict(zip(values, counts, strict=True))
    if len(found) < len(values):
        raise ValueError("a value comes twice")
    return found


#: The kinds by the option that asks for them, in the order in which they are measured.
PREPARATIONS: Mapping[str, type[Preparation]] = {"vocabulary": Vocabulary, "standardize": Standard}
