"""Items of a batch: what the columns of features, labels and weights become."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, plural
from nnlo_common.base._spans import stage
from nnlo_common.data._preparation import Standard
from nnlo_common.data._selection import NamedColumns
from nnlo_common.data._source import Array, Field
from nnlo_common.data.formats._format import FileInfo

__all__ = [
    "INDEX",
    "Adaptor",
    "BatchItem",
    "ColumnPlan",
    "Names",
    "index_field",
    "padded_field",
    "side_by_side",
]

Names: TypeAlias = str | Sequence[str]
Adaptor: TypeAlias = Callable[[Any], Any]
INDEX = np.dtype(np.int64)  # what embeddings of the frameworks take


class ColumnPlan(NamedTuple):
    """Where the numbers of one column go.

    Attributes:
        name: of the column.
        into: the index of the array that they fill.
        counts: the index of the array of its rows' lengths; None: there is none.
        pad: the entries of a ragged column's row; None: its rows are alike.
        beside: the place of this column among those of an input; None: it is the whole input.
        raw: the values that become indices, as they are in the file; None: the column has numbers.
    """

    name: str
    into: int
    counts: int | None
    pad: int | None
    beside: int | None = None
    raw: Field | None = None

    @property
    def column(self) -> str:
        """The name of the column as users write it; in HDF5 it begins with a slash."""
        return self.name.strip("/")

    def without_filling(self, arrays: Sequence[Array]) -> Array:
        """Return the entries of this column, one after the other, without those that fill up rows."""
        array = arrays[self.into]
        if self.beside is not None:
            array = array[..., self.beside]
        if self.counts is None or self.pad is None:
            return array
        return array[np.arange(self.pad) < arrays[self.counts][:, None]]


class _Input:
    """The columns of one name.

    Args:
        stored: how many there are.
        stacked: whether they are one input, side by side.
        grouped: whether they are several inputs.

    Attributes:
        counted: whether the lengths of their rows are known.
        masked: whether a mask follows them.
        coded: whether they are indices of a vocabulary.
    """

    def __init__(self, stored: int, *, stacked: bool, grouped: bool) -> None:
        self.stored, self.stacked, self.grouped = stored, stacked, grouped
        self.counted = self.masked = self.coded = False

    def made(self, arrays: Iterator[Array]) -> tuple[list[Array], Array | None]:
        """Return the inputs, and which of their entries are no filling."""
        some = [next(arrays) for _ in range(1 if self.stacked else self.stored)]
        mask = np.arange(some[0].shape[1]) < next(arrays)[:, None] if self.counted else None
        return some, mask


class BatchItem:
    """Features, labels or weights: makes this item of a batch from its arrays."""

    def __init__(
        self,
        name: str,
        asked: Names | None,
        made: Sequence[NamedColumns],
        groups: Sequence[int | None],
        adaptor: Adaptor | None,
    ) -> None:
        self.name, self.adaptor = name, adaptor
        self.standard: Standard | None = None
        self._alone = isinstance(asked, str)
        sizes = iter(groups)
        self.columns: list[_Input] = []
        for request in made:
            own = [next(sizes) for _ in request.names]
            if request.stacked and any(size is not None for size in own):
                group = next(n for n, size in zip(request.names, own, strict=True) if size is not None)
                raise ConfigurationError(
                    f"{name}={asked!r}: {group!r} is a group, which cannot be one of several columns of an "
                    "input; name its datasets"
                )
            count = sum(1 if size is None else size for size in own)
            self.columns.append(
                _Input(count, stacked=request.stacked, grouped=not request.stacked and own[0] is not None)
            )

    def assemble(self, arrays: Iterator[Array], rows: int) -> Any:
        made, masks = self.raw(arrays, rows)
        return made if self.standard is None else self.standard.applied(made, masks)

    @property
    def taken(self) -> tuple[int, bool] | None:
        """How many arrays it takes as they are, and whether it is that array alone; None: it changes them."""
        if self.adaptor is not None or self.standard is not None or any(one.counted for one in self.columns):
            return None
        return sum(1 if one.stacked else one.stored for one in self.columns), self._is_one

    @property
    def _is_one(self) -> bool:
        first = self.columns[0]
        return self._alone and not (first.grouped or first.masked)

    def stays(self, leaves: Sequence[Array]) -> list[bool]:
        """Return which inputs of this item are not standardised: true and false, and indices of categories.

        Of what an adaptor has made, whole numbers count as indices if there are any.
        """
        coded = [one.coded for one in self.columns]
        if self.adaptor is not None:
            return [leaf.dtype.kind == "b" or (any(coded) and leaf.dtype.kind in "iu") for leaf in leaves]
        each = [
            one.coded for one in self.columns for _ in range((1 if one.stacked else one.stored) + one.masked)
        ]
        return [leaf.dtype.kind == "b" or kept for leaf, kept in zip(leaves, each, strict=True)]

    def raw(self, arrays: Iterator[Array], rows: int) -> tuple[Any, list[Array | None]]:
        """Return this item before it is standardised, and what of its inputs is no filling."""
        some: list[Array] = []
        masks: list[Array | None] = []
        for columns in self.columns:
            inputs, mask = columns.made(arrays)
            some += inputs
            masks += [mask] * len(inputs)
            if columns.masked and mask is not None:
                some.append(mask)
                masks.append(None)
        made: Any = some[0] if self._is_one else tuple(some)
        return (made, masks) if self.adaptor is None else (self._adapted(made, rows), [])

    def _adapted(self, made: Any, rows: int) -> Any:
        assert self.adaptor is not None  # the caller checks it
        try:
            with stage("adapt"):
                made = self.adaptor(made)
        except Exception as error:
            raise ConfigurationError(
                f"adapt_{self.name} failed on {plural(rows, 'sample')}, {_described(made)}, with "
                f"{type(error).__name__}: {error}; correct it, and test it with "
                f"`HDF5Source(...).take(0, {rows})`"
            ) from error
        lengths = list(_lengths(made))
        if not lengths or set(lengths) != {rows}:
            raise ConfigurationError(
                f"adapt_{self.name} got {plural(rows, 'sample')} and returned {_shown(lengths)}; return "
                "an array, or a list, tuple or dictionary of arrays, with one row for each sample"
            )
        return made


def side_by_side(info: FileInfo, columns: Sequence[Field]) -> Field:
    """Return the field of columns as the last axis of one array: of floats, if one of them is of floats."""
    first = columns[0]
    for one in columns:
        if one.shape != first.shape or (one.name in info.ragged) != (first.name in info.ragged):
            raise ConfigurationError(
                f"{info.path}: {first.name} has samples of {first.shape}, {one.name} of {one.shape}; columns "
                "of one input must be alike: name them apart"
            )
    floats = [one.dtype for one in columns if one.dtype.kind == "f"]
    kind = np.result_type(*(floats or [one.dtype for one in columns]))
    return Field(",".join(one.name for one in columns), (*first.shape, len(columns)), kind)


def padded_field(info: FileInfo, field: Field, pad: int | None) -> Field:
    """Return the field of a ragged column whose rows are brought to one length."""
    if pad is None:
        raise ConfigurationError(
            f"{info.path}: {field.name} has rows of unequal length; pass pad=N (--pad N) to bring them to "
            "that length, with zeros at the end, or name another column"
        )
    return Field(field.name, (whole_number("pad", pad, 1), *field.shape), field.dtype)


def index_field(info: FileInfo, field: Field) -> Field:
    """Return the field of a column that becomes indices."""
    if field.dtype.kind == "f":
        raise ConfigurationError(
            f"{info.path}: {field.name} has the type {field.dtype}, but vocabulary= (--vocabulary) is for "
            "texts and whole numbers; leave it out, or make whole numbers of it in the files"
        )
    return Field(field.name, field.shape, INDEX)


def _described(arrays: Any) -> str:
    several = arrays if isinstance(arrays, tuple) else (arrays,)
    return " and ".join(f"{array.dtype}{list(array.shape)}" for array in several)


def _lengths(made: Any) -> Iterator[int | None]:
    """Yield the number of rows of each array in `made`; None for an item that is not an array."""
    if isinstance(made, Mapping):
        made = list(made.values())
    if isinstance(made, list | tuple):
        for one in made:
            yield from _lengths(one)
    else:
        shape = getattr(made, "shape", ())
        yield int(shape[0]) if shape else None


def _shown(lengths: Sequence[int | None]) -> str:
    listed = sorted({"no array" if length is None else f"{length} rows" for length in lengths})
    return " and ".join(listed) or "nothing"
