"""Objects of a volume over ranks: the maps of all pieces, what crosses their faces, then the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import whole_file
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.inference._journal import full_disk
from nnlo_common.inference._objects import (
    FacesWork,
    FoundRows,
    Labelling,
    MapSink,
    ObjectIds,
    PieceMaps,
    Pieces,
    RowsWork,
    joined,
    remove_maps,
    rows_of,
    table_of_objects,
    whole_of,
)
from nnlo_common.inference._pieces import Following, PieceWork, run_pieces
from nnlo_common.inference._running import (
    RecordedJob,
    Watch,
    WriteQueue,
    agreed,
    open_journal,
    share_of,
    teller,
    together,
)
from nnlo_common.inference.sinks import Region, Regions, Sink, Whole, ZarrSink

__all__ = ["FoundObjects", "MapRun", "ObjectOptions", "find_objects"]


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """What to find in the map of a volume.

    Attributes:
        labelling: labels a piece of the map; None: no objects.
        rows: finds points or boxes; None: none.
        table: whether to write a table of objects.
    """

    labelling: Labelling | None = None
    rows: FoundRows | None = None
    table: bool = False

    @property
    def what(self) -> str:
        """What is found, for errors."""
        return "objects" if self.rows is None else "points and boxes"


@dataclass(frozen=True, kw_only=True)
class FoundObjects:
    """What was found.

    Attributes:
        missing: pieces that other jobs of an array have yet to do.
        count: how many there are.
        rows: the points or boxes.
    """

    missing: int = 0
    count: int = 0
    rows: npt.NDArray[Any] | None = None


class MapRun(Pieces):
    """A job of tiles, as it is seen here."""

    wholes: Mapping[str, Whole]
    spatial: str
    has_items: bool

    def regions(self, piece: int) -> Regions:
        """Return what a piece fills of each array."""
        raise NotImplementedError

    def work(self, sink: Sink) -> PieceWork:
        """Return a rank's work, which writes to a sink."""
        raise NotImplementedError


def find_objects(
    run: MapRun,
    path: Path,
    options: ObjectOptions,
    *,
    facts: Mapping[str, Any],
    world: RankWorld | None,
    part: tuple[int, int] | None,
    overwrite: bool,
    compression: str | None,
    progress: bool,
    watch: Watch,
    sink_class: Callable[[Path], type[Sink]],
) -> FoundObjects:
    """Compute the maps of all pieces, and find objects in them (collective).

    Args:
        run: the job of tiles.
        path: of the result: labels, or rows.
        options: what to find.
        facts: all that determines the result.
        world: the ranks.
        part: of a job array: the last job finds the objects, alone.
        overwrite: remove an earlier result.
        compression: of the result.
        progress: print how far it is.
        watch: is told how far it is, too.
        sink_class: returns the class of sinks for a path.
    """
    first = world is None or world.rank == 0
    with together(world):
        name, one = whole_of(run.wholes, len(run.spatial), run.has_items, options.what)
        if options.rows is not None and path.suffix != ".npy":
            raise ConfigurationError(f"{path}: points and boxes are rows of numbers; name a .npy file")
        sink_class(path)
        if first and not overwrite and path.exists():
            raise ConfigurationError(
                f"{path} exists already; name another file, delete it, or overwrite it with --overwrite "
                "(overwrite=True)"
            )
    agreed(world, facts)
    maps = PieceMaps(path.with_name(path.name + ".maps"), run)
    with ExitStack() as opened:
        sink = MapSink(maps, options.labelling)
        there = maps.folder.parent.with_suffix("")
        journal = open_journal(there, facts, world, part=part, overwrite=overwrite, first=sink.prepare)
        opened.callback(journal.close)
        with together(world):
            watch.begin()
        tell = teller("nnlo tile", watch, progress=progress)
        told = _done(run, sink, journal, run.work(sink), world, share=share_of(run.pieces, part), tell=tell)
    if told["missing"]:
        return FoundObjects(missing=told["missing"])
    if options.rows is not None:
        found = _rows(run, maps, options.rows, path=path, world=world)
    else:
        found = _labels(
            run,
            maps,
            options,
            whole=(name, one),
            path=path,
            facts=facts,
            world=world,
            overwrite=overwrite,
            compression=compression,
            sink_class=sink_class,
        )
    if first:
        remove_maps(maps)
    return found


def _done(
    run: MapRun,
    sink: Sink,
    journal: Any,
    work: Any,
    world: RankWorld | None,
    *,
    share: range | None = None,
    tell: Callable[[int, int], object] = lambda done, pieces: None,
) -> Any:
    """Do all pieces of a phase."""
    job = None
    if world is None or world.rank == 0:
        job = RecordedJob(run.pieces, sink, run.regions, journal, share=share, progress=tell)
    if not hasattr(work, "close"):
        return run_pieces(world, job, work)
    with closing(work):
        return run_pieces(world, job, work)


def _rows(
    run: MapRun, maps: PieceMaps, rows: FoundRows, *, path: Path, world: RankWorld | None
) -> FoundObjects:
    told = _done(run, MapSink(maps, None), None, RowsWork(maps, rows), world)
    with together(world):
        found = rows_of(told["notes"])
        if world is None or world.rank == 0:
            try:
                with whole_file(path) as file:
                    np.save(file, found, allow_pickle=False)
            except OSError as error:
                raise full_disk(path, error) from None
    return FoundObjects(count=len(found), rows=found)


def _labels(
    run: MapRun,
    maps: PieceMaps,
    options: ObjectOptions,
    *,
    whole: tuple[str, Whole],
    path: Path,
    facts: Mapping[str, Any],
    world: RankWorld | None,
    overwrite: bool,
    compression: str | None,
    sink_class: Callable[[Path], type[Sink]],
) -> FoundObjects:
    assert options.labelling is not None
    name, one = whole
    first = world is None or world.rank == 0
    with together(world):
        faces = FacesWork(maps, options.labelling.connectivity)
    told = _done(run, MapSink(maps, None), None, faces, world)
    ids = ObjectIds(faces.bases, *joined(dict(enumerate(told["notes"]))))
    with together(world):
        sink = sink_class(path)(path, {name: Whole(one.shape, ids.dtype)}, compression=compression)
        if isinstance(sink, ZarrSink):
            sink.chunked(run.regions)
    with ExitStack() as opened:
        facts = {**facts, "objects in all": ids.count}
        journal = open_journal(path, facts, world, part=None, overwrite=overwrite, first=sink.prepare)
        opened.callback(journal.close)
        _done(run, sink, journal, _NumberWork(run, maps, ids, sink, name), world)
        with together(world):
            if first and options.table:
                table_of_objects(maps, ids, run.spatial, path.with_name(path.name + ".csv"))
        if first:
            journal.forget()
    return FoundObjects(count=ids.count)


class _NumberWork:
    """Gives the labels of a piece the numbers of their objects."""

    def __init__(self, run: MapRun, maps: PieceMaps, ids: ObjectIds, sink: Sink, name: str) -> None:
        self._run, self._maps, self._ids, self._sink, self._name = run, maps, ids, sink, name
        self._queue = WriteQueue()

    def begin(self, piece: int, following: Following) -> Iterator[None]:  # noqa: ARG002 - nothing is read ahead
        """Number a piece."""
        region: Region = self._run.regions(piece)[self._name]
        numbers = self._ids.of_piece(piece).astype(self._ids.dtype)[self._maps.load(piece, "map")]
        array = numbers.reshape(tuple(one.stop - one.start for one in region))

        def write() -> None:
            writer = self._sink.begin(piece, self._run.regions(piece))
            writer.write(self._name, region, array)
            writer.close()

        self._queue.end(piece, None, write)
        yield

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Return the pieces that are written."""
        return self._queue.finished(wait=wait)

    def close(self) -> None:
        """End the thread."""
        self._queue.close()
