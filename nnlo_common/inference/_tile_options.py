"""Options of an inference by tiles, checked where they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Required

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.inference._object_run import ObjectOptions
from nnlo_common.inference._objects import FoundRows, Labelling
from nnlo_common.inference._running import ResultKeywords, ResultOptions
from nnlo_common.inference._tiles import BLENDS, Blend

__all__ = ["TileKeywords", "TileOptions"]


class TileKeywords(ResultKeywords, total=False):
    """Options of `TileOptions`, for callers that pass them on."""

    tile: Required[int | Sequence[int]]
    margin: int | Sequence[int] | None
    overlap: int | Sequence[int] | None
    blend: Blend
    multiple: int | Sequence[int] | None
    axes: str | None
    dataset: str | None
    batch_size: int
    reduce: str | float | Callable[[Any], Any] | None
    flips: str
    objects: str | Callable[[Any], Any] | None
    connectivity: int
    table: bool
    points: Callable[[Any], Any] | None
    boxes: Callable[[Any], Any] | None
    context: int


@dataclass(frozen=True, kw_only=True)
class TileOptions(ResultOptions):
    """Options of an inference by tiles, beside those of `ResultOptions`.

    Attributes:
        tile: the shape of a tile: a number, or one for each axis.
        margin: what does not count at the inner faces of a tile; None: the measured receptive field.
        overlap: what neighbours blend; None: a quarter of a tile, or nothing where they are cropped.
        blend: "crop": each voxel is from one tile; "linear" or "gaussian": neighbours share `overlap`
            voxels, and their mean is weighted so.
        multiple: tiles begin at multiples of it; None: the network's stride, as measured, or 1 where none is
            found, as where each output depends on all of the volume.
        axes: a letter for each axis of the array: "c" for channels, "t" for volumes apart, others are cut
            into tiles; None: "yx", "zyx", "czyx" or "tczyx", by their number.
        dataset: its name in the file; None: the only one.
        batch_size: tiles that the model gets at once. On a CPU give 2 or more: PyTorch computes the first
            convolution of a single tile several times slower.
        reduce: what is made of the outputs before they are written, piece by piece, so that classes times
            volume never exists: "argmax" over channels, a number as threshold, or a function of arrays
            (channels, ...).
        flips: axes along which the tile is flipped, too; the result is the mean, e.g. "zyx" of eight.
        objects: number the objects of the map, also where they cross tiles, and write the numbers: "label":
            the connected parts of each value but 0, by scipy; or a function that labels the map of a piece.
        connectivity: of objects: 1: over faces; 2: over edges, too; and so on.
        table: write a table of the objects, too, OUT.csv: value, size, box and centre.
        points: find points: a function of a map that returns a row for each, beginning with its place there;
            `out` is a .npy file of all rows, each once, in coordinates of the volume.
        boxes: find boxes: rows with the begins, then the ends, along each axis.
        context: how many voxels around a piece the function for points or boxes sees; at least a box's size.

    Example:
        >>> TileOptions(tile=64, blend="gaussian", overlap=16).context
        16
    """

    tile: int | Sequence[int]
    margin: int | Sequence[int] | None = None
    overlap: int | Sequence[int] | None = None
    blend: Blend = "crop"
    multiple: int | Sequence[int] | None = None
    axes: str | None = None
    dataset: str | None = None
    batch_size: int = 1
    reduce: str | float | Callable[[Any], Any] | None = None
    flips: str = ""
    objects: str | Callable[[Any], Any] | None = None
    connectivity: int = 1
    table: bool = False
    points: Callable[[Any], Any] | None = None
    boxes: Callable[[Any], Any] | None = None
    context: int = 16

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)
        if self.blend not in BLENDS:
            raise ConfigurationError(f"blend={self.blend!r}: give one of {', '.join(BLENDS)}")
        if self.blend == "crop" and self.overlap is not None:
            raise ConfigurationError(
                f"overlap={self.overlap!r}: tiles that are cropped share nothing; give margin=, or "
                f"blend='gaussian'"
            )
        super().__post_init__()
        number = isinstance(self.reduce, int | float) and not isinstance(self.reduce, bool)
        if not (self.reduce in (None, "argmax") or number or callable(self.reduce)):
            raise ConfigurationError(
                f"reduce={self.reduce!r:.60}: give 'argmax', a number as threshold, or a function of the "
                f"outputs"
            )
        whole_number("connectivity", self.connectivity, 1)
        whole_number("context", self.context, 0)
        if not (self.objects in (None, "label") or callable(self.objects)):
            raise ConfigurationError(
                f"objects={self.objects!r:.60}: give 'label', or a function that labels a map"
            )
        asked = {"objects": self.objects, "points": self.points, "boxes": self.boxes}
        given = [name for name, one in asked.items() if one is not None]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} are results of their own; give one of them")
        if wrong := [name for name in given if name != "objects" and not callable(asked[name])]:
            raise ConfigurationError(
                f"{wrong[0]}={asked[wrong[0]]!r:.60} is not a function; give one of a map"
            )

    @property
    def found(self) -> ObjectOptions | None:
        """What to find in the map; None: the map is the result."""
        if self.objects is not None:
            function = self.objects if callable(self.objects) else None
            return ObjectOptions(labelling=Labelling(self.connectivity, function), table=self.table)
        finder = self.points or self.boxes
        if finder is None:
            return None
        rows = FoundRows(finder, boxes=self.boxes is not None, context=self.context)
        return ObjectOptions(rows=rows)
