"""Predictions of Keras models over all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import keras
import numpy as np

from nnlo_common import Figure, Prediction, TileResult
from nnlo_common.plugin import (
    Ensemble,
    RankWorld,
    Reading,
    RowOptions,
    TileOptions,
    changed,
    infer_over_tiles,
    launched,
    models_in,
    one_model,
    predict_rows,
)
from nnlo_keras._compat import synchronise

__all__ = ["KerasCompute", "checksum", "infer_tiles", "predict"]


def predict(
    model: keras.Model | Sequence[keras.Model],
    data: Any,
    out: str | Path | None = None,
    *,
    batch_size: int = 256,
    keep: Sequence[str] | Mapping[str, Any] = (),
    apply: Callable[[Any], Any] | None = None,
    figures: Mapping[str, Figure] | None = None,
    dtype: Literal["float16", "float32", "float64"] | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    part: str | None = None,
    progress: bool = False,
    world: RankWorld | None = None,
    **reading: Unpack[Reading],
) -> Prediction:
    """Compute a model's outputs for all samples, over all ranks, each once and in order (collective).

    Ranks take pieces as they need them, so a slow rank does fewer. With a file in `out`, memory is constant,
    and the same call after a kill does what is not written yet. Each output is a dataset with a row for each
    sample: "prediction" for a single one, else by the names or numbers of the model's dictionary or list.

    Args:
        model: with the same weights on all ranks. Several models: each output is their mean, and NAME_spread
            their standard deviation.
        data: HDF5 files (see `nnlo_common.data.list_files`), with `features=`; or arrays: one, or a tuple,
            list or dictionary as several inputs.
        out: the file to write: .h5, .npy for a single output, or .zarr; None: return the outputs, on all
            ranks.
        batch_size: samples that the model gets at once.
        keep: columns to copy into the result: names of datasets in the files, or arrays by name.
        apply: a function of the outputs of a batch, NumPy arrays in the model's structure; what it returns is
            written.
        figures: figures of merit over all samples, by name; see `nnlo_common.Figure`.
        dtype: of the floats that are written; None: as the model has them.
        compression: of an .h5 file, "gzip" or "lzf".
        overwrite: remove an earlier result.
        part: do this part of the work only, e.g. "2/5", or "auto" in a job array of Slurm; the last job
            completes the file.
        progress: print how far it is.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        reading: `features` and the other options of `nnlo_common.data.FileSource`.

    Raises:
        ConfigurationError: on all ranks, e.g. if the file exists, or the model cannot take the samples.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> predict(model, np.zeros((5, 3), "f4"), batch_size=2).outputs.shape
        (5, 2)
    """
    models = models_in(model, keras.Model, "a keras.Model")
    options = RowOptions(
        batch_size=batch_size,
        keep=keep,
        apply=apply,
        figures=figures or {},
        dtype=dtype,
        compression=compression,
        overwrite=overwrite,
        part=part,
        progress=progress,
    )
    members = [KerasCompute(one) for one in models]
    return predict_rows(
        members[0] if len(members) == 1 else Ensemble(members),
        data,
        out,
        options,
        world=world or launched(),
        model=checksum(models),
        reading=reading,
        array=_array,
    )


def infer_tiles(
    model: keras.Model,
    data: Any,
    out: str | Path | None = None,
    *,
    tile: int | Sequence[int],
    margin: int | Sequence[int] | None = None,
    blend: Literal["crop", "linear", "gaussian"] = "crop",
    overlap: int | Sequence[int] | None = None,
    multiple: int | Sequence[int] | None = None,
    axes: str | None = None,
    dataset: str | None = None,
    batch_size: int = 1,
    reduce: str | float | Callable[[Any], Any] | None = None,
    flips: str = "",
    objects: Literal["label"] | Callable[[Any], Any] | None = None,
    connectivity: int = 1,
    table: bool = False,
    points: Callable[[Any], Any] | None = None,
    boxes: Callable[[Any], Any] | None = None,
    context: int = 16,
    dtype: Literal["float16", "float32", "float64"] | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    part: str | None = None,
    progress: bool = False,
    world: RankWorld | None = None,
) -> TileResult:
    """Apply a model to a volume or an image of any size, tile by tile over all ranks (collective).

    The volume is never in memory: it is read piece by piece, and a piece is blended, reduced and written
    before the next. Ranks take pieces as they need them; after a kill the same call does those that are not
    written.

    Tiles are cropped by default: at each inner face the model's answer does not count as far as a tile
    cannot know what it depends on. That margin, the receptive field, is measured. Then the result is that of
    the whole volume at once, up to the rounding of float32.

    Args:
        model: of batches (tiles, ..., channels), or with channels first if Keras is set so, with the same
            weights on all ranks. Its outputs are as large as the tile, with or without channels.
        data: the volume: the path of an .h5, .zarr or .npy file, or an array.
        out: the file to write: .h5, .npy for a single output, or .zarr; None: return the outputs, on all
            ranks. An output has the axes of the volume, channels in front, if it has several.
        tile: the shape of a tile: a number, or one for each axis.
        margin: what does not count at the inner faces of a tile; None: the measured receptive field.
        blend: "crop": each voxel is from one tile; "linear" or "gaussian": neighbours share `overlap`
            voxels, and their mean is weighted so.
        overlap: what neighbours blend; None: a quarter of a tile.
        multiple: tiles begin at multiples of it; None: the network's stride, as measured.
        axes: a letter for each axis of the array: "c" for channels, "t" for volumes apart, others are cut
            into tiles; None: "yx", "zyx", "czyx" or "tczyx", by their number.
        dataset: its name in the file; None: the only one.
        batch_size: tiles that the model gets at once.
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
        dtype: of the floats that are written; None: as the model has them.
        compression: of an .h5 file, "gzip" or "lzf".
        overwrite: remove an earlier result.
        part: do this part of the work only, e.g. "2/5", or "auto" in a job array of Slurm; the last job
            completes the file.
        progress: print how far it is.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.

    Raises:
        ConfigurationError: on all ranks, e.g. if the file exists, or nothing of a tile is left.

    Example:
        >>> blur = keras.Sequential([keras.Input((None, None, 1)), keras.layers.Conv2D(1, 3, padding="same")])
        >>> image = np.zeros((20, 30), "f4")
        >>> found = infer_tiles(blur, image, tile=10)
        >>> found.margin, found.outputs.shape
        ((1, 1), (20, 30))
    """
    model = one_model(model, keras.Model, "a keras.Model")
    options = TileOptions(
        tile=tile,
        margin=margin,
        blend=blend,
        overlap=overlap,
        multiple=multiple,
        axes=axes,
        dataset=dataset,
        batch_size=batch_size,
        reduce=reduce,
        flips=flips,
        objects=objects,
        connectivity=connectivity,
        table=table,
        points=points,
        boxes=boxes,
        context=context,
        dtype=dtype,
        compression=compression,
        overwrite=overwrite,
        part=part,
        progress=progress,
    )
    return infer_over_tiles(
        KerasCompute(model, tiles=True),
        data,
        out,
        options,
        world=world or launched(),
        model=checksum([model]),
        array=_array,
    )


class KerasCompute:
    """A model as the core calls it: in Keras' compiled step of `predict`.

    Args:
        model: the model.
        tiles: whether batches are tiles, with channels first in the core.
    """

    def __init__(self, model: keras.Model, *, tiles: bool = False) -> None:
        self._model = model
        self._last = tiles and keras.config.image_data_format() == "channels_last"

    def begin(self, features: Any) -> Any:
        """Compute a batch."""
        if self._last:
            features = np.ascontiguousarray(np.moveaxis(features, 1, -1))
        return self._model.predict_on_batch(features), features

    def result(self, handle: Any) -> Any:
        """Return the outputs as arrays."""
        outputs, features = handle
        return changed(outputs, lambda one: self._first(_array(one), features))

    def _first(self, array: Any, features: Any) -> Any:
        """Return an output of a tile with its channels first."""
        return np.moveaxis(array, -1, 1) if self._last and array.ndim == features.ndim else array


def checksum(models: Sequence[keras.Model]) -> str:
    """Return what tells models from others: a checksum of their weights."""
    found = 0
    for model in models:
        if model.built:
            synchronise(model)
            for one in model.get_weights():
                found = zlib.crc32(np.ascontiguousarray(one).data.cast("B") if one.size else b"", found)
    return f"{'+'.join(type(one).__name__ for one in models)} {found:08x}"


def _array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, np.ndarray):
        return leaf
    return keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else np.asarray(leaf)
