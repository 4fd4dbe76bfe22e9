"""Using a model over ranks: predicting samples, and volumes in tiles.

Holds: pieces of work shared out over ranks, `sinks/` (a format is one file), the journal of what is written,
    rows, tiles, blending, receptive fields, objects.
May import: `base`, `data`, `protocol`, `cluster`; h5py, zarr where a file is opened.
Must not know: frameworks, training.
"""

from __future__ import annotations

from nnlo_common.inference._figures import ROC, Confusion, Figure
from nnlo_common.inference._rows import (
    ArraySource,
    BatchModel,
    Ensemble,
    Prediction,
    PredictKeywords,
    PredictOptions,
    files_in,
    models_in,
    one_model,
    predict_options,
    predict_rows,
    source_of,
)
from nnlo_common.inference._running import ResultOptions, Watch
from nnlo_common.inference._tile_options import TileKeywords, TileOptions
from nnlo_common.inference._tile_run import TileResult, infer_over_tiles

__all__ = [
    "ArraySource",
    "BatchModel",
    "Confusion",
    "Ensemble",
    "Figure",
    "PredictKeywords",
    "PredictOptions",
    "Prediction",
    "ROC",
    "ResultOptions",
    "TileKeywords",
    "TileOptions",
    "TileResult",
    "Watch",
    "files_in",
    "infer_over_tiles",
    "models_in",
    "one_model",
    "predict_options",
    "predict_rows",
    "source_of",
]
