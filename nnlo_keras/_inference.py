"""Predictions of Keras models over all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import keras
import numpy as np

from nnlo_common import Prediction, TileResult
from nnlo_common.plugin import (
    Ensemble,
    PredictKeywords,
    RankWorld,
    TileKeywords,
    TileOptions,
    changed,
    infer_over_tiles,
    launched,
    models_in,
    one_model,
    predict_options,
    predict_rows,
    watched_use,
)
from nnlo_keras._compat import synchronise

__all__ = ["KerasCompute", "checksum", "infer_tiles", "predict"]


def predict(
    model: keras.Model | Sequence[keras.Model],
    data: Any,
    out: str | Path | None = None,
    *,
    run: str | Path | None = None,
    world: RankWorld | None = None,
    **options: Unpack[PredictKeywords],
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
        run: a folder for what `nnlo top` shows meanwhile, and `nnlo report` then.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: of `nnlo_common.PredictOptions`, and `features` and the other options of
            `nnlo_common.data.FileSource`.

    Raises:
        ConfigurationError: on all ranks, e.g. if the file exists, or the model cannot take the samples.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> predict(model, np.zeros((5, 3), "f4"), batch_size=2).outputs.shape
        (5, 2)
    """
    models = models_in(model, keras.Model, "a keras.Model")
    members = [KerasCompute(one) for one in models]
    world = world or launched()
    with watched_use(run, world) as watch:
        chosen, reading = predict_options(options, watch)
        return predict_rows(
            members[0] if len(members) == 1 else Ensemble(members),
            data,
            out,
            chosen,
            world=world,
            model=checksum(models),
            reading=reading,
            array=_array,
        )


def infer_tiles(
    model: keras.Model,
    data: Any,
    out: str | Path | None = None,
    *,
    run: str | Path | None = None,
    world: RankWorld | None = None,
    **options: Unpack[TileKeywords],
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
        run: a folder for what `nnlo top` shows meanwhile, and `nnlo report` then.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: of `nnlo_common.TileOptions`; `tile` must be given.

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
    world = world or launched()
    with watched_use(run, world) as watch:
        return infer_over_tiles(
            KerasCompute(model, tiles=True),
            data,
            out,
            TileOptions(**options, watch=watch),
            world=world,
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
