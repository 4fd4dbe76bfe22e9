"""Noise of the mean over folds, estimated from all trials of a search.

All trials train on the same folds, so a fold that is harder than others says nothing about a trial. The noise
is the remainder without the mean of each trial and that of each fold: the residue of a two-way table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from optuna.trial import FrozenTrial

from nnlo_common.search.coordinator._trial_results import FOLDS

__all__ = ["noise_of_means"]


def noise_of_means(trials: Sequence[FrozenTrial]) -> float | None:
    """Return the noise variance of a trial's value, as a share of the variance of all values.

    Args:
        trials: finished trials.

    Returns:
        The share; None if it cannot be estimated: without folds, with several objectives or a single trial.
    """
    tables = [trial.user_attrs.get(FOLDS) for trial in trials]
    rows = [row for row in tables if row and all(isinstance(value, float | int) for value in row)]
    if len(rows) < 2 or len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        return None
    values = np.array(rows, float)
    if not np.isfinite(values).all():
        return None
    means = values.mean(1, keepdims=True)
    residue = values - means - values.mean(0, keepdims=True) + values.mean()
    count, folds = values.shape
    chance = float((residue**2).sum() / ((count - 1) * (folds - 1)) / folds)
    total = float(means.var())
    return min(chance / total, 1.0) if total > 0 else None
