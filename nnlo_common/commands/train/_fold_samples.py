"""Folds of the samples in files: those to train on and those to validate with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._settings import Settings
from nnlo_common.data import FileSource, Reading
from nnlo_common.data._source import Array
from nnlo_common.search.block._folds import Indices, split

__all__ = ["parts"]

# Read rows of one-hot labels in pieces and keep only their classes.
_PIECE = 1 << 16


def parts(files: Sequence[str], reading: Reading, settings: Settings) -> tuple[Indices, Indices]:
    """Return the samples to train on and to validate with; every seed has the same, so trials compare.

    Args:
        files: of all samples.
        reading: options of the reader.
        settings: with the fold, and the datasets that it is cut by.

    Raises:
        ConfigurationError: a dataset is missing or unsuitable, or there are too few samples or groups.
    """
    assert settings.parts is not None  # the caller has checked --fold and --hold-out
    held, folds = settings.parts
    with closing(FileSource(files, **reading)) as source:
        samples = len(source)
    labels = _column("--fold-labels", settings.fold_labels, files, reading)
    groups = _column("--fold-groups", settings.fold_groups, files, reading)
    try:
        validating = [split(samples, folds, fold, labels=labels, groups=groups)[1] for fold in held]
    except ConfigurationError as error:
        asked = (("--fold-labels", settings.fold_labels), ("--fold-groups", settings.fold_groups))
        by = " and ".join(f"{flag} {name}" for flag, name in asked if name)
        raise ConfigurationError(f"{by}: {error}" if by else str(error)) from None
    validation = np.sort(np.concatenate(validating))
    return np.setdiff1d(np.arange(samples), validation), validation


def _column(flag: str, name: str | None, files: Sequence[str], reading: Reading) -> Array | None:
    """Return one value for each sample."""
    if name is None:
        return None
    own: Reading = {"features": name}
    if name == "get_labels":  # what the training gets
        own = {"features": reading.get("labels") or "labels", "adapt_features": reading.get("adapt_labels")}
    if "select" in reading:
        own["select"] = reading["select"]
    if "stage_to" in reading:
        own |= {"stage_to": reading["stage_to"], "copy_command": reading["copy_command"]}
    try:
        source = FileSource(files, **own)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag} {name}: {error}") from None
    with closing(source):
        return np.concatenate([_valued(flag, name, source, start) for start in range(0, len(source), _PIECE)])


def _valued(flag: str, name: str, source: FileSource, start: int) -> Array:
    (rows,) = source.take(start, min(start + _PIECE, len(source)))
    if isinstance(rows, tuple):
        raise ConfigurationError(
            f"{flag} {name} is a group of {len(rows)} datasets; name a dataset with one value for each sample"
        )
    values: Array = rows
    if values.ndim == 2 and values.shape[1] > 1 and _one_hot(values):
        return np.asarray(values.argmax(1))
    if values.shape not in {(len(values),), (len(values), 1)}:
        raise ConfigurationError(
            f"{flag} {name} has rows of shape {list(values.shape[1:])}, which are not one-hot; name a "
            "dataset with one value for each sample"
        )
    return values.reshape(-1)


def _one_hot(rows: Array) -> bool:
    return bool(np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all())
