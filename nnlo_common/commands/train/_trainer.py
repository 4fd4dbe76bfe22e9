"""Trainer: base class of the trainings with Keras and with PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.train._job import brief
from nnlo_common.commands.train._option import nearest
from nnlo_common.commands.train._run_plan import RunPlan
from nnlo_common.commands.train._settings import Settings

__all__ = ["Trainer", "rises", "stop_rules"]

# Metrics whose names end in these should rise.
_RISING = ("acc", "accuracy", "auc", "precision", "recall", "f1", "r2", "iou")


class Trainer(ABC):
    """One rank's training.

    Args:
        plan: of the training.

    Attributes:
        learning_rate: the first one of the optimizer.
        role: this rank's part: "alone", "server 0", "worker 0", ...
        metrics: the names of the metrics of each epoch.
        model: the model in training; at the end the centre, on the rank that has it.
    """

    learning_rate: float
    metrics: Sequence[str]

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._settings = plan, plan.settings
        self.model, self.role = plan.loaded.model, "alone"

    def join(self) -> None:  # noqa: B027 - optional
        """Join the other ranks, if the framework does so before the first epoch (collective)."""

    @abstractmethod
    def train(self, folder: Path) -> dict[str, list[float]]:
        """Train, and return this rank's metrics, epoch by epoch (collective)."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return this rank's report on the exchanges."""

    @abstractmethod
    def save(self, folder: Path) -> Path:
        """Write the trained model, on the rank that has the centre."""

    def close(self) -> None:
        """Close the files, also after a failure."""
        for batches in (self._train, self._val):
            if batches is not None:
                batches.close()

    @property
    def _config(self) -> dict[str, Any]:
        """All options, for the facts of the run."""
        return {one.name: getattr(self._settings, one.name) for one in fields(self._settings)}

    def _open(self, batches: Callable[..., Any], train: Mapping[str, Any], val: Mapping[str, Any]) -> None:
        """Open the files with a reader of batches and its options for training and validation."""
        data, settings = self._plan.data, self._settings
        opened = partial(batches, batch_size=settings.batch, seed=settings.seed)
        self._train = opened(data.train, shuffle=settings.shuffle, **train, **data.reading)
        self._val = opened(data.val, **val, **data.val_reading) if data.val else None

    def _note_metrics(self, names: Sequence[str]) -> None:
        """Set the metrics of an epoch and the one for early stopping."""
        validates = self._val is not None
        self.metrics = _with_validation(names, validates)
        self._stop_by = stop_rules(self._settings, names, validates)
        self._stop_mode: Literal["min", "max"] = "max" if rises(self._stop_by) else "min"

    @contextmanager
    def _trying(self, features: str, labels: str, model: str = "") -> Iterator[None]:
        """Try the model on some samples; turn any error into one that says that they do not fit."""
        try:
            yield
        except Exception as error:
            raise ConfigurationError(
                f"the model, the samples and --loss {self._settings.loss} do not fit: features {features}, "
                f"labels {labels}{model}\n{type(error).__name__}: {brief(str(error))}\n"
                "Choose another --loss, --features-name or --labels-name, or adapt the arrays with "
                "get_features() or get_labels() of a Python file"
            ) from None


def rises(metric: str) -> bool:
    """Whether a metric should rise, judged by its name.

    Example:
        >>> rises("val_accuracy"), rises("val_loss")
        (True, False)
    """
    return metric.endswith(_RISING)


def _with_validation(metrics: Sequence[str], validates: bool) -> list[str]:
    return [*metrics, *(f"val_{name}" for name in metrics if validates)]


def stop_rules(settings: Settings, metrics: Sequence[str], validates: bool) -> str:
    """Return the metric for early stopping; refuse metrics that the training will not have.

    Args:
        settings: of the training.
        metrics: the names of the metrics.
        validates: whether there is validation.
    """
    known = _with_validation(metrics, validates)
    by = settings.early_stopping_metric or ("val_loss" if validates else "loss")
    wanted = [("--early-stopping-metric", by)] if settings.early_stopping is not None else []
    if settings.target is not None:
        wanted.append(("--target-metric", settings.target[0]))
    for flag, name in wanted:
        if name not in known:
            missing = " (val_ needs --val)" if name.startswith("val_") and not validates else ""
            raise ConfigurationError(
                f"{flag} {name}: the metrics are {', '.join(known)}{missing}{nearest(name, known)}"
            )
    return by
