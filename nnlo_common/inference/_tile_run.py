"""Tiles over ranks: each piece of a volume is read once, computed tile by tile, blended and written.

Requirements that shaped this module:

* The scores of all classes exist for one piece only: `reduce` runs before anything is written.
* The sums of a piece are made in the order of its tiles, whoever computes it, so that ranks do not change
  bits.
* Where neighbours blend, a tile counts in several pieces; its outputs are kept while this rank may need them
  again, and computed again elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.data import Prefetch
from nnlo_common.inference._object_run import MapRun, find_objects
from nnlo_common.inference._pieces import Following
from nnlo_common.inference._receptive_field import (
    ReceptiveField,
    check_fits,
    measured_field,
    measured_period,
)
from nnlo_common.inference._rows import BatchModel, sink_class, written
from nnlo_common.inference._running import (
    PiecesOut,
    array_share,
    together,
)
from nnlo_common.inference._structure import Named, named_arrays
from nnlo_common.inference._tile_options import TileOptions
from nnlo_common.inference._tiles import Tile, Tiling, Volume, opened_volume, per_axis
from nnlo_common.inference.sinks import Region, Sink, Whole, ZarrSink

__all__ = ["TileResult", "TileRun", "infer_over_tiles", "run_of", "tile_of"]

_MOST_PIECES = 2048
_PIECE_BYTES = 2**20
# Of the scores of a piece; where tiles are blended, pieces are larger, so that fewer are computed twice.
_LARGEST_PIECE, _LARGEST_BLENDED = 2**26, 2**28
_KEPT_BYTES = 2**29  # of outputs of tiles that other pieces need, too

Place = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class TileResult:
    """The outcome of an inference by tiles, the same on all ranks.

    Attributes:
        shape: of the volume.
        tiles: how many tiles it was cut into.
        margin: what did not count at their inner faces.
        outputs: without a file, the output as an array, or several by name; else None.
        path: of the file; None: there is none.
        missing: pieces that other jobs of an array have yet to do.
        objects: how many objects, points or boxes there are.
        rows: the points or boxes; None: none were asked for.
        seconds: how long it took.

    Example:
        >>> TileResult(shape=(8, 8), tiles=4, margin=(1, 1)).missing
        0
    """

    shape: tuple[int, ...]
    tiles: int
    margin: tuple[int, ...]
    outputs: Any = None
    path: Path | None = None
    missing: int = 0
    objects: int = 0
    rows: Any = None
    seconds: float = 0.0


class TileRun(MapRun):
    """What a job of tiles consists of, as one rank sees it before anything is computed.

    Args:
        compute: the model, of batches (tiles, channels, ...).
        volume: to cut.
        options: of the job.
        field: the receptive field, or its period alone, if it was measured.
        even: pieces are to be whole chunks of a file.

    Attributes:
        tiling: the tiles.
        wholes: the arrays of the result.
        score_bytes: that the model's outputs have for each voxel.
        voxel_bytes: that the result has for each voxel.
        tried: the outputs of the first tiles of the first item, by their places, which the first work takes.
    """

    def __init__(
        self,
        compute: BatchModel,
        volume: Volume,
        options: TileOptions,
        field: ReceptiveField | None = None,
        *,
        even: bool = False,
    ) -> None:
        self.compute, self.volume, self.options, self.field = compute, volume, options, field
        axes, tile = volume.spatial, tile_of(volume, options)
        unknown = set(options.flips) - set(axes)
        if unknown:
            raise ConfigurationError(
                f"flips={options.flips!r}: there is no axis {min(unknown)!r}, only {axes}"
            )
        self.flips = [
            flip for count in range(len(options.flips) + 1) for flip in combinations(options.flips, count)
        ]
        margin, multiple = self._margin()
        overlap = options.overlap
        if overlap is None:
            overlap = 0 if options.blend == "crop" else tuple(one // 4 for one in tile)
        for name, one, step in zip(axes, tile, multiple, strict=True):
            if one % step and one < volume.shape[axes.index(name)]:
                raise ConfigurationError(
                    f"a tile of {one} along {name} is not a multiple of {step}, by which the network's "
                    f"strides divide it; give {-(-one // step) * step}"
                )
        self.tiling = Tiling(
            shape=volume.shape,
            tile=tile,
            margin=margin,
            overlap=per_axis("overlap", overlap, axes, 0),
            multiple=multiple,
            blend=options.blend,
            names=axes,
            even=even,
        )
        _ = self.tiling.axes  # refuses a margin too large
        self.wholes = self._tried()
        voxel = self.voxel_bytes = sum(
            math.prod(one.shape) * one.dtype.itemsize / math.prod(volume.shape) / volume.items
            for one in self.wholes.values()
        )
        largest = _LARGEST_PIECE if options.blend == "crop" else _LARGEST_BLENDED
        self.tiling = self.tiling.grouped(
            math.ceil(voxel),
            most=_MOST_PIECES // volume.items or 1,
            least_bytes=_PIECE_BYTES,
            tiles=options.batch_size,
            largest_bytes=int(largest * voxel / max(self.score_bytes, 1)) + 1,
        )

    def work(self, sink: Sink) -> _TileWork:
        """Return a rank's work, which writes to a sink."""
        return _TileWork(self, sink)

    @property
    def spatial(self) -> str:  # type: ignore[override]
        """The names of the axes that are cut."""
        return self.volume.spatial

    @property
    def has_items(self) -> bool:  # type: ignore[override]
        """Whether there are several volumes."""
        return self.volume.has_items

    @property
    def pieces(self) -> int:
        """How many pieces there are, of all items."""
        return self.volume.items * self.tiling.pieces

    def place(self, piece: int) -> tuple[int, Region]:
        """Return the item and the region of a piece."""
        item, number = divmod(piece, self.tiling.pieces)
        return item, self.tiling.piece(number)

    def regions(self, piece: int) -> dict[str, Region]:
        """Return what a piece fills of each array."""
        item, region = self.place(piece)
        return {name: self.region(name, item, region) for name in self.wholes}

    def region(self, name: str, item: int, region: Region) -> Region:
        """Return the place of a region in an array."""
        shape, lead = self.wholes[name].shape, list[slice]()
        if self.volume.has_items:
            lead.append(slice(item, item + 1))
        lead += [slice(0, size) for size in shape[len(lead) : len(shape) - len(region)]]
        return (*lead, *region)

    def input_of(self, piece: int) -> tuple[int, Region]:
        """Return the item and the region of it that a piece needs."""
        item, region = self.place(piece)
        tiles = [tile for _, tile in self.tiling.tiles_of(region)]
        return item, tuple(
            slice(min(tile.cuts[axis].start for tile in tiles), max(tile.cuts[axis].stop for tile in tiles))
            for axis in range(len(region))
        )

    def facts(self, model: str) -> dict[str, Any]:
        """Return all that determines the result."""
        options, tiling = self.options, self.tiling
        return {
            "model": model,
            "volume": [
                list(self.volume.shape),
                self.volume.items,
                self.volume.channels,
                str(self.volume.dtype),
            ],
            "data": self.volume.mark(),
            "outputs": {name: [list(one.shape), str(one.dtype)] for name, one in self.wholes.items()},
            "tile": list(tiling.tile),
            "margin": list(tiling.margin),
            "overlap": list(tiling.overlap),
            "multiple": list(tiling.multiple),
            "group": list(tiling.group),
            "blend": options.blend,
            "batch_size": options.batch_size,
            "reduce": _called(options.reduce),
            "flips": options.flips,
            "finds": [_called(options.objects), _called(options.points), _called(options.boxes)],
            "connectivity": options.connectivity,
            "context": options.context,
            "compression": options.compression,
        }

    def begin(self, tiles: Sequence[npt.NDArray[Any]]) -> list[Any]:
        """Begin to compute tiles of one shape, for each flip."""
        batch = np.stack(tiles)
        return [
            self.compute.begin(np.ascontiguousarray(np.flip(batch, self._axes(flip)))) for flip in self.flips
        ]

    def outputs(self, handles: Sequence[Any], shape: tuple[int, ...], count: int) -> Named:
        """Return the outputs of tiles, with channels in front of each, as the mean over flips."""
        total: Named = {}
        for flip, handle in zip(self.flips, handles, strict=True):
            for name, one in named_arrays(self.compute.result(handle), "the model", count).items():
                check_fits(name, one, shape)
                full = one.reshape(count, -1, *shape)
                if len(self.flips) > 1:  # whole numbers of few bits would overflow
                    full = full.astype(_type_of_means(one), copy=False)
                back = np.flip(full, self._axes(flip)) if flip else full
                total[name] = total[name] + back if name in total else back
        if len(self.flips) > 1:
            total = {name: one / np.float32(len(self.flips)) for name, one in total.items()}
        return total

    def reduced(self, outputs: Named) -> Named:
        """Return what is written of a region: of arrays (channels, ...)."""
        reduce = self.options.reduce
        given: Any = outputs
        if reduce is not None:
            given = next(iter(outputs.values())) if len(outputs) == 1 else outputs
            if not callable(reduce) and len(outputs) > 1:
                raise ConfigurationError(
                    f"reduce={reduce!r} is for one output, but the model has {', '.join(outputs)}; give a "
                    f"function"
                )
            if reduce == "argmax":
                given = given.argmax(0).astype(np.min_scalar_type(max(len(given) - 1, 1)))
            elif callable(reduce):
                given = reduce(given)
            else:
                given = (given > reduce).astype(np.uint8)
        found = named_arrays(given, "reduce" if reduce is not None else "the model")
        dtype = self.options.dtype
        if dtype is not None:
            found = {name: one.astype(dtype) if one.dtype.kind == "f" else one for name, one in found.items()}
        return {name: one.astype(np.uint8) if one.dtype.kind == "b" else one for name, one in found.items()}

    def written(self, outputs: Named, region: Region) -> Named:
        """Return what is written of a region, without the axis of a single channel; check its shape."""
        shape = tuple(one.stop - one.start for one in region)
        found = {}
        for name, one in self.reduced(outputs).items():
            if one.shape[-len(shape) :] != shape or one.ndim > len(shape) + 1:
                raise ConfigurationError(
                    f"reduce returned {name!r} of shape {one.shape} for a region of {shape}; it must keep "
                    "the axes of the volume"
                )
            found[name] = one.reshape(shape) if one.size == math.prod(shape) else one
        return found

    def _axes(self, flip: Sequence[str]) -> tuple[int, ...]:
        return tuple(2 + self.volume.spatial.index(one) for one in flip)

    def _margin(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the margin and the alignment for each axis: as given, else as measured."""
        options, axes = self.options, self.volume.spatial
        multiple = per_axis("multiple", options.multiple or 1, axes, 1)
        if options.multiple is None and self.field is not None:
            multiple = tuple(one or 1 for one in self.field.period)
        if options.margin is not None or self.field is None:
            return per_axis("margin", options.margin or 0, axes, 0), multiple
        found = self.field.margin
        if None in found:
            raise ConfigurationError(
                f"the receptive field is unbounded along {axes[found.index(None)]}: each output depends on "
                "all of the volume, as with attention or a normalisation over it, or on more than could be "
                "looked at. Tiles cannot give what the whole volume would; give a margin by hand, e.g. an "
                "eighth of a tile"
            )
        return tuple(one or 0 for one in found), multiple

    def tile_seconds(self) -> float:
        """Return how long the model takes for a tile, with its flips, in a batch as large as the job's."""
        ((_, tile),) = self._first_tiles(1)
        data = self.volume.read(0, tile.region)
        count = min(self.options.batch_size, self.tiling.tiles)
        for _ in range(2):  # the first may compile
            began_s = time.perf_counter()
            self.outputs(self.begin([data] * count), tile.shape, count)
        return (time.perf_counter() - began_s) / count

    def _first_tiles(self, count: int) -> list[tuple[tuple[int, ...], Tile]]:
        """Return the first tiles of one shape, at most so many."""
        every = self.tiling.tiles_of(tuple(slice(0, size) for size in self.volume.shape))
        first = next(every)
        return [first, *(one for one in islice(every, count - 1) if one[1].shape == first[1].shape)]

    def _tried(self) -> dict[str, Whole]:
        """Compute the first tiles, whose pieces take them, and return the arrays of the result."""
        # Two of them, as PyTorch computes some convolutions of one alone several times slower.
        tiles = self._first_tiles(min(self.options.batch_size, 2))
        tile = tiles[0][1]
        data = [self.volume.read(0, one.region) for _, one in tiles]
        try:
            outputs = self.outputs(self.begin(data), tile.shape, len(tiles))
            self.tried = {
                place: {name: one[at].copy() for name, one in outputs.items()}
                for at, (place, _) in enumerate(tiles)
            }
            first = self.tried[tiles[0][0]]
            self.score_bytes = sum(one.nbytes for one in first.values()) // math.prod(tile.shape)
            if self.options.blend != "crop":
                first = {name: one.astype(_type_of_means(one)) for name, one in first.items()}
            written = self.written(dict(first), tile.region)
        except NNLOError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the model, or reduce, fails on a tile of {data[0].dtype}{list(data[0].shape)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        lead = (self.volume.items,) if self.volume.has_items else ()
        return {
            name: Whole((*lead, *one.shape[: one.ndim - len(tile.shape)], *self.volume.shape), one.dtype)
            for name, one in written.items()
        }


def _called(function: Any) -> Any:
    """Return what tells an option that may be a function from others."""
    return getattr(function, "__qualname__", type(function).__name__) if callable(function) else function


def _type_of_means(array: npt.NDArray[Any]) -> np.dtype[Any]:
    """Return the type in which outputs are added up."""
    return np.result_type(array.dtype, np.float32)


def tile_of(volume: Volume, options: TileOptions) -> tuple[int, ...]:
    """Return the shape of a tile: not larger than the volume."""
    asked = per_axis("tile", options.tile, volume.spatial, 1)
    return tuple(min(one, size) for one, size in zip(asked, volume.shape, strict=True))


def run_of(
    compute: BatchModel,
    data: Any,
    options: TileOptions,
    world: RankWorld | None,
    array: Callable[[Any], Any] = np.asarray,
    *,
    path: str | Path | None = None,
) -> TileRun:
    """Open the volume, and measure what is not given (collective); close the volume of the result.

    The first rank measures for all: others may have other hardware, with other rounding.
    """
    with together(world):
        volume = opened_volume(data, options.dataset, options.axes, array)
        tile = tile_of(volume, options)
        measures = (options.margin is None or options.multiple is None) and tile != volume.shape
    field = None
    with together(world):
        if measures and (world is None or world.rank == 0):
            measured = measured_field if options.margin is None else measured_period
            field = measured(compute, volume.channels, volume.dtype, len(tile), tile)
    if measures and world is not None:
        told = None if field is None else [field.before, field.after, field.period]
        field = ReceptiveField(*map(tuple, json.loads(world.gather_text(json.dumps(told), patient=True)[0])))
    with together(world):
        even = path is not None and sink_class(Path(path)) is ZarrSink
        return TileRun(compute, volume, options, field, even=even)


def infer_over_tiles(
    compute: BatchModel,
    data: Any,
    path: str | Path | None,
    options: TileOptions,
    *,
    world: RankWorld | None,
    model: str,
    array: Callable[[Any], Any] = np.asarray,
) -> TileResult:
    """Apply a model to a volume, tile by tile (collective).

    Args:
        compute: the model, of batches (tiles, channels, ...).
        data: the path of a file, or an array.
        path: of the file to write; None: return the outputs.
        options: of the job.
        world: the ranks; None: this process alone.
        model: what tells the model from another one, e.g. a checksum of its weights.
        array: converts a framework's tensor.
    """
    began_s = time.perf_counter()
    if world is not None and world.size == 1:
        world = None
    with ExitStack() as opened:
        with together(world):
            part = array_share(options.part, os.environ)
        run = run_of(compute, data, options, world, array, path=path)
        volume = run.volume
        opened.callback(volume.close)
        with together(world):
            place = None if path is None else Path(path).expanduser().absolute()
            if place is None and part is not None:
                raise ConfigurationError(
                    "a part of a volume without a file is lost; name one (out=, or --out)"
                )
            if place is None and options.found is not None:
                raise ConfigurationError("objects, points and boxes need a file; name one (out=, or --out)")
        if place is not None and options.found is not None:
            result = find_objects(
                run,
                place,
                options.found,
                facts=run.facts(model),
                world=world,
                part=part,
                overwrite=options.overwrite,
                compression=options.compression,
                progress=options.progress,
                watch=options.watch,
                sink_class=sink_class,
            )
            return TileResult(
                shape=volume.shape,
                tiles=run.tiling.tiles * volume.items,
                margin=run.tiling.margin,
                path=place,
                missing=result.missing,
                objects=result.count,
                rows=result.rows,
                seconds=time.perf_counter() - began_s,
            )
        outputs, told = written(
            run,
            run.work,
            place,
            options,
            part=part,
            world=world,
            model=model,
            called="nnlo tile",
        )
    return TileResult(
        shape=volume.shape,
        tiles=run.tiling.tiles * volume.items,
        margin=run.tiling.margin,
        outputs=outputs,
        path=place,
        missing=told["missing"],
        seconds=time.perf_counter() - began_s,
    )


@dataclass(slots=True)
class _PieceSums:
    """The outputs of a piece so far.

    Attributes:
        item: the volume.
        region: of the piece.
        totals: the sums by name, with channels in front.
        weights: the sum of weights; None where tiles are cropped.
    """

    item: int
    region: Region
    totals: Named = field(default_factory=dict)
    weights: npt.NDArray[Any] | None = None


class _TileWork:
    """One rank's pieces: reading ahead, computing, blending and writing behind."""

    def __init__(self, run: TileRun, sink: Sink) -> None:
        self._run, self._out = run, PiecesOut(sink, run.regions)
        self._reading: Prefetch[int, npt.NDArray[Any]] = Prefetch(self._read)
        self._tried, run.tried = run.tried, {}
        self._kept: OrderedDict[Place, Named] = OrderedDict()
        self._kept_bytes = 0
        self._masks: dict[Any, npt.NDArray[Any]] = {}

    def begin(self, piece: int, following: Following) -> Iterator[None]:
        """Compute a piece, and yield after each batch of tiles."""
        run = self._run
        item, region = run.place(piece)
        sums = _PieceSums(item, region)
        tiles = [*run.tiling.tiles_of(region)]
        known = {place: self._tried.pop(place) for place, _ in tiles if item == 0 and place in self._tried}
        ready = dict(known)
        # Taken now: what is kept from this piece on may drop what it needs.
        ready |= {place: self._kept[item, place] for place, _ in tiles if (item, place) in self._kept}
        missing = [one for one in tiles if one[0] not in ready]
        data = None
        if missing:
            data = self._reading.get(piece)
            if (then := following()) is not None:
                self._reading.get(piece, then=[then])
        origin = run.input_of(piece)[1]
        if known:
            run.options.watch.batch(len(known))
        under_way: tuple[list[Any], Any] | None = None
        for batch in _batches(missing, run.options.batch_size):
            assert data is not None
            handles = run.begin([data[(slice(None), *_within(tile.region, origin))] for _, tile in batch])
            if under_way is not None:
                self._take(*under_way, ready, sums)
            under_way = batch, handles
            yield
        if under_way is not None:
            self._take(*under_way, ready, sums)
        if run.options.blend == "crop":
            for place, tile in tiles:
                if place in known:
                    self._add(sums, tile, known[place])
        else:
            # In the order of the tiles, so that it does not matter which of them were kept.
            for place, tile in tiles:
                outputs = ready.pop(place)
                self._add(sums, tile, outputs)
                self._keep(piece, (item, place), tile, outputs)
        self._finish(piece, sums)
        yield

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:
        """Return the pieces that are written."""
        return self._out.finished(wait=wait)

    def close(self) -> None:
        """End the threads; drop a piece that is not complete."""
        self._reading.close()
        self._out.close()

    def _read(self, piece: int) -> npt.NDArray[Any]:
        return self._run.volume.read(*self._run.input_of(piece))

    def _take(self, batch: list[Any], handles: Any, ready: dict[Any, Named], sums: _PieceSums) -> None:
        """Take the outputs of a batch; cropped tiles are put into their places at once."""
        outputs = self._run.outputs(handles, batch[0][1].shape, len(batch))
        for at, (place, tile) in enumerate(batch):
            one = {name: every[at] for name, every in outputs.items()}
            if self._run.options.blend == "crop":
                self._add(sums, tile, one)
            else:
                ready[place] = one
        self._run.options.watch.batch(len(batch))

    def _add(self, sums: _PieceSums, tile: Tile, outputs: Named) -> None:
        """Add what a tile says about a piece."""
        run = self._run
        common = tuple(
            slice(max(cut.first, part.start), min(cut.last, part.stop))
            for cut, part in zip(tile.cuts, sums.region, strict=True)
        )
        there, here = _within(common, tile.region), _within(common, sums.region)
        shape = tuple(one.stop - one.start for one in sums.region)
        if run.options.blend == "crop":
            for name, one in outputs.items():
                if name not in sums.totals:
                    sums.totals[name] = np.empty((len(one), *shape), one.dtype)
                sums.totals[name][(slice(None), *here)] = one[(slice(None), *there)]
            return
        mask = self._mask(tile)[there]
        if sums.weights is None:
            sums.weights = np.zeros(shape, np.float32)
        sums.weights[here] += mask
        for name, one in outputs.items():
            if name not in sums.totals:
                sums.totals[name] = np.zeros((len(one), *shape), _type_of_means(one))
            sums.totals[name][(slice(None), *here)] += one[(slice(None), *there)] * mask

    def _mask(self, tile: Tile) -> npt.NDArray[Any]:
        """Return the weights of a tile; most tiles have the same."""
        key = tuple(
            (one.stop - one.start, one.first - one.start, one.last - one.start, one.left, one.right)
            for one in tile.cuts
        )
        if key not in self._masks:
            if len(self._masks) > 81:
                self._masks.clear()
            self._masks[key] = self._run.tiling.weights(tile)
        return self._masks[key]

    def _keep(self, piece: int, place: Place, tile: Tile, outputs: Named) -> None:
        """Keep the outputs of a tile that a later piece needs, and drop those that none does."""
        last = (
            self._run.tiling.last_piece_of(tile) + piece // self._run.tiling.pieces * self._run.tiling.pieces
        )
        size = sum(one.nbytes for one in outputs.values())
        if place in self._kept:
            if last <= piece:
                del self._kept[place]
                self._kept_bytes -= size
        elif last > piece:
            self._kept[place] = {name: np.ascontiguousarray(one) for name, one in outputs.items()}
            self._kept_bytes += size
        while self._kept_bytes > _KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= sum(one.nbytes for one in dropped.values())

    def _finish(self, piece: int, sums: _PieceSums) -> None:
        """Reduce a piece, and hand it to the writer."""
        run = self._run
        if sums.weights is not None:
            for total in sums.totals.values():
                np.divide(total, sums.weights, out=total)
        written = run.written(sums.totals, sums.region)
        for name, whole in run.wholes.items():
            if name not in written or written[name].dtype != whole.dtype:
                raise ConfigurationError(
                    f"reduce returned {', '.join(f'{key}: {one.dtype}' for key, one in written.items())} for "
                    f"a region, and {name}: {whole.dtype} for the first tile; return the same for every "
                    "region"
                )
        self._out.begin(piece)
        for name in run.wholes:
            region = run.region(name, sums.item, sums.region)
            array = written[name].reshape(tuple(one.stop - one.start for one in region))
            self._out.write(name, region, array)
        self._out.end(piece, None)


def _within(region: Region, of: Region) -> Region:
    """Return a region as seen from the begin of another one."""
    return tuple(
        slice(one.start - base.start, one.stop - base.start) for one, base in zip(region, of, strict=True)
    )


def _batches(tiles: Sequence[tuple[Any, Tile]], size: int) -> Iterator[list[tuple[Any, Tile]]]:
    """Yield tiles of one shape, at most so many together, in batches as equal as can be.

    A tile left over would be computed alone, which some frameworks do several times slower than in a batch.
    """
    by_shape: dict[tuple[int, ...], list[tuple[Any, Tile]]] = {}
    for one in tiles:
        by_shape.setdefault(one[1].shape, []).append(one)
    for alike in by_shape.values():
        batches = -(-len(alike) // size)
        bounds = [at * len(alike) // batches for at in range(batches + 1)]
        for start, stop in pairwise(bounds):
            yield alike[start:stop]
