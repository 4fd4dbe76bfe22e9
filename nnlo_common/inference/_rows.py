"""Prediction: a model's outputs for each sample of a source, once and in order, over all ranks.

    reader thread ─► batch ─► model ─► (function on the outputs) ─► writer thread ─► sink
                       └────────── columns copied through ──────────────┘

Requirements that shaped this module:

* The batches are cut from the whole, never from a rank's share: the arithmetic of a row does not depend on
  how many ranks there are, nor on which of them died.
* Memory is constant: a few batches are read ahead, and a few wait for the disk.
* The result of a batch is fetched when the next one has begun, so that a GPU computes meanwhile.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.base._arguments import function_given, whole_number
from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.data import Field, FileSource, Prefetch, Reading, Source
from nnlo_common.inference._figures import Figure, added, as_json, results
from nnlo_common.inference._journal import ResultJournal
from nnlo_common.inference._pieces import Following, run_pieces
from nnlo_common.inference._running import (
    PiecesOut,
    RecordedJob,
    ResultKeywords,
    ResultOptions,
    Watch,
    agreed,
    array_share,
    open_journal,
    share_of,
    teller,
    together,
)
from nnlo_common.inference._structure import Named, changed, named_arrays
from nnlo_common.inference.sinks import FORMATS, MemorySink, Region, Sink, Whole, ZarrSink

__all__ = [
    "ArraySource",
    "BatchModel",
    "Ensemble",
    "PredictKeywords",
    "PredictOptions",
    "Prediction",
    "files_in",
    "models_in",
    "one_model",
    "predict_options",
    "predict_rows",
    "sink_class",
    "source_of",
    "written",
]

_MOST_PIECES, _FEW_PIECES = 1024, 64
_PIECE_BYTES = 2**20  # smaller pieces cost more in files than they bring in balance
_SLAB_BYTES = 2**24  # read at once
_WRITE_BYTES = 2**20  # written at once: the libraries of files keep the interpreter for each call


class BatchModel(Protocol):
    """A model, as its framework calls it."""

    def begin(self, features: Any) -> Any:
        """Begin to compute a batch; return a handle."""

    def result(self, handle: Any) -> Any:
        """Wait for a batch, and return its outputs: a structure of NumPy arrays."""


class Ensemble:
    """Several models as one: each output is their mean; NAME_spread is their standard deviation.

    Args:
        members: the models.

    Example:
        >>> class Times:
        ...     def __init__(self, factor):
        ...         self.factor = factor
        ...     def begin(self, features):
        ...         return features
        ...     def result(self, handle):
        ...         return handle * self.factor
        >>> both = Ensemble([Times(1.0), Times(3.0)])
        >>> both.result(both.begin(np.ones(2)))
        {'prediction': array([2., 2.]), 'prediction_spread': array([1., 1.])}
    """

    def __init__(self, members: Sequence[BatchModel]) -> None:
        self._members = members

    def begin(self, features: Any) -> Any:
        """Begin to compute a batch with all models."""
        return [one.begin(features) for one in self._members]

    def result(self, handle: Any) -> Named:
        """Return means and spreads by name."""
        every = [
            named_arrays(member.result(one), "the model")
            for member, one in zip(self._members, handle, strict=True)
        ]
        found: Named = {}
        for name, first in every[0].items():
            try:
                stack = np.stack([one[name] for one in every])
            except (KeyError, ValueError):
                raise ConfigurationError(
                    f"the models differ in their output {name!r}; give models with the same outputs"
                ) from None
            kind = first.dtype if first.dtype.kind == "f" else np.dtype("f4")
            found[name] = stack.mean(0, dtype="f8").astype(kind)
            found[f"{name}_spread"] = stack.std(0, dtype="f8").astype(kind)
        return found


class ArraySource:
    """Arrays in memory, in any structure, as a source; a batch has the same structure.

    Args:
        structure: of arrays of equal length.
        name: of the argument, for errors.

    Example:
        >>> source = ArraySource({"x": np.arange(3), "y": np.zeros((3, 2))}, "data")
        >>> source.assemble([array[:2] for array in source.arrays])
        ({'x': array([0, 1]), 'y': array([[0., 0.],
               [0., 0.]])},)
    """

    grain = 1

    def __init__(self, structure: Any, name: str) -> None:
        named = named_arrays(structure, name)
        lengths = {key: len(one) if one.ndim else 0 for key, one in named.items()}
        if len(set(lengths.values())) > 1 or not next(iter(lengths.values())):
            raise ConfigurationError(
                f"{name} has arrays of the lengths {lengths}; give arrays with equally many rows"
            )
        self._structure, self.arrays = structure, [*named.values()]
        self.lengths: Sequence[int] = [len(self.arrays[0])]
        self.fields: Sequence[Field] = [Field(key, one.shape[1:], one.dtype) for key, one in named.items()]

    def read(self, start: int, stop: int, out: Sequence[npt.NDArray[Any]]) -> None:
        """Copy a slice of each array."""
        for array, into in zip(self.arrays, out, strict=True):
            into[:] = array[start:stop]

    def assemble(self, arrays: Sequence[npt.NDArray[Any]]) -> Any:
        """Return a batch: a tuple with the structure."""
        rest = iter(arrays)
        return (changed(self._structure, lambda _: next(rest)),)

    def close(self) -> None:
        """Do nothing."""


class PredictKeywords(Reading, ResultKeywords, total=False):
    """Options of `PredictOptions` and of reading files, for callers that pass them on."""

    batch_size: int
    keep: Sequence[str] | Mapping[str, Any]
    apply: Callable[[Any], Any] | None
    figures: Mapping[str, Figure]


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ResultOptions):
    """Options of a prediction, beside those of `ResultOptions`.

    Attributes:
        batch_size: samples that the model gets at once.
        keep: columns to copy into the result: names of columns of the files, or arrays by name.
        apply: a function of the outputs of a batch, NumPy arrays in the model's structure; what it returns is
            written.
        figures: figures of merit over all samples, by name; see `nnlo_common.Figure`.

    Example:
        >>> PredictOptions(batch_size=1000, dtype="float16").batch_size
        1000
    """

    batch_size: int = 256
    keep: Sequence[str] | Mapping[str, Any] = ()
    apply: Callable[[Any], Any] | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)
        function_given("apply", self.apply, may_miss=True)
        super().__post_init__()
        wrong = [name for name, one in self.figures.items() if not isinstance(one, Figure)]
        if wrong:
            raise ConfigurationError(
                f"figures has {wrong[0]!r}, which is not a Figure; give nnlo_common.Figure(sums=..., "
                f"result=...)"
            )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The outcome of a prediction, the same on all ranks.

    Attributes:
        rows: the number of samples.
        outputs: without a file, the output as an array, or several and the kept columns by name; else None.
        path: of the file; None: there is none.
        figures: the figures of merit, by name.
        missing: pieces that other jobs of an array have yet to do; the figures and the file come with the
            last.
        seconds: how long it took.
        unknown: of each column with a vocabulary, how many values there are, and how many of them it does
            not know; they came with the figures.

    Example:
        >>> Prediction(rows=3, outputs=np.zeros(3)).path is None
        True
    """

    rows: int
    outputs: Any = None
    path: Path | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    missing: int = 0
    seconds: float = 0.0
    unknown: Mapping[str, Sequence[int]] = field(default_factory=dict)


def sink_class(path: Path | None) -> type[Sink]:
    """Return the class of sinks for a file, by its suffix."""
    if path is None:
        return MemorySink
    found = FORMATS.get(path.suffix.lower())
    if found is None:
        raise ConfigurationError(
            f"{path} ends in {path.suffix or 'nothing'}; name a file in {', '.join(FORMATS)}"
        )
    return found


def models_in(model: Any, kind: type[Any], called: str) -> list[Any]:
    """Return the models that a user passes: one, or several.

    Args:
        model: as passed.
        kind: the class of models.
        called: its name, with an article.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    if not models or not all(isinstance(one, kind) for one in models):
        raise ConfigurationError(f"model={model!r:.60}: give {called}, or several")
    return models


def one_model(model: Any, kind: type[Any], called: str) -> Any:
    """Return the model that a user passes; refuse several."""
    models = models_in(model, kind, called)
    if len(models) > 1:
        raise ConfigurationError(f"there are {len(models)} models, but this is for one model; give {called}")
    return models[0]


def source_of(data: Any, reading: Reading, array: Callable[[Any], Any]) -> Any:
    """Return the source of what a user passes as data.

    Args:
        data: files, a source, or arrays.
        reading: options for files.
        array: converts a framework's tensor.
    """
    if files_in(data):
        # Each sample is read once, so that keeping it in memory would save nothing.
        options: Any = {"cache": "none", **reading}
        return FileSource(data, **options)
    if hasattr(data, "read") and hasattr(data, "assemble"):
        return data
    if reading:
        raise ConfigurationError(f"{min(reading)}= is about files, but the data are arrays; leave it out")
    return ArraySource(changed(data, array), "data")


def files_in(data: Any) -> bool:
    """Return whether data are named by files."""
    several = (
        isinstance(data, list | tuple) and bool(data) and all(isinstance(one, str | Path) for one in data)
    )
    return isinstance(data, str | Path) or several


class Divided(Protocol):
    """A result in pieces."""

    @property
    def pieces(self) -> int:
        """Their number."""

    @property
    def wholes(self) -> Mapping[str, Whole]:
        """The arrays, by name."""

    def regions(self, piece: int) -> dict[str, Region]:
        """Return what a piece fills of each array."""

    def facts(self, model: str) -> dict[str, Any]:
        """Return all that determines the result."""


def written(
    divided: Divided,
    work_on: Callable[[Sink], Any],
    place: Path | None,
    options: Any,
    *,
    part: tuple[int, int] | None,
    world: RankWorld | None,
    model: str,
    called: str,
) -> tuple[Any, Mapping[str, Any]]:
    """Compute all pieces of a result and write them, each once (collective).

    Args:
        divided: the result.
        work_on: makes this rank's work on a sink.
        place: the file; None: memory.
        options: `compression`, `overwrite`, `progress` and `watch`.
        part: the part of a job array.
        world: the ranks; None: this process alone.
        model: what tells the model from another one.
        called: the name of the job, for its progress.

    Returns:
        The outputs, if they are in memory, and what the first rank has told all at the end.
    """
    with ExitStack() as opened:
        with together(world):
            sink = sink_class(place)(place or Path(), divided.wholes, compression=options.compression)
            if isinstance(sink, ZarrSink):
                sink.chunked(divided.regions)
        facts = divided.facts(model)
        agreed(world, facts)
        journal: ResultJournal | None = None
        if place is not None:
            journal = open_journal(
                place, facts, world, part=part, overwrite=options.overwrite, first=sink.prepare
            )
            opened.callback(journal.close)
        with together(world):
            options.watch.begin()
        job = None
        if world is None or world.rank == 0:
            share = share_of(divided.pieces, part)
            tell = teller(called, options.watch, progress=options.progress)
            job = RecordedJob(divided.pieces, sink, divided.regions, journal, share=share, progress=tell)
        with closing(work_on(sink)) as work:
            told = run_pieces(world, job, work)
        if isinstance(sink, MemorySink) and world is not None:
            sink.exchange(world)
        if job is not None and journal is not None and not told["missing"]:
            journal.forget()
    if not isinstance(sink, MemorySink):
        return None, told
    return next(iter(sink.arrays.values())) if len(sink.arrays) == 1 else sink.arrays, told


def predict_options(options: PredictKeywords, watch: Watch) -> tuple[PredictOptions, Reading]:
    """Return options of a prediction, and those of reading its files.

    Args:
        options: of both.
        watch: is told how far the prediction is.

    Example:
        >>> chosen, reading = predict_options({"batch_size": 10, "features": "x"}, Watch())
        >>> chosen.batch_size, reading
        (10, {'features': 'x'})
    """
    of_files: Any = {name: one for name, one in options.items() if name in Reading.__annotations__}
    rest: Any = {name: one for name, one in options.items() if name not in of_files}
    return PredictOptions(**rest, watch=watch), of_files


def predict_rows(
    compute: BatchModel,
    data: Any,
    path: str | Path | None,
    options: PredictOptions,
    *,
    world: RankWorld | None,
    model: str,
    reading: Reading | None = None,
    array: Callable[[Any], Any] = np.asarray,
) -> Prediction:
    """Compute the outputs of all samples of a source (collective).

    Args:
        compute: the model.
        data: files, arrays or a source; the first item of a source's batches is what the model gets.
        path: of the file to write; None: return the outputs.
        options: of the prediction.
        world: the ranks; None: this process alone.
        model: what tells the model from another one, e.g. a checksum of its weights.
        reading: options for files.
        array: converts a framework's tensor.
    """
    began_s = time.perf_counter()
    if world is not None and world.size == 1:
        world = None
    with ExitStack() as opened:
        with together(world):
            part = array_share(options.part, os.environ)
            source = source_of(data, reading or {}, array)
            if source is not data:
                opened.callback(source.close)
            kept = _kept(options.keep, data if files_in(data) else None, sum(source.lengths), reading or {})
            if kept is not None:
                opened.callback(kept.close)
            rows = _Rows(compute, source, kept, options)
            place = None if path is None else Path(path).expanduser().absolute()
            if place is None and part is not None:
                raise ConfigurationError(
                    "a part of a prediction without a file is lost; name one (out=, or --out)"
                )
        outputs, told = written(
            rows, rows.writing_to, place, options, part=part, world=world, model=model, called="nnlo predict"
        )
    return Prediction(
        rows=rows.size,
        outputs=outputs,
        path=place,
        figures=results(options.figures, told["notes"]) if told["notes"] else {},
        missing=told["missing"],
        seconds=time.perf_counter() - began_s,
        unknown=_added_counts(note.get("unknown", {}) for note in told["notes"]),
    )


def _added_counts(parts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Return the sums of several lists of counts, by name."""
    found: dict[str, list[int]] = {}
    for part in parts:
        for name, counts in part.items():
            before = found.get(name, [0] * len(counts))
            found[name] = [one + other for one, other in zip(before, counts, strict=True)]
    return found


def _kept(keep: Sequence[str] | Mapping[str, Any], files: Any, rows: int, reading: Reading) -> Any:
    """Return the source of the columns to keep; None: there are none."""
    if not keep:
        return None
    chosen: Any = {name: one for name, one in reading.items() if name in ("select", "samples")}
    if isinstance(keep, Mapping):
        source: Any = ArraySource({name: np.asarray(one) for name, one in keep.items()}, "keep")
    elif files is None:
        raise ConfigurationError(
            f"keep={keep!r}: the data are arrays, not files; give the columns as arrays by name, "
            f"keep={{'id': ids}}"
        )
    else:
        source = FileSource(files, features=[keep] if isinstance(keep, str) else list(keep), **chosen)
    if sum(source.lengths) != rows:
        raise ConfigurationError(f"keep has {sum(source.lengths)} rows, but there are {rows} samples")
    return source


class _Rows:
    """The batches and pieces of a prediction, and what the model makes of them."""

    def __init__(self, compute: BatchModel, source: Source, kept: Any, options: PredictOptions) -> None:
        self.compute, self.source, self.kept, self.options = compute, source, kept, options
        self.size = sum(source.lengths)
        self.batch = min(options.batch_size, max(self.size, 1))
        if not self.size:
            raise ConfigurationError("there are no samples to predict; give data with some")
        self.kept_names = [] if kept is None else [one.name.strip("/") for one in kept.fields]
        self.wholes = self._tried()
        row_bytes = sum(math.prod(one.shape[1:]) * one.dtype.itemsize for one in self.wholes.values())
        batches = math.ceil(self.size / self.batch)
        worth = math.ceil(_PIECE_BYTES / max(row_bytes * self.batch, 1))
        self.per_piece = max(math.ceil(batches / _MOST_PIECES), min(worth, math.ceil(batches / _FEW_PIECES)))
        self.pieces = math.ceil(batches / self.per_piece)

    def span(self, piece: int) -> tuple[int, int]:
        """Return the rows of a piece."""
        size = self.per_piece * self.batch
        return piece * size, min((piece + 1) * size, self.size)

    def regions(self, piece: int) -> dict[str, Region]:
        """Return what a piece fills of each array."""
        start, stop = self.span(piece)
        return {name: self.region(name, start, stop) for name in self.wholes}

    def region(self, name: str, start: int, stop: int) -> Region:
        """Return the region of some rows."""
        return (slice(start, stop), *(slice(0, size) for size in self.wholes[name].shape[1:]))

    def facts(self, model: str) -> dict[str, Any]:
        """Return all that determines the result."""
        apply = self.options.apply
        return {
            "model": model,
            "samples": self.size,
            "data": self._mark(),
            "inputs": [[one.name, list(one.shape), str(one.dtype)] for one in self.source.fields],
            "outputs": {name: [list(one.shape), str(one.dtype)] for name, one in self.wholes.items()},
            "batch_size": self.batch,
            "rows in a piece": self.per_piece * self.batch,
            "apply": None if apply is None else getattr(apply, "__qualname__", type(apply).__name__),
            "figures": [*self.options.figures],
            "compression": self.options.compression,
            **getattr(self.source, "prepared", dict)(),
        }

    def writing_to(self, sink: Sink) -> _RowWork:
        """Return this rank's work."""
        return _RowWork(self, sink)

    def read(self, span: tuple[int, int]) -> tuple[list[Any], list[Any]]:
        """Read some rows: the model's, and those to keep."""
        start, stop = span
        found: list[list[Any]] = []
        for source in (self.source, self.kept):
            arrays = [] if source is None else [one.empty(stop - start) for one in source.fields]
            if source is not None:
                source.read(start, stop, arrays)
            found.append(arrays)
        return found[0], found[1]

    def outputs(self, handle: Any, rows: int) -> Named:
        """Return the outputs of a batch by name, ready to be written."""
        outputs, whose = self.compute.result(handle), "the model"
        if self.options.apply is not None:
            whose = "apply"
            outputs = self.options.apply(outputs)
        named = named_arrays(outputs, whose, rows)
        if self.options.dtype is not None:
            named = {
                name: one.astype(self.options.dtype) if one.dtype.kind == "f" else one
                for name, one in named.items()
            }
        return named

    def check(self, named: Named) -> None:
        """Refuse outputs of other shapes or types than those of the first batch."""
        for name, whole in self.wholes.items():
            one = named.get(name)
            if name not in self.kept_names and (
                one is None or one.shape[1:] != whole.shape[1:] or one.dtype != whole.dtype
            ):
                found = "nothing" if one is None else f"{one.dtype} of shape {one.shape[1:]}"
                raise ConfigurationError(
                    f"the output {name!r} was {whole.dtype} of shape {whole.shape[1:]} for the first "
                    f"samples, and now is {found}; return the same for every batch"
                )

    def _tried(self) -> dict[str, Whole]:
        """Compute the first batch, and return the arrays of the result."""
        arrays, kept = self.read((0, self.batch))
        features = self.source.assemble(arrays)[0]
        try:
            named = self.outputs(self.compute.begin(features), self.batch)
        except NNLOError:
            raise
        except Exception as error:
            shapes = ", ".join(
                f"{name} {one.dtype}{list(one.shape)}" for name, one in named_arrays(features, "data").items()
            )
            raise ConfigurationError(
                f"the model, or apply, fails on the first batch ({shapes}): {type(error).__name__}: {error}"
            ) from error
        if both := set(named) & set(self.kept_names):
            raise ConfigurationError(
                f"{min(both)!r} is an output and a column to keep; leave one of them out"
            )
        columns = dict(zip(self.kept_names, kept, strict=True))
        for name, figure in self.options.figures.items():
            _sums_of(figure, name, named, columns)
        return {
            name: Whole((self.size, *one.shape[1:]), one.dtype) for name, one in {**named, **columns}.items()
        }

    def _mark(self) -> int:
        """Return a number that tells the data from others: of the first and the last row."""
        mark = 0
        for row in {0, self.size - 1}:
            for arrays in self.read((row, row + 1)):
                for one in arrays:
                    mark = zlib.crc32(np.ascontiguousarray(one).tobytes(), mark)
        return mark


class _RowWork:
    """One rank's pieces: reading ahead, computing, and writing behind."""

    def __init__(self, rows: _Rows, sink: Sink) -> None:
        self._rows, self._out = rows, PiecesOut(sink, rows.regions)
        self._reading = Prefetch(rows.read)
        row_bytes = sum(one.row_bytes for one in rows.source.fields)
        batches = max(_SLAB_BYTES // max(row_bytes * rows.batch, 1), 1)
        self._slab = min(batches, rows.per_piece) * rows.batch
        self._unwritten: list[tuple[int, int, Named]] = []  # batches in a row: first and last, their columns
        self._unwritten_bytes = 0

    def begin(self, piece: int, following: Following) -> Iterator[None]:
        """Compute a piece, and yield after each batch."""
        rows, under_way = self._rows, None
        start, stop = rows.span(piece)
        self._out.begin(piece)
        sums: dict[str, dict[str, Any]] = {name: {} for name in rows.options.figures}
        unknown: list[Mapping[str, Sequence[int]]] = []
        count = getattr(rows.source, "unknown_in", None)
        for at in range(start, stop, self._slab):
            slab = at, min(at + self._slab, stop)
            arrays, kept = self._reading.get(slab, then=self._next(slab, stop, following))
            if count is not None:
                unknown.append(count(arrays))
            for first in range(*slab, rows.batch):
                last = min(first + rows.batch, slab[1])
                some = slice(first - at, last - at)
                features = rows.source.assemble([one[some] for one in arrays])[0]
                batch = first, last, self._begun(features, first, last), [one[some] for one in kept]
                if under_way is not None:
                    self._end(*under_way, sums)
                under_way = batch
                yield
        assert under_way is not None
        self._end(*under_way, sums)
        self._write()
        note = {"rows": stop - start, "sums": as_json(sums), "unknown": _added_counts(unknown)}
        self._out.end(piece, note)
        yield

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Return the pieces that are written."""
        return self._out.finished(wait=wait)

    def close(self) -> None:
        """End the threads; drop a piece that is not complete."""
        self._reading.close()
        self._out.close()

    def _begun(self, features: Any, first: int, last: int) -> Any:
        try:
            return self._rows.compute.begin(features)
        except Exception as error:
            error.add_note(f"while predicting the samples {first} to {last - 1}")
            raise

    def _end(
        self, first: int, last: int, handle: Any, kept: Sequence[Any], sums: dict[str, dict[str, Any]]
    ) -> None:
        """Take the outputs of a batch, and hand them to the writer."""
        rows = self._rows
        try:
            named = rows.outputs(handle, last - first)
            rows.check(named)
            columns = dict(zip(rows.kept_names, kept, strict=True))
            for name, figure in rows.options.figures.items():
                sums[name] = added(sums[name], _sums_of(figure, name, named, columns), name)
        except Exception as error:
            error.add_note(f"while predicting the samples {first} to {last - 1}")
            raise
        rows.options.watch.batch(last - first)
        every = {**named, **columns}
        self._unwritten.append((first, last, every))
        self._unwritten_bytes += sum(one.nbytes for one in every.values())
        if self._unwritten_bytes >= _WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        """Hand the batches that wait to the writer."""
        batches, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
        for name in batches[0][2] if batches else ():
            parts = [columns[name] for _, _, columns in batches]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self._out.write(name, self._rows.region(name, batches[0][0], batches[-1][1]), whole)

    def _next(self, slab: tuple[int, int], stop: int, following: Following) -> list[tuple[int, int]]:
        """Return the rows to read ahead, if there are any."""
        if slab[1] < stop:
            return [(slab[1], min(slab[1] + self._slab, stop))]
        piece = following()
        if piece is None:
            return []
        start, end = self._rows.span(piece)
        return [(start, min(start + self._slab, end))]


def _sums_of(figure: Figure, name: str, outputs: Named, kept: Named) -> Mapping[str, Any]:
    try:
        return figure.sums(outputs, kept)
    except KeyError as error:
        raise ConfigurationError(
            f"the figure {name!r} asks for {error}; there are the outputs {', '.join(outputs)}, and the "
            f"columns {', '.join(kept) or 'none'} of keep"
        ) from None
