"""End of a training by its metrics: early stopping and the target, the same with both frameworks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from nnlo_common.base._errors import ConfigurationError, plural
from nnlo_common.commands.train._option import nearest
from nnlo_common.commands.train._settings import Settings
from nnlo_common.training._early_stopping import EarlyStopping

__all__ = ["Stopping", "rises", "with_validation"]

# Metrics whose names end in these should rise; compared without case, "_", "score" and a number, as Keras
# logs BinaryIoU as binary_io_u, or as binary_io_u_1.
_RISING = (
    *("acc", "accuracy", "auc", "precision", "recall", "sensitivity", "specificity"),
    *("f1", "fbeta", "r2", "iou", "cosinesimilarity", "correlation", "truepositives", "truenegatives"),
)


class Stopping:
    """Decides by the metrics of each epoch whether the training ends, and which epoch is the best.

    Args:
        settings: of the training.
        metrics: the names of all its metrics.

    Attributes:
        by: the metric of early stopping; None without it.
        plateau_by: the metric of a schedule that waits for a plateau.
        mode: "max" if that metric should rise, else "min".
        best_epoch: the number of the best epoch by it, from 0; None: there is none yet.
        why: the reason to end after the latest epoch; empty: go on.

    Raises:
        ConfigurationError: the training will not have the metrics of the options.

    Example:
        >>> settings = Settings(model="net.py", loss="mse", early_stopping=2)
        >>> stopping = Stopping(settings, ["loss"])
        >>> stopping.replay({"loss": [0.5, 0.25, 0.75, 0.5]})
        'loss has not fallen below 0.25, of epoch 2, in 2 epochs (--early-stopping 2)'
    """

    def __init__(self, settings: Settings, metrics: Sequence[str]) -> None:
        self._settings = settings
        by = settings.early_stopping_metric or ("val_loss" if "val_loss" in metrics else "loss")
        watched = settings.early_stopping is not None or settings.schedule == "plateau"
        wanted = {"--early-stopping-metric": by} if watched else {}
        if settings.target is not None:
            wanted["--target-metric"] = settings.target[0]
        for flag, name in wanted.items():
            if name not in metrics:
                lacks = name.startswith("val_") and "val_loss" not in metrics
                missing = " (val_ needs --val)" if lacks else ""
                raise ConfigurationError(
                    f"{flag} {name}: the metrics are {', '.join(metrics)}{missing}{nearest(name, metrics)}"
                )
        self.by = None if settings.early_stopping is None else by
        self.plateau_by = by
        self.mode: Literal["min", "max"] = "max" if rises(by) else "min"
        self._early: EarlyStopping | None = None
        self.best_epoch: int | None = None
        self.why, self._epochs = "", 0
        self.replay({})

    def see(self, scores: Mapping[str, float]) -> bool:
        """Take the metrics of the next epoch; return whether it is the best so far."""
        settings, self.why = self._settings, ""
        better, self._epochs = False, self._epochs + 1
        if self.by is not None and self._early is not None:
            ends = self._early(scores[self.by])
            if better := self._early.waited == 0:
                self.best_epoch = self._epochs - 1
            if ends:
                self.why = f"{self._lag} in {plural(self._early.waited, 'epoch')} ({self._flag})"
        if settings.target is not None:
            metric, reached = settings.target
            if reached(scores[metric]):
                self.why = f"{metric} is {scores[metric]:.4g} (--target-metric '{settings.target_metric}')"
        return better

    def replay(self, history: Mapping[str, Sequence[float]]) -> str:
        """Begin anew with the metrics of the epochs so far; return the reason to end there, or nothing."""
        patience = self._settings.early_stopping
        self._early = None if patience is None else EarlyStopping(patience=patience, mode=self.mode)
        self.best_epoch, self.why, self._epochs = None, "", 0
        for values in zip(*history.values(), strict=False):
            self.see(dict(zip(history, values, strict=True)))
        return self.why

    @property
    def remedy(self) -> str:
        """What to change to continue a training that has ended for that reason."""
        if self._flag in self.why:
            return f"give more than {self._flag}, or leave it out"
        return "give another --target-metric, or leave it out"

    def kept(self, epoch: int | None) -> str:
        """Return a text that says which weights are kept, if those of an epoch are."""
        if epoch is None or self._early is None:
            return ""
        return f"kept the weights of epoch {epoch + 1}, whose {self.by} is the best: {self._early.best:.4g}"

    @property
    def _flag(self) -> str:
        return f"--early-stopping {self._settings.early_stopping}"

    @property
    def _lag(self) -> str:
        assert self._early is not None  # the caller has it
        if self.best_epoch is None:
            return f"{self.by} has been no number"
        rose = "risen above" if self.mode == "max" else "fallen below"
        return f"{self.by} has not {rose} {self._early.best:.4g}, of epoch {self.best_epoch + 1},"


def rises(metric: str) -> bool:
    """Whether a metric should rise, judged by its name.

    Example:
        >>> rises("val_accuracy"), rises("F1Score"), rises("val_auc_1"), rises("val_loss")
        (True, True, True, False)
    """
    plain = re.sub(r"_[0-9]+$", "", metric).replace("_", "").lower()
    return plain.removesuffix("score").endswith(_RISING)


def with_validation(metrics: Sequence[str], validates: bool) -> list[str]:
    """Return the names of all metrics, with those of the validation if there is one."""
    return [*metrics, *(f"val_{name}" for name in metrics if validates)]
