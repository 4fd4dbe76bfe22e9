"""Trainer: base class of the trainings with Keras and with PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.commands.train._job import brief
from nnlo_common.commands.train._python_file import users_line
from nnlo_common.commands.train._run_plan import RunPlan
from nnlo_common.commands.train._stopping import Stopping, with_validation
from nnlo_common.simulation._probe import ProbedModel

__all__ = ["Trainer"]


class Trainer(ABC):
    """One rank's training.

    Args:
        plan: of the training.

    Attributes:
        learning_rate: the first one of the optimizer, of one process.
        rate_scale: what these ranks multiply it by.
        metrics: the names of the metrics of each epoch.
        model: the model in training; at the end the centre, on the rank that has it.
        kept: the epoch whose weights it has at the end, from 0; None: the last one.
        ending: why the training ended, and which weights it kept, as lines.
    """

    learning_rate: float
    metrics: Sequence[str]

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._settings = plan, plan.settings
        self.model = plan.loaded.model
        self.rate_scale = plan.rate_scale
        self.kept: int | None = None
        self.ending: list[str] = []

    @property
    @abstractmethod
    def role(self) -> str:
        """This rank's part: "alone", "server 0", "worker 0", ..."""

    def join(self) -> None:  # noqa: B027 - optional
        """Join the other ranks, if the framework does so before the first epoch (collective)."""

    @abstractmethod
    def train(self, folder: Path) -> dict[str, list[float]]:
        """Train, and return this rank's metrics, epoch by epoch (collective)."""

    @abstractmethod
    def probed(self) -> ProbedModel:
        """Return what a probe asks of this training, before the ranks join."""

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
        self._train = opened(data.train, **settings.reading("training"), **train, **data.reading)
        self._val = opened(data.val, **val, **data.val_reading) if data.val else None

    def _note_metrics(self, names: Sequence[str]) -> None:
        """Set the metrics of an epoch, and what ends the training by them."""
        self.metrics = with_validation(names, self._val is not None)
        self._stopping = Stopping(self._settings, self.metrics)

    def _note_end(self, epochs: int, kept: int | None) -> bool:
        """Note how the training ended; return whether to keep the weights of an epoch.

        Args:
            epochs: that were trained.
            kept: the epoch whose weights were put aside as the best.
        """
        rules = self._stopping
        if rules.why:
            self.ending.append(f"ended after epoch {epochs} of {self._settings.epochs}: {rules.why}")
        if rules.by is None or rules.best_epoch is None:
            return False
        if kept != rules.best_epoch:
            self.ending.append(
                f"kept the weights of the last epoch: those of epoch {rules.best_epoch + 1}, the best by "
                f"{rules.by}, were not put aside, as it was trained without --early-stopping"
            )
            return False
        self.kept = kept
        self.ending.append(rules.kept(kept))
        return True

    @contextmanager
    def _trying(self, features: str, labels: str, model: str = "") -> Iterator[None]:
        """Try the model on some samples; turn any error into one that says that they do not fit."""
        try:
            yield
        except Exception as error:
            found = f"features {features}, labels {labels}{model}"
            if (where := users_line(error)) and not isinstance(error, NNLOError):
                raise ConfigurationError(
                    f"{where}\n{type(error).__name__}: {brief(str(error)) or 'no message'}\n"
                    f"It was raised when the model, --loss and --metrics were tried on two samples: {found}"
                ) from None
            raise ConfigurationError(
                f"the model, the samples and --loss {self._settings.loss} do not fit: {found}\n"
                f"{type(error).__name__}: {brief(str(error))}\n"
                "Choose another --loss, --features-name or --labels-name, or adapt the arrays with "
                "get_features() or get_labels() of a Python file"
            ) from None
