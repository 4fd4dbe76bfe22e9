"""Folds: assigns samples to folds identically on every rank, whatever fold it asks for first.

plain       shuffled, then dealt out one by one
labels      likewise, label by label: each fold gets its share of every label
groups      whole groups, the largest first, each to the fold that needs it most
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError

__all__ = ["Indices", "split"]

Indices = npt.NDArray[np.int64]


def split(
    samples: int, folds: int, fold: int, *, labels: Any = None, groups: Any = None, seed: int = 0
) -> tuple[Indices, Indices]:
    """Return the training and the validation samples of a fold, as sorted indices.

    Every sample validates in exactly one fold. The validation parts differ by one sample at most; with
    `groups` by as little as whole groups allow. Indices are sorted, as HDF5 requires.

    Args:
        samples: the number of samples.
        folds: the number of parts.
        fold: the part that validates, from 0.
        labels: the class of each sample, to give each fold its share of every class.
        groups: the group of each sample, e.g. its patient or run, to keep each group on one side.
        seed: seeds the shuffling; all folds of one split need the same.

    Raises:
        ConfigurationError: there are too few samples, members of a class, or groups.

    Example:
        >>> split(6, folds=3, fold=0)
        (array([0, 1, 2, 5]), array([3, 4]))
        >>> training, validation = split(6, folds=2, fold=1, groups=["a", "a", "b", "b", "c", "d"])
        >>> validation
        array([2, 3, 5])
    """
    whole_number("samples", samples, 1)
    whole_number("folds", folds, 2)
    whole_number("fold", fold, 0)
    if fold >= folds:
        raise ConfigurationError(f"fold={fold} of folds={folds}: give 0 to {folds - 1}")
    if samples < folds:
        raise ConfigurationError(
            f"folds={folds} of {samples} samples would leave some empty; give at most folds={samples}"
        )
    classes = np.zeros(samples, np.int64) if labels is None else _labelled(labels, samples, folds)
    random = np.random.default_rng(seed)
    if groups is None:
        parts = _dealt(classes, folds, random)
    else:
        parts = _grouped(_codes("groups", groups, samples), classes, folds, random)
    return np.flatnonzero(parts != fold), np.flatnonzero(parts == fold)


def _dealt(classes: Indices, folds: int, random: np.random.Generator) -> Indices:
    """Return the part of each sample; dealing continues across classes, so totals are even too."""
    shuffled = random.permutation(len(classes))
    order = shuffled[np.argsort(classes[shuffled], kind="stable")]
    parts = np.empty(len(classes), np.int64)
    parts[order] = np.arange(len(classes)) % folds
    return parts


def _grouped(members: Indices, classes: Indices, folds: int, random: np.random.Generator) -> Indices:
    """Return the part of each sample, the same for a whole group."""
    counts = np.zeros((members.max() + 1, classes.max() + 1))
    np.add.at(counts, (members, classes), 1)
    if len(counts) < folds:
        raise ConfigurationError(
            f"folds={folds} of {len(counts)} groups: each fold needs a group of its own; give at most "
            f"folds={len(counts)}"
        )
    shuffled = random.permutation(len(counts))
    order = shuffled[np.argsort(-counts[shuffled].sum(1), kind="stable")]
    shares, part_of = np.zeros((folds, counts.shape[1])), np.empty(len(counts), np.int64)
    for turn, group in enumerate(order):
        # The deviation from an even split, by class, relative to its size.
        costs = (((shares + counts[group]) ** 2 - shares**2) / counts.sum(0)).sum(1)
        costs += shares.sum(1) / (1e3 * counts.sum())  # break ties: the smallest fold
        empty = ~shares.any(1)
        if empty.sum() >= len(order) - turn:  # every group left must fill an empty fold
            costs[~empty] = np.inf
        part_of[group] = np.argmin(costs)
        shares[part_of[group]] += counts[group]
    return part_of[members]


def _labelled(labels: Any, samples: int, folds: int) -> Indices:
    classes = _codes("labels", labels, samples)
    counts = np.bincount(classes)
    if counts.min() < folds:
        rare = np.asarray(labels).reshape(-1).tolist()[np.flatnonzero(classes == counts.argmin())[0]]
        raise ConfigurationError(
            f"folds={folds} with labels: {rare!r:.60} has {counts.min()} of {samples} samples, too few "
            "for one in each fold; give fewer folds, or split without labels"
        )
    return classes


def _codes(name: str, values: Any, samples: int) -> Indices:
    """Number the values from 0 in sorted order."""
    found = np.asarray(values)
    if found.shape not in {(samples,), (samples, 1)}:
        raise ConfigurationError(
            f"{name} of shape {found.shape} for {samples} samples: give one value per sample"
            + (", of one-hot rows labels.argmax(1)" if found.ndim == 2 and name == "labels" else "")
        )
    return np.unique(found.reshape(-1), return_inverse=True)[1].astype(np.int64)
