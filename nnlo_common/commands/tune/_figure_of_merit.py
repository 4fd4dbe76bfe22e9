"""Figure of merit of a trial: a metric of its history, or a function of the trained model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._option import nearest
from nnlo_common.commands.train._stopping import rises

__all__ = ["FUNCTION", "FigureOfMerit", "by_chance", "default_metric", "figure_of", "remark"]

# -- noise of a search: the best of several noisy trials looks better than it is -----------------------


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


#: The function of a Python file that returns a figure of merit.
FUNCTION = "get_figure_of_merit"
_WHICH = ("last", "best", "min", "max")


@dataclass(frozen=True, slots=True)
class FigureOfMerit:
    """A figure of merit.

    Attributes:
        metric: its name; empty if a function of the Python file returns it.
        which: of all epochs: "last", "min" or "max". The last is the one whose model is kept.
        maximize: whether it should rise.
    """

    metric: str
    which: str
    maximize: bool

    @property
    def name(self) -> str:
        """Its name in tables."""
        if not self.metric:
            return "figure of merit"
        return self.metric if self.which == "last" else f"{self.metric}, {self.which}"

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """Its direction, for Optuna."""
        return "maximize" if self.maximize else "minimize"

    def of(self, history: Mapping[str, Sequence[float]], kept: int | None = None) -> float:
        """Return the value of a training.

        Args:
            history: the metrics of each epoch.
            kept: the epoch whose model early stopping has kept; None: the last.

        Example:
            >>> FigureOfMerit("val_loss", "min", False).of({"val_loss": [3.0, 1.0, 2.0]})
            1.0
        """
        values = history[self.metric]
        return {"last": values[-1 if kept is None else kept], "min": min(values), "max": max(values)}[
            self.which
        ]


def figure_of(
    objective: str | None, maximize: bool | None, module: Any, metrics: Sequence[str]
) -> FigureOfMerit:
    """Return the figure of merit for the options.

    Args:
        objective: the value of `--objective`; None: that of the Python file, else val_loss, or loss.
        maximize: whether it should rise; None: its name decides.
        module: the Python file, if there is one.
        metrics: the metrics of the trainings.

    Raises:
        ConfigurationError: the trainings do not have this metric.

    Example:
        >>> figure_of("accuracy:best", None, None, ["loss", "accuracy"])
        FigureOfMerit(metric='accuracy', which='max', maximize=True)
    """
    if objective is None:
        if callable(getattr(module, FUNCTION, None)):
            return FigureOfMerit("", "last", bool(maximize))
        objective = default_metric(metrics)
    metric, _, which = objective.partition(":")
    which = which or "last"
    if which not in _WHICH:
        meant = nearest(which, _WHICH)
        raise ConfigurationError(
            f"--objective {objective}: after the colon give one of {', '.join(_WHICH)}{meant}"
        )
    if metric not in metrics:
        hint = (
            " (val_ needs --val or --n-fold)"
            if metric.startswith("val_") and "val_loss" not in metrics
            else ""
        )
        raise ConfigurationError(
            f"--objective {metric}: the metrics are {', '.join(metrics)}{hint}{nearest(metric, metrics)}"
        )
    upward = {"min": False, "max": True}.get(which, rises(metric)) if maximize is None else maximize
    return FigureOfMerit(metric, ("max" if upward else "min") if which == "best" else which, upward)


def default_metric(metrics: Sequence[str]) -> str:
    """Return the metric that trials are compared by unless one is named."""
    return "val_loss" if "val_loss" in metrics else "loss"


def merit(function: Callable[[Any], Any], model: Any) -> float:
    """Call the Python file's function with the trained model and return its number."""
    value = function(model)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"{FUNCTION}() returned {value!r:.80}; return a finite number")
    return number
