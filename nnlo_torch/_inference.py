"""Predictions of PyTorch modules over all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from nnlo_common import ConfigurationError, Prediction, TileResult
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
from nnlo_torch._evaluation import evaluating
from nnlo_torch._wrapper import current

__all__ = ["TorchCompute", "checksum", "infer_tiles", "predict"]

_PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def predict(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    data: Any,
    out: str | Path | None = None,
    *,
    precision: Literal["float16", "bfloat16"] | None = None,
    run: str | Path | None = None,
    world: RankWorld | None = None,
    **options: Unpack[PredictKeywords],
) -> Prediction:
    """Compute a model's outputs for all samples, over all ranks, each once and in order (collective).

    Ranks take pieces as they need them, so a slow rank does fewer. With a file in `out`, memory is constant,
    and the same call after a kill does what is not written yet. Each output is a dataset with a row for each
    sample: "prediction" for a single one, else by the names or numbers of the model's dictionary or tuple.

    Args:
        model: with the same weights on all ranks; it runs in `eval()` mode, on the device of its parameters.
            The model of an open training has its centre. Several models: each output is their mean, and
            NAME_spread their standard deviation.
        data: HDF5 files (see `nnlo_common.data.list_files`), with `features=`; or tensors or arrays: one, or
            a tuple as several inputs.
        out: the file to write: .h5, .npy for a single output, or .zarr; None: return the outputs, on all
            ranks.
        precision: in which the model computes, by `torch.autocast`; None: as it is.
        run: a folder for what `nnlo top` shows meanwhile, and `nnlo report` then.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: of `nnlo_common.PredictOptions`, and `features` and the other options of
            `nnlo_common.data.FileSource`.

    Raises:
        ConfigurationError: on all ranks, e.g. if the file exists, or the model cannot take the samples.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> predict(model, torch.zeros(5, 3), batch_size=2).outputs.shape
        (5, 2)
    """
    models = models_in(model, torch.nn.Module, "a torch.nn.Module")
    members = [TorchCompute(one, precision) for one in models]
    ranks = world or launched()
    with watched_use(run, ranks) as watch, running(models, world):
        chosen, reading = predict_options(options, watch)
        return predict_rows(
            members[0] if len(members) == 1 else Ensemble(members),
            data,
            out,
            chosen,
            world=ranks,
            model=checksum(models) + (precision or ""),
            reading=reading,
            array=_array,
        )


def infer_tiles(
    model: torch.nn.Module,
    data: Any,
    out: str | Path | None = None,
    *,
    precision: Literal["float16", "bfloat16"] | None = None,
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
        model: of batches (tiles, channels, ...), with the same weights on all ranks; it runs in `eval()`
            mode, on the device of its parameters. Its outputs are as large as the tile, with or without
            channels.
        data: the volume: the path of an .h5, .zarr or .npy file, or an array.
        out: the file to write: .h5, .npy for a single output, or .zarr; None: return the outputs, on all
            ranks. An output has the axes of the volume, channels in front, if it has several.
        precision: in which the model computes, by `torch.autocast`; None: as it is.
        run: a folder for what `nnlo top` shows meanwhile, and `nnlo report` then.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: of `nnlo_common.TileOptions`; `tile` must be given.

    Raises:
        ConfigurationError: on all ranks, e.g. if the file exists, or nothing of a tile is left.

    Example:
        >>> blur = torch.nn.Conv2d(1, 1, 3, padding=1)
        >>> image = torch.zeros(20, 30)
        >>> found = infer_tiles(blur, image, tile=10)
        >>> found.margin, found.outputs.shape
        ((1, 1), (20, 30))
    """
    model = one_model(model, torch.nn.Module, "a torch.nn.Module")
    ranks = world or launched()
    with watched_use(run, ranks) as watch, running([model], world):
        return infer_over_tiles(
            TorchCompute(model, precision),
            data,
            out,
            TileOptions(**options, watch=watch),
            world=ranks,
            model=checksum([model]) + (precision or ""),
            array=_array,
        )


@contextmanager
def running(models: Sequence[torch.nn.Module], world: RankWorld | None = None) -> Iterator[None]:
    """Put models into `eval()` mode without gradients, and back; in an open training they have its centre.

    Args:
        models: to run.
        world: the ranks, if they are not those of this process' training.
    """
    training = current() if world is None else None
    with ExitStack() as entered:
        # A server waits until all workers have finished their epoch: this says so.
        if training is not None and not training.evaluating:
            entered.enter_context(training.evaluation())
        entered.enter_context(evaluating(models))
        entered.enter_context(torch.inference_mode())
        yield


class TorchCompute:
    """A module as the core calls it.

    Args:
        model: the module.
        precision: in which it computes.
    """

    def __init__(self, model: torch.nn.Module, precision: str | None = None) -> None:
        if precision not in (None, *_PRECISIONS):
            raise ConfigurationError(f"precision={precision!r}: give float16 or bfloat16, or nothing")
        self._model, self._precision = model, precision
        some = next((one for parts in (model.parameters(), model.buffers()) for one in parts), None)
        self._device = torch.device("cpu") if some is None else some.device

    def begin(self, features: Any) -> Any:
        """Begin to compute a batch: on a GPU this returns before it is done."""
        x = changed(features, self._moved)
        inputs = x if isinstance(x, tuple) else (x,)
        if self._precision is None:
            return self._model(*inputs)
        with torch.autocast(self._device.type, _PRECISIONS[self._precision]):
            return self._model(*inputs)

    def result(self, handle: Any) -> Any:
        """Return the outputs as arrays."""
        return changed(handle, _array)

    def flops(self, features: Any) -> float:
        """Return the floating-point operations of a batch."""
        with FlopCounterMode(display=False) as counter:
            self.begin(features)
        return float(counter.get_total_flops())

    def _moved(self, array: Any) -> torch.Tensor:
        tensor = torch.as_tensor(array)
        kind = torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype
        if tensor.dtype == kind and tensor.device == self._device:
            return tensor
        return tensor.to(self._device, kind)


def checksum(models: Sequence[torch.nn.Module]) -> str:
    """Return what tells models from others: a checksum of their weights and buffers."""
    found = 0
    for model in models:
        for name, one in model.state_dict().items():
            found = zlib.crc32(name.encode(), found)
            if isinstance(one, torch.Tensor):
                content = one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                found = zlib.crc32(content.data, found)
    return f"{'+'.join(type(one).__name__ for one in models)} {found:08x}"


def _array(leaf: Any) -> Any:
    """Return a tensor as an array; NumPy has no bfloat16."""
    if not isinstance(leaf, torch.Tensor):
        return leaf if leaf is None else np.asarray(leaf)
    leaf = leaf.detach()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).cpu().numpy()
