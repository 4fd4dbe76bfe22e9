"""Samples in a list of HDF5 files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._plural import plural
from nnlo_common.base._warnings import warn
from nnlo_common.data._listing import Files, list_files, refuse_duplicates
from nnlo_common.data._source import Array, Field
from nnlo_common.data._staging import Staging
from nnlo_common.data.hdf5._inspection import HOW, inspect_files, names_in
from nnlo_common.data.hdf5._opened_files import OpenFiles

__all__ = ["Adaptor", "HDF5Source", "Names", "Reading"]

_MANY_SAMPLES = 10_000_000_000  # an epoch of hours, at the least

Names: TypeAlias = str | Sequence[str]
Adaptor: TypeAlias = Callable[[Any], Any]


class Reading(TypedDict, total=False):
    """Options of `HDF5Source`, for callers that pass them on."""

    features: Names
    labels: Names | None
    weights: Names | None
    adapt_features: Adaptor | None
    adapt_labels: Adaptor | None
    check_finite: bool
    locking: bool | None
    stage_to: str | Path | None
    copy_command: Sequence[str] | None
    samples: Sequence[int] | npt.NDArray[Any] | None


class HDF5Source:
    """The samples of a list of HDF5 files, read in slices as if they were in one file.

    The metadata of all files are checked first: each file must exist, be whole, and have the same datasets as
    the others, except for the number of samples.

    Each process opens the files when it reads them, so a source can be pickled and sent to another process.

    Args:
        files: see `list_files`.
        features: the name of a dataset with a row for each sample. A group means all datasets in it, in
            alphabetical order, as several inputs; so do several names, in their order. They come as a tuple.
        labels: the same for outputs; None: no labels, and a batch is `(features,)`.
        weights: the same for sample weights, the third item of a batch; None: all samples count alike.
        adapt_features: converts the features of some samples, as read, into the model's input. It is called
            with NumPy arrays, in a thread that reads ahead, and returns as many rows.
        adapt_labels: the same for labels.
        check_finite: refuse NaN and infinity when they are read.
        locking: whether to lock the files; None: lock them if the file system can.
        stage_to: a folder of this host to copy the files to first; see `Staging`.
        copy_command: the command that copies a file there; see `Staging`.
        samples: the rising numbers of the samples to use; None: all. The others between them are read, too,
            and dropped, so use it for large parts, such as folds.

    Example:
        >>> import tempfile, h5py
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in "ab":
        ...         with h5py.File(f"{folder}/{name}.h5", "w") as file:
        ...             file["x"], file["y"] = np.ones((3, 2)), np.arange(3)
        ...     source = HDF5Source(f"{folder}/*.h5", features="x", labels="y")
        ...     out = [field.empty(2) for field in source.fields]
        ...     source.read(2, 4, out)
        ...     source.close()
        >>> len(source), out[1]
        (6, array([2, 0]))
    """

    def __init__(
        self,
        files: Files,
        *,
        features: Names | None = None,
        labels: Names | None = None,
        weights: Names | None = None,
        adapt_features: Adaptor | None = None,
        adapt_labels: Adaptor | None = None,
        check_finite: bool = False,
        locking: bool | None = None,
        stage_to: str | Path | None = None,
        copy_command: Sequence[str] | None = None,
        samples: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> None:
        if weights is not None and labels is None:
            raise ConfigurationError(f"weights={weights!r} were given without labels; pass labels=, too")
        for name, adaptor in (("adapt_features", adapt_features), ("adapt_labels", adapt_labels)):
            if adaptor is not None and not callable(adaptor):
                raise ConfigurationError(f"{name}={adaptor!r} is not a function; give one that takes arrays")
        if features is None:
            raise ConfigurationError(
                f"features=None: give the name of the dataset of the inputs; name datasets by {HOW}"
                f"{names_in(list_files(files)[0], locking)}"
            )
        asked = {"features": features, "labels": labels, "weights": weights}
        sides = {
            side: _names(side, names)
            for side, names in asked.items()
            if names is not None or side == "features"
        }
        if copy_command is not None and stage_to is None:
            raise ConfigurationError(
                f"copy_command={list(copy_command)} was given without stage_to=; pass a local folder for it"
            )
        self.files = list_files(files)
        self._staging = None if stage_to is None else Staging(stage_to, copy_command)
        self._paths = self.files if self._staging is None else self._staging.stage(self.files)
        try:
            infos = inspect_files(self._paths, [name for names in sides.values() for name in names], locking)
            refuse_duplicates(self.files)
        except ConfigurationError as error:
            if self._staging is None:
                raise
            self._staging.close()
            text = str(error)
            for copy, file in zip(self._paths, self.files, strict=True):
                text = text.replace(copy, file)  # the user knows the original only
            raise ConfigurationError(text) from None
        self.lengths: Sequence[int] = [one.length for one in infos]
        self.fields: Sequence[Field] = infos[0].fields
        self.grain = infos[0].grain
        self._starts = list(accumulate(self.lengths, initial=0))
        if self._starts[-1] > _MANY_SAMPLES:
            warn(
                f"{self.files[0]}{' and others' if len(self.files) > 1 else ''}: an epoch has "
                f"{self._starts[-1]} samples; at a million samples a second it takes "
                f"{self._starts[-1] / 86400e6:.1f} days. If so many are not meant, look at the files "
                "with h5ls"
            )
        self._samples = None if samples is None else _rising(samples, self._starts[-1])
        if self._samples is not None:
            counts = np.diff(np.searchsorted(self._samples, self._starts))
            self.lengths, self.grain = counts.tolist(), 1
        self._finite = check_finite
        groups = iter(infos[0].groups)
        adaptors = {"features": adapt_features, "labels": adapt_labels}
        self._sides = [
            _Side(side, asked[side], [next(groups) for _ in names], adaptors.get(side))
            for side, names in sides.items()
        ]
        self._open = OpenFiles(locking)
        if adapt_features is not None or adapt_labels is not None:
            self.take(0, 1)  # reports a failing adaptor before the training

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(self.lengths)

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Read the samples [start, stop) into arrays of that length, one for each field."""
        if self._samples is None:
            self._read(start, stop, out)
            return
        wanted = self._samples[start:stop]
        if len(wanted):
            first, last = int(wanted[0]), int(wanted[-1]) + 1
            whole = [field.empty(last - first) for field in self.fields]
            self._read(first, last, whole)
            for array, into in zip(whole, out, strict=True):
                into[:] = array[wanted - first]

    def _read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        for part, first, last in self._pieces(start, stop):
            into = slice(self._starts[part] + first - start, self._starts[part] + last - start)
            path = self._paths[part]
            with self._open.lock():
                file = self._open.get(path)
                for field, array in zip(self.fields, out, strict=True):
                    try:
                        file[field.name].read_direct(array, np.s_[first:last], into)
                    except Exception as error:  # h5py raises any type of exception for damaged files
                        raise ConfigurationError(
                            f"{self.files[part]}: samples {first} to {last - 1} of {field.name} cannot be "
                            f"read ({error}): the file is damaged, or has changed since; make it again"
                        ) from None
            if self._finite:
                self._check_finite(self.files[part], first, [array[into] for array in out])

    def take(self, start: int, stop: int) -> Any:
        """Return the samples [start, stop) as a batch."""
        arrays = [field.empty(stop - start) for field in self.fields]
        self.read(start, stop, arrays)
        return self.assemble(arrays)

    def assemble(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Return (features, labels, weights), without absent ones, from one array for each field."""
        rest = iter(arrays)
        return tuple(side.assemble(rest, len(arrays[0])) for side in self._sides)

    def close(self) -> None:
        """Close all files, and release staged copies; the source must not be read afterwards."""
        self._open.close()
        if self._staging is not None:
            self._staging.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_staging": None}  # the process that staged the copies releases them

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts that have these samples, with the slice of each."""
        part = bisect_right(self._starts, start) - 1
        while start < stop:
            begin, end = self._starts[part : part + 2]
            last = min(stop, end)
            if start < last:
                yield part, start - begin, last - begin
            start, part = last, part + 1

    def _check_finite(self, path: str, first: int, arrays: Sequence[Array]) -> None:
        for field, array in zip(self.fields, arrays, strict=True):
            if field.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
                raise ConfigurationError(
                    f"{path}: sample {first + row} of {field.name} is not finite (NaN or infinity); remove "
                    "it from the file, or drop check_finite and replace it in an adaptor"
                )


class _Side:
    """Features, labels or weights: makes this item of a batch from its arrays."""

    def __init__(
        self, name: str, asked: Names | None, groups: Sequence[int | None], adaptor: Adaptor | None
    ) -> None:
        self._name, self._adaptor = name, adaptor
        self._count = sum(1 if group is None else group for group in groups)
        self._single = isinstance(asked, str) and groups[0] is None

    def assemble(self, arrays: Iterator[Array], rows: int) -> Any:
        some = tuple(next(arrays) for _ in range(self._count))
        made: Any = some[0] if self._single else some
        if self._adaptor is None:
            return made
        try:
            made = self._adaptor(made)
        except Exception as error:
            raise ConfigurationError(
                f"adapt_{self._name} failed on {plural(rows, 'sample')}, {_described(made)}, with "
                f"{type(error).__name__}: {error}; correct it, and test it with "
                f"`HDF5Source(...).take(0, {rows})`"
            ) from error
        lengths = list(_lengths(made))
        if not lengths or set(lengths) != {rows}:
            raise ConfigurationError(
                f"adapt_{self._name} got {plural(rows, 'sample')} and returned {_shown(lengths)}; return "
                "an array, or a list, tuple or dictionary of arrays, with one row for each sample"
            )
        return made


def _rising(samples: Any, size: int) -> npt.NDArray[np.int64]:
    found = np.asarray(samples)
    whole = found.ndim == 1 and found.dtype.kind in "iu" and len(found) > 0
    if not whole or found[0] < 0 or found[-1] >= size or (np.diff(found) <= 0).any():
        raise ConfigurationError(
            f"samples={samples!r:.80}: give rising whole numbers from 0 to {size - 1}, the last sample"
        )
    return found.astype(np.int64)


def _names(side: str, asked: Names | None) -> list[str]:
    names: list[Any] = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    if not names or not all(isinstance(name, str) and name.strip("/") and "\0" not in name for name in names):
        raise ConfigurationError(
            f"{side}={asked!r}: give the name of a dataset or a group in the files, or several names"
        )
    return names


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
