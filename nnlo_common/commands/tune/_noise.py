"""Noise of a search: the best of several noisy trials looks better than it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

__all__ = ["by_chance", "remark"]


def by_chance(folds: Sequence[Sequence[float]]) -> float | None:
    """Return by how much the best of trials may look better than it is, by the noise of their folds.

    It is the expectation of the best of as many equal trials: the noise of a mean over folds, times the
    expected largest of so many draws from a normal distribution (Blom 1958). Folds are the same samples in
    all trials, so what one fold is easier than another in all of them is no noise.

    Args:
        folds: the values of the folds of each trial.

    Returns:
        None without several folds in several trials.

    Example:
        >>> by_chance([[0.7, 0.8], [0.7, 0.8], [0.6, 0.7]])
        0.0
    """
    whole = [one for one in folds if len(one) > 1]
    most = max(map(len, whole), default=0)
    values = np.array([one for one in whole if len(one) == most], float)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    trials, parts = values.shape
    rest = values - values.mean(1, keepdims=True) - values.mean(0, keepdims=True) + values.mean()
    noise = math.sqrt((rest**2).sum() / ((trials - 1) * (parts - 1)) / parts)
    return round(noise * NormalDist().inv_cdf((trials - 0.375) / (trials + 0.25)), 12)


def remark(folds: Sequence[Sequence[float]], trials: int, more_folds: str = "add --n-fold") -> str:
    """Return a text on the noise, to stand beside the best value.

    Args:
        folds: the values of the folds of each complete trial.
        trials: the number of complete trials.
        more_folds: how to get the noise between folds.
    """
    if trials < 2:
        return ""
    chance = by_chance(folds)
    if chance is None:
        return (
            f"the best of {trials} trials looks better than it is, without folds by an unknown amount: "
            f"{more_folds}, or train it again with other seeds"
        )
    return (
        f"the best of {trials} trials looks better than it is: {chance:.2g} of it may be chance, by the "
        "noise between folds; train it again with other seeds"
    )
