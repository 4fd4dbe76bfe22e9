"""Samples in a list of files of any format, read in slices as if they were in one file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, NNLOError, warn
from nnlo_common.base._spans import recorder, stage
from nnlo_common.data._batch_items import (
    INDEX,
    Adaptor,
    BatchItem,
    ColumnPlan,
    Names,
    index_field,
    padded_field,
    side_by_side,
)
from nnlo_common.data._ledger import Range
from nnlo_common.data._listing import Files, list_files, refuse_duplicates, state_of
from nnlo_common.data._mapped_arrays import MappedFile, check_whole, files_of, is_as_read, read_pages
from nnlo_common.data._memory_cache import CacheKind, memory_cache
from nnlo_common.data._passing_failures import WAITS_S, may_pass, wait_for_file_system
from nnlo_common.data._preparation import (
    STATISTICS,
    TEXTS_STAY,
    Counts,
    Moments,
    NewValues,
    Quantiles,
    Standard,
    StatisticsName,
    Vocabulary,
    check_size,
    coder_of,
    leaves_of,
    together,
)
from nnlo_common.data._selection import Selection, evenly, requests, value_of_each
from nnlo_common.data._source import Array, Field
from nnlo_common.data._staging import Staging, staged
from nnlo_common.data.formats._format import (
    HOW,
    TEXT,
    Format,
    OpenedFile,
    OpenFiles,
    Ragged,
    as_configuration,
    inspect_files,
    joined_bounds,
    shown,
)
from nnlo_common.data.formats._found import check_remote, format_of
from nnlo_common.data.formats._hdf5 import HDF5
from nnlo_common.data.formats._table import fill_padded

__all__ = [
    "Adaptor",
    "FileSource",
    "HDF5Source",
    "Names",
    "Reading",
]

_MANY_SAMPLES = 10_000_000_000  # an epoch of hours, at the least
# Samples of a selection that lie further apart than this are read one after the other.
_GAP = 256
_MEASURED_BYTES = 2**24  # read at once to measure what prepares samples


class Reading(TypedDict, total=False):
    """Options of `FileSource`, for callers that pass them on."""

    features: Names
    labels: Names | None
    weights: Names | None
    adapt_features: Adaptor | None
    adapt_labels: Adaptor | None
    select: str | None
    balance: str | None
    pad: int | None
    mask: bool
    check_finite: bool
    vocabulary: Vocabulary | Sequence[str] | str | Path | None
    standardize: Standard | str | Path | None
    cache: CacheKind
    locking: bool | None
    stage_to: str | Path | None
    copy_command: Sequence[str] | None
    samples: Sequence[int] | npt.NDArray[Any] | None


class _ColumnError(Exception):
    """A column cannot be read.

    Attributes:
        column: its name.
        error: of the library.
    """

    def __init__(self, column: str, error: Exception) -> None:
        super().__init__(column)
        self.column, self.error = column, error


class FileSource:
    """The samples of a list of files of one format, read in slices as if they were in one file.

    The metadata of all files are checked first: each file must exist, be whole, and have the same columns as
    the others, except for the number of samples.

    Each process opens the files when it reads them, so a source can be pickled and sent to another process.

    A name may stand for several columns: ``"pt,eta,phi"`` is one input with three numbers for each sample, in
    this order, and ``"jet_*"`` one with all columns whose names match.

    Args:
        files: see `list_files`. The format of a file follows from its name, else from its first bytes: HDF5,
            ROOT (``file.root:tree``), Parquet and those of the page on data. Or a dictionary of columns in
            memory: objects with a length whose slices are arrays.
        features: the name of a column (in HDF5 of a dataset) with a row for each sample. An HDF5 or Zarr
            group means all datasets in it, in alphabetical order, as several inputs; so do several names, in
            their order. They come as a tuple.
        labels: the same for outputs; None: no labels, and a batch is `(features,)`.
        weights: the same for sample weights, the third item of a batch; None: all samples count alike.
        adapt_features: converts the features of some samples, as read, into the model's input. It is called
            with NumPy arrays, in a thread that reads ahead, and returns as many rows.
        adapt_labels: the same for labels.
        select: use the samples that fulfil this only, e.g. ``"pt > 20 and abs(eta) < 2.5"``, of columns with
            one number for each sample.
        balance: the column of the classes (whole numbers, texts or one-hot), of which the rare ones come more
            often, so that in each epoch each class has as many samples as the largest.
        pad: the length to bring rows of unequal length to: shorter ones get zeros at the end, longer ones
            lose their last entries.
        mask: let a mask follow each such input: true where a row has an entry, false where it has zeros.
        check_finite: refuse NaN and infinity when they are read.
        vocabulary: turns the values in columns of features and labels, texts or whole numbers, into indices
            from 1, before `adapt_features`; 0 stands for a value that it does not know. Or the file of a run
            that has one. Or a list of columns, whose `values` are to be measured for one.
        standardize: mean and spread to bring the features to 0 and 1 by, after `adapt_features`; or the file
            of a run that has them. See `Standard`, and `statistics`, which measures them.
        cache: "memory": keep the decoded samples in memory, one copy for all ranks of a host, so that each is
            decoded once. "auto": do so where they are compressed and take up to a quarter of the host's free
            memory. "none": decode them in each epoch.
        locking: whether to lock HDF5 files; None: lock them if the file system can.
        stage_to: a folder of this host to copy the files to first; see `Staging`.
        copy_command: the command that copies a file there; see `Staging`.
        samples: the rising numbers of the samples to use, of those that `select` leaves; None: all. The
            others between them are read, too, and dropped, so use it for large parts, such as folds.

    Example:
        >>> import tempfile, h5py
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in "ab":
        ...         with h5py.File(f"{folder}/{name}.h5", "w") as file:
        ...             file["x"], file["y"] = np.ones((3, 2)), np.arange(3)
        ...     source = FileSource(f"{folder}/*.h5", features="x", labels="y")
        ...     out = [field.empty(2) for field in source.fields]
        ...     source.read(2, 4, out)
        ...     source.close()
        >>> len(source), out[1]
        (6, array([2, 0]))
        >>> source = FileSource({"pt": np.arange(4.0), "eta": np.ones(4)}, features="pt,eta", select="pt > 1")
        >>> source.take(0, 2)
        (array([[2., 1.],
               [3., 1.]]),)
    """

    #: The format of all files; None: it follows from the first.
    _format: ClassVar[Format | None] = None
    _mapped: Sequence[MappedFile] = ()  # of the arrays that `resident` has returned last

    def __init__(
        self,
        files: Files | Mapping[str, Any],
        *,
        features: Names | None = None,
        labels: Names | None = None,
        weights: Names | None = None,
        adapt_features: Adaptor | None = None,
        adapt_labels: Adaptor | None = None,
        select: str | None = None,
        balance: str | None = None,
        pad: int | None = None,
        mask: bool = False,
        check_finite: bool = False,
        vocabulary: Vocabulary | Sequence[str] | str | Path | None = None,
        standardize: Standard | str | Path | None = None,
        cache: CacheKind = "auto",
        locking: bool | None = None,
        stage_to: str | Path | None = None,
        copy_command: Sequence[str] | None = None,
        samples: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> None:
        if weights is not None and labels is None:
            raise ConfigurationError(f"weights={weights!r} were given without labels; pass labels=, too")
        _check_adaptors(adapt_features=adapt_features, adapt_labels=adapt_labels)
        _check_needs(mask=mask, pad=pad, copy_command=copy_command, stage_to=stage_to)
        self._columns = files if isinstance(files, Mapping) else None
        self.files = ("the given columns",) if isinstance(files, Mapping) else list_files(files)
        kind = self._format or format_of(self.files if self._columns is None else self._columns)
        check_remote(self.files if stage_to is None else (), kind)
        if features is None:
            raise ConfigurationError(
                f"features=None: give the name of the dataset of the inputs; name datasets by {HOW}"
                f"{_has(kind, self.files[0], locking)}"
            )
        asked = {"features": features, "labels": labels, "weights": weights}
        chosen, self._coder = Selection(select), coder_of(vocabulary)
        self._staging = None if stage_to is None else Staging(stage_to, copy_command)
        self._paths = self.files if self._staging is None else staged(self._staging, self.files)
        names_of = partial(_names_of, kind, self._paths[0], locking)
        try:
            sides = {
                side: requests(side, names, names_of) for side, names in asked.items() if names is not None
            }
            names = [name for side in sides.values() for request in side for name in request.names]
            counting = {one.strip("/") for request in sides.get("weights", ()) for one in request.names}
            coded = None if vocabulary is TEXTS_STAY else {*self._coder.columns} - counting
            infos = inspect_files(kind, self._paths, names, locking, coded)
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
        self._infos, self._finite = infos[0], check_finite
        if isinstance(standardize, str | Path):
            standardize = Standard.load(standardize)
        self._starts = list(accumulate(self.lengths, initial=0))
        self._warn_of_many()
        self._open = OpenFiles(partial(kind.open, locking=locking))
        groups = iter(infos[0].groups)
        self._sides = [
            BatchItem(side, asked[side], made, [next(groups) for one in made for _ in one.names], adaptor)
            for (side, made), adaptor in zip(
                sides.items(), (adapt_features, adapt_labels, None), strict=False
            )
        ]
        self._sides[0].standard = standardize
        self.fields: Sequence[Field] = []
        self._plans = self._planned(pad, mask)
        self.grain, self.how = infos[0].grain, infos[0].how
        self.encoded = infos[0].encoded or any(plan.raw is not None for plan in self._plans)
        self._samples: npt.NDArray[np.int64] | None = None
        self._choose(chosen, samples, balance, {"locking": locking, "cache": cache})
        facts = f"{kind.title} {names} {pad} {mask} {check_finite} {self._coder}"
        cache = cache if self._shareable else "none"
        self._cache = memory_cache(
            cache,
            lambda: f"{facts} {state_of([*self._paths, *(file for one in infos for file in one.others)])}",
            self.fields,
            [one.length for one in infos],
            infos[0].grain,
            encoded=self.encoded,
        )
        if (adapt_features is not None or adapt_labels is not None) and self._measured:
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
        for begin, end in self._runs(wanted):
            first, last = int(wanted[begin]), int(wanted[end - 1]) + 1
            whole = [field.empty(last - first) for field in self.fields]
            self._read(first, last, whole)
            for array, into in zip(whole, out, strict=True):
                into[begin:end] = array[wanted[begin:end] - first]

    def resident(self, ranges: Sequence[Range]) -> tuple[Sequence[Array], npt.NDArray[np.int64]] | None:
        """Return arrays in memory, and the row in them of each sample of some ranges; decode what is absent.

        The arrays may be files that are mapped into memory, of which these ranges are read first.

        None: the samples are not kept in memory, or there is too little.
        """
        whole = self._whole() if self._cache is None else None
        if self._cache is None and whole is None:
            return None
        numbers = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        if self._samples is not None:
            numbers = self._samples[numbers]
            runs = self._runs(numbers)
            ranges = [(int(numbers[begin]), int(numbers[end - 1]) + 1) for begin, end in runs]
        self._note()
        with stage("fetch"):
            if whole is not None:
                self.check_mapped()
                for start, stop in ranges:
                    read_pages(whole, start, stop)
                return [np.asarray(array) for array in whole], numbers
            assert self._cache is not None  # looked at above
            if all(self._cache.load(start, stop, self._decode) for start, stop in ranges):
                return self._cache.arrays, numbers
        return None

    def check_mapped(self) -> None:
        """Raise if a file of `resident` was cut off since."""
        check_whole(self._mapped)

    def _whole(self) -> Sequence[Array] | None:
        """Return the array of each field, if the one file has them as they are; None: they must be read."""
        if len(self._paths) > 1 or self._finite or len(self._plans) != len(self.fields):
            return None
        if any(plan.beside is not None or plan.raw is not None for plan in self._plans):
            return None
        with self._open.lock():
            try:
                look = getattr(self._open.get(self._paths[0]), "whole", None)
                found = None if look is None else [look(plan.name) for plan in self._plans]
            except Exception:  # `read` waits for a file system that fails for a while, and reports it
                return None
        if not found or not all(map(is_as_read, found, self.fields)):
            return None
        self._mapped = files_of(found)
        return found

    def bounds(self, name: str, start: int, stop: int) -> tuple[float, float] | None:
        """Return the least and the largest number of a column in some samples; None: the files do not say."""
        return joined_bounds(self._bounds(name, *one) for one in self._pieces(start, stop))

    def _bounds(self, name: str, part: int, first: int, last: int) -> tuple[float, float] | None:
        with self._open.lock():
            look = getattr(self._open.get(self._paths[part]), "bounds", None)
            return None if look is None else look(name, first, last)

    def take(self, start: int, stop: int) -> Any:
        """Return the samples [start, stop) as a batch."""
        return self.assemble(self._arrays(start, stop))

    def _arrays(self, start: int, stop: int) -> list[Array]:
        """Read the samples [start, stop) into new arrays, one for each field."""
        try:
            arrays = [field.empty(stop - start) for field in self.fields]
        except ConfigurationError as error:
            raise ConfigurationError(f"{shown(self.files)}: {error}") from None
        self.read(start, stop, arrays)
        return arrays

    def assemble(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Return (features, labels, weights), without absent ones, from one array for each field."""
        if self._taken is not None:
            return tuple([arrays[one] if type(one) is int else tuple(arrays[one]) for one in self._taken])
        if not self._measured:
            raise ConfigurationError(
                f"vocabulary={[*self._coder.columns]} names columns to measure; give Vocabulary.measured of "
                "their values(), which makes the list of indices"
            )
        rest = iter(arrays)
        return tuple(side.assemble(rest, len(arrays[0])) for side in self._sides)

    @property
    def as_read(self) -> bool:
        """Whether a batch is the arrays as they were read, at no cost."""
        return self._taken is not None

    def row_lengths(self, arrays: Sequence[Array]) -> npt.NDArray[np.int64]:
        """Return how many entries each row has in its longest ragged column, at most `pad`."""
        counts = [arrays[plan.counts] for plan in self._plans if plan.counts is not None]
        found: npt.NDArray[np.int64] = np.maximum.reduce(counts)
        return found

    def without_filling(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays of a batch, ragged columns cut to their longest row, of at least one entry.

        The columns of a group that is one input stay as they are: only one of their lengths is known.
        """
        found = list(arrays)
        if any(plan.pad and plan.counts is None and plan.beside is None for plan in self._plans):
            return found
        for plan in self._plans:
            if plan.counts is not None:
                found[plan.into] = found[plan.into][:, : max(1, int(arrays[plan.counts].max(initial=1)))]
        return found

    @property
    def ragged(self) -> bool:
        """Whether it has columns of rows of unequal length."""
        return any(plan.counts is not None for plan in self._plans)

    def statistics(
        self, start: int, stop: int, by: StatisticsName = "spread"
    ) -> list[Moments | Quantiles | None]:
        """Return moments or quantiles of the inputs of the samples [start, stop), for `Standard`.

        Nothing comes of no samples, and None of true and false and of indices of categories.
        """
        found: list[Moments | Quantiles | None] = []
        rows = max(_MEASURED_BYTES // max(sum(field.row_bytes for field in self.fields), 1), 1)
        for begin in range(start, stop, rows):
            end = min(begin + rows, stop)
            arrays = self._arrays(begin, end)
            made, masks = self._sides[0].raw(iter(arrays), end - begin)
            leaves = leaves_of(made)
            masks += [None] * (len(leaves) - len(masks))
            some: list[Moments | Quantiles | None] = [
                None if stays else STATISTICS[by].of(leaf, mask)
                for leaf, mask, stays in zip(leaves, masks, self._sides[0].stays(leaves), strict=True)
            ]
            found = together([found, some]) if found else some
        return found

    def values(self, start: int, stop: int) -> Counts:
        """Return how often each value of the columns of `vocabulary=` comes in the samples [start, stop).

        Of a vocabulary, None stands for the values that it does not know. Only these columns are read.

        Raises:
            ConfigurationError: a column has more different values than it may have.
        """
        source, coder = self._only_coded(), self._coder
        found: Counts = {plan.column: {} for plan in source._plans}
        rows = max(_MEASURED_BYTES // max(sum(field.row_bytes for field in source.fields), 1), 1)
        for begin in range(start, stop, rows):
            if isinstance(coder, NewValues):
                coder.begin()
            arrays = source._arrays(begin, min(begin + rows, stop))
            for plan in source._plans:
                indices, counts = plan.without_filling(arrays), found[plan.column]
                values = coder.values_of(plan.column)
                for index, count in enumerate(np.bincount(indices.reshape(-1)).tolist()):
                    if count:
                        counts[values[index]] = counts.get(values[index], 0) + count
                if isinstance(coder, NewValues):
                    check_size(plan.column, counts, coder.most[plan.column])
        return found

    def unknown_in(self, arrays: Sequence[Array]) -> dict[str, list[int]]:
        """Return how many values each column with a vocabulary has in some arrays, and how many unknown."""
        found: dict[str, list[int]] = {}
        for plan in self._plans:
            if plan.raw is not None:
                indices = plan.without_filling(arrays)
                counts = found.setdefault(plan.column, [0, 0])
                counts[0] += indices.size
                counts[1] += indices.size - int(np.count_nonzero(indices))
        return found

    def prepared(self) -> dict[str, str | None]:
        """Return a short text for each thing that changes the samples: with another text they are others."""
        adaptor, standard = self._sides[0].adaptor, self._sides[0].standard
        known = self._coder.mark() if isinstance(self._coder, Vocabulary) and self._coder.columns else None
        called = None if adaptor is None else getattr(adaptor, "__qualname__", type(adaptor).__name__)
        return {
            "adapt_features": called,
            "vocabulary": known,
            "standardize": None if standard is None else standard.mark(),
        }

    def _only_coded(self) -> FileSource:
        """Return this source with no columns but those that become indices, each once."""
        found, fields, plans = copy(self), list[Field](), dict[str, ColumnPlan]()
        for plan in self._plans:
            if plan.raw is None or plan.column in plans:
                continue
            shape, into, counts = plan.raw.shape, len(fields), None
            if plan.pad is not None:
                shape, counts = (plan.pad, *shape), into + 1
            fields.append(Field(plan.name, shape, INDEX))
            if counts is not None:
                fields.append(Field(f"{plan.name}_count", (), INDEX))
            plans[plan.column] = ColumnPlan(plan.name, into, counts, plan.pad, raw=plan.raw)
        found.fields, found._plans, found._cache = fields, [*plans.values()], None
        return found

    @property
    def _shareable(self) -> bool:
        """Whether all processes read the same numbers; new values have those of a process, texts none."""
        return self._measured and all(field.dtype != TEXT for field in self.fields)

    @property
    def _measured(self) -> bool:
        """Whether its vocabulary is one, and not a list of columns."""
        return not isinstance(self._coder, NewValues)

    def close(self) -> None:
        """Close all files, release staged copies and memory; the source must not be read afterwards."""
        self._open.close()
        if self._cache is not None:
            self._cache.close()
        if self._staging is not None:
            self._staging.close()

    def __getstate__(self) -> dict[str, Any]:
        # A process maps files itself, and the one that staged copies releases them.
        return {**vars(self), "_mapped": (), "_staging": None}

    def _note(self) -> None:
        """Tell the recorder of this thread what is read."""
        spans = recorder()
        if spans is not None:
            spans.reading.update(how=self.how, piece_bytes=self._infos.piece_bytes)

    def _runs(self, numbers: npt.NDArray[np.int64]) -> list[Range]:
        """Return the parts of numbers to read in one piece, with what lies between; in each they rise."""
        steps = np.diff(numbers)
        far = np.flatnonzero((steps > max(self.grain, _GAP)) | (steps < 0)) + 1
        return list(pairwise([0, *far.tolist(), len(numbers)])) if len(numbers) else []

    def _read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Read samples by their number among all of the files."""
        self._note()
        with stage("fetch"):
            if self._cache is None:
                self._decode(start, stop, out)
            else:
                self._cache.read(start, stop, out, self._decode)

    def _decode(self, start: int, stop: int, out: Sequence[Array]) -> None:
        for part, first, last in self._pieces(start, stop):
            some = out
            if last - first < stop - start:
                into = slice(self._starts[part] + first - start, self._starts[part] + last - start)
                some = [array[into] for array in out]
            failed: _ColumnError | None = None
            for wait_s in (*WAITS_S, None):
                try:
                    self._decode_part(part, first, last, some)
                    break
                except _ColumnError as error:
                    failed = error
                except NNLOError:  # it cannot be opened: again, if it could be before
                    if failed is None:
                        raise
                if wait_s is None or not may_pass(failed.error):
                    raise self._unreadable(failed.error, part, first, last, failed.column)
                self._open.forget(self._paths[part])
                wait_for_file_system(self.files[part], failed.error, wait_s)
            if self._finite:
                self._check_finite(self.files[part], first, some)

    def _decode_part(self, part: int, first: int, last: int, out: Sequence[Array]) -> None:
        """Read samples of one file.

        Raises:
            _ColumnError: a column cannot be read.
        """
        with self._open.lock():
            file = self._open.get(self._paths[part])
            before: npt.NDArray[np.int64] | None = None
            for plan in self._plans:
                place = out[plan.into]
                if plan.beside is not None:
                    place = place[..., plan.beside]
                try:
                    if plan.pad is None:
                        self._read_column(file, plan, first, last, place)
                        continue
                    rows = file.ragged(plan.name, first, last)
                    if plan.raw is not None:
                        rows = Ragged(self._coder.indices(plan.column, rows.content), rows.counts)
                    fill_padded(rows, plan.pad, place)
                    if plan.beside and before is not None and not np.array_equal(before, rows.counts):
                        raise self._unlike(first, plan.name, before, rows.counts)
                    before = rows.counts
                    if plan.counts is not None:
                        out[plan.counts][:] = np.minimum(rows.counts, plan.pad)
                except Exception as error:  # the libraries raise any type of exception for damaged files
                    raise _ColumnError(plan.name, error) from None

    def _read_column(self, file: OpenedFile, plan: ColumnPlan, first: int, last: int, out: Array) -> None:
        if plan.raw is None:
            file.read(plan.name, first, last, out)
            return
        values = plan.raw.empty(last - first)
        file.read(plan.name, first, last, values)
        out[...] = self._coder.indices(plan.column, values)

    def _unreadable(self, error: Exception, part: int, first: int, last: int, name: str) -> NNLOError:
        what = f"{self.files[part]}: samples {first} to {last - 1} of {name} cannot be read"
        if isinstance(error, NNLOError):
            return ConfigurationError(f"{what}: {error}")
        told = " ".join(str(error).split())[:300] or type(error).__name__
        return ConfigurationError(
            f"{what} ({told}): the file is damaged, or has changed since; make it again"
        )

    @staticmethod
    def _unlike(first: int, name: str, before: Array, counts: Array) -> NNLOError:
        row = int(np.argmax(before != counts))
        return ConfigurationError(
            f"sample {first + row} has {int(counts[row])} entries of {name}, but {int(before[row])} of the "
            "column before it in the same input; name columns of unlike lengths apart"
        )

    def _planned(self, pad: int | None, mask: bool) -> list[ColumnPlan]:
        """Set the fields and how items are made of them, and return where the numbers of each column go."""
        info, fields, plans = self._infos, list[Field](), list[ColumnPlan]()
        found = iter(info.fields)
        for item, column in ((one, column) for one in self._sides for column in one.columns):
            raws = [next(found) for _ in range(column.stored)]
            coded = [item.name != "weights" and one.name.strip("/") in self._coder.columns for one in raws]
            own = [index_field(info, one) if code else one for one, code in zip(raws, coded, strict=True)]
            column.coded = any(coded)
            if column.stacked and column.coded and not all(coded):
                names = [raws[coded.index(one)].name for one in (True, False)]
                raise ConfigurationError(
                    f"{item.name}: {names[0]} becomes indices by vocabulary= (--vocabulary), but is beside "
                    f"{names[1]} in one input; name it apart, as an input of its own"
                )
            ragged = own[0].name in info.ragged
            if ragged:
                own = [padded_field(info, field, pad) for field in own]
            first, width = len(fields), 1 if column.stacked else len(own)
            fields += [side_by_side(info, own)] if column.stacked else own
            if ragged:
                fields.append(Field(f"{own[-1].name}_count", (), np.dtype(np.int64)))
                column.counted, column.masked = True, mask
            for index, field in enumerate(own):
                place, beside = (first, index) if column.stacked else (first + index, None)
                counts = first + width if ragged and field is own[-1] else None
                raw = raws[index] if coded[index] else None
                plans.append(ColumnPlan(field.name, place, counts, pad if ragged else None, beside, raw))
        self.fields, self._taken = fields, self._taken_arrays() if self._measured else None
        there = {plan.column for plan in plans if plan.raw is not None}
        if not self._measured and (absent := [one for one in self._coder.columns if one not in there]):
            raise ConfigurationError(
                f"vocabulary= (--vocabulary) names {absent[0]!r}, no column of features= or labels=; "
                f"these have {shown(list(dict.fromkeys(plan.column for plan in plans)))}"
            )
        return plans

    def _taken_arrays(self) -> list[int | slice] | None:
        """Return the arrays of each item of a batch; None: an item is made of them."""
        found, at = list[int | slice](), 0
        for side in self._sides:
            if (taken := side.taken) is None:
                return None
            count, alone = taken
            found.append(at if alone else slice(at, at + count))
            at += count
        return found

    def _choose(self, chosen: Selection, samples: Any, balance: str | None, options: dict[str, Any]) -> None:
        """Set the samples to use, and their order."""
        given: Any = self._columns if self._columns is not None else list(self._paths)
        found: npt.NDArray[np.int64] | None = None
        if chosen:
            with closing(type(self)(given, features=chosen.columns, **options)) as columns:
                found = chosen.numbers(columns)
        if samples is not None:
            some = _rising(samples, self._starts[-1] if found is None else len(found))
            found = some if found is None else found[some]
        if found is None and balance is None:
            return
        rising = [np.arange(self._starts[-1]) if found is None else found]
        if balance is not None:
            asked = f"balance={balance!r}"
            try:
                column = type(self)(given, features=balance, samples=found, vocabulary=TEXTS_STAY, **options)
            except ConfigurationError as error:
                raise ConfigurationError(f"{asked}: {error}") from None
            with closing(column):
                rising = [rising[0][some] for some in evenly(value_of_each(column, asked), asked)]
        # A block never has samples of two files, nor the same sample twice.
        counts = np.concatenate([np.diff(np.searchsorted(some, self._starts)) for some in rising])
        self.lengths, self.grain = counts[counts > 0].tolist(), 1
        self._samples = np.concatenate(rising)

    def _warn_of_many(self) -> None:
        if self._starts[-1] > _MANY_SAMPLES:
            warn(
                f"{self.files[0]}{' and others' if len(self.files) > 1 else ''}: an epoch has "
                f"{self._starts[-1]} samples; at a million samples a second it takes "
                f"{self._starts[-1] / 86400e6:.1f} days. If so many are not meant, look at the files "
                "with h5ls"
            )

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


class HDF5Source(FileSource):
    """The samples of a list of HDF5 files, whatever their names; see `FileSource`."""

    _format: ClassVar[Format | None] = HDF5()


def _check_adaptors(**adaptors: Adaptor | None) -> None:
    for name, adaptor in adaptors.items():
        if adaptor is not None and not callable(adaptor):
            raise ConfigurationError(f"{name}={adaptor!r} is not a function; give one that takes arrays")


def _check_needs(*, mask: bool, pad: int | None, copy_command: Sequence[str] | None, stage_to: Any) -> None:
    if mask and pad is None:
        raise ConfigurationError("mask=True needs pad=, the length to bring rows to; pass it, too")
    if copy_command is not None and stage_to is None:
        raise ConfigurationError(
            f"copy_command={list(copy_command)} was given without stage_to=; pass a local folder for it"
        )


def _names_of(kind: Format, path: str, locking: bool | None) -> list[str]:
    try:
        return kind.names(path, locking)
    except Exception as error:  # libraries raise what they like about damaged files
        raise as_configuration(path, error) from None


def _has(kind: Format, path: str, locking: bool | None) -> str:
    try:
        names = _names_of(kind, path, locking)
    except NNLOError:  # what is missing in the call comes first
        return ""
    return f"; {path} has {shown(names, 'no datasets')}" if names else ""


def _rising(samples: Any, size: int) -> npt.NDArray[np.int64]:
    found = np.asarray(samples)
    if found.ndim == 1 and found.dtype.kind in "iu" and len(found):
        numbers = found.astype(np.int64)  # differences of unsigned ones are never below 0
        if (numbers >= 0).all() and numbers[-1] < size and (np.diff(numbers) > 0).all():
            return numbers
    raise ConfigurationError(
        f"samples={samples!r:.80}: give rising whole numbers from 0 to {size - 1}, the last sample"
    )
