"""Progress of a training: lines in each epoch, and what `nnlo top` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nnlo_common import TrainingReport
from nnlo_common.plugin import Course, ProgressDisplay, is_live
from nnlo_keras._callbacks._rank_callback import Driver, RankCallback, numbers
from nnlo_keras._compat import batch_size_of_fit

__all__ = ["Progress"]


class Progress(RankCallback):
    """Shows a training's progress on the rank whose model is the centre; use it with `verbose=0`.

    A line has always the same columns: the epoch and how much of it is done, the samples per second of all
    workers, the loss and other metrics, those of the validation apart, the staleness of the contributions,
    the time left. On a terminal it is one live line. Elsewhere a line comes at least every 10 s, as far as
    Keras calls its callbacks. Data whose batch size Keras does not know is counted in batches.

    With `run` each rank also keeps a small file in that folder up to date, for `nnlo top RUN`, and on a
    terminal the table of `nnlo top` takes the place of the line, if the package rich is installed.

    Args:
        run: a folder for what `nnlo top` shows; None: it shows nothing.
        samples: the number of samples in an epoch of all workers; None: as many as the first one has.
        live: whether to show the live line; None: only on an interactive terminal, not in a batch job.
        log_to: "tensorboard", "mlflow", "wandb", or several of them: hand the numbers of all ranks to them as
            one run; needs `run`.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.zeros((40, 1))
        >>> fitted = model.fit(x, x, callbacks=[Progress(live=False)], verbose=0)  # doctest: +ELLIPSIS
        epoch   1/1  100 % ... samples/s  loss 0.0000
    """

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        samples: int | None = None,
        live: bool | None = None,
        log_to: str | Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._run, self._samples, self._live, self._log_to = run, samples, live, log_to
        self._display: ProgressDisplay | None = None
        self._logs: Any = None

    def before_start(self, role: str) -> None:
        """Count from 0."""
        super().before_start(role)
        self._before, self._batch, self._first = 0, 0, TrainingReport()

    def before_part(self, distribute: Driver) -> None:
        """Count from the checkpoint that a server has loaded; workers may be ahead once they have joined."""
        self._first = distribute.report

    def after_start(self, distribute: Driver | None) -> None:
        """Record what a batch has; the display is made once the first epoch is known."""
        super().after_start(distribute)
        self._display, self._logs = None, None
        self._role_shown = self.role
        feed = None if distribute is None else distribute.feed
        size = batch_size_of_fit() if feed is None else feed.batch_size
        self._size, self._unit = (1, "batches") if size is None else (size, "samples")
        self._all = self._samples if feed is None or self._samples is not None else feed.size

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Begin the display in the first epoch."""
        if self._display is None:
            self._display = self._made(epoch)
            if not self.trains:
                self._display.begin_at(self._in_samples(self._first), epoch)
            if self.team is not None:
                self.team.watch(self._look, self._display.every_s)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Show the progress, if it is time to."""
        if self.trains:
            self._batch, self._logs = batch + 1, logs
            self._look()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Show the progress, if it is time to."""
        self._look()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Write the line of the epoch."""
        if self._display is not None:
            self._display.end_epoch(self._report(), numbers(logs))
        self._before, self._batch, self._logs = self._before + self._batch, 0, None

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Leave the terminal as it was, in a process alone."""
        if self.team is None:
            self.after_epochs()

    def after_epochs(self) -> None:
        """Leave the terminal as it was."""
        if self._display is not None:
            self._display.end()

    # -- inside ---------------------------------------------------------------------------------------

    def _made(self, epoch: int) -> ProgressDisplay:
        times = self.team.size if self.team is not None and self.role == "lead" else 1
        own = self.params.get("steps") if self.team is None or self.trains else None
        whole = self._all if self.has_center or not self.trains else None
        if whole is not None and self._unit == "batches":
            whole = None
        elif whole is None and own:
            whole = own * self._size * times
        course = Course(
            epochs=self.params.get("epochs"),
            samples=whole,
            initial_epoch=epoch,
            times=times,
            unit=self._unit,
        )
        live = is_live() if self._live is None else self._live
        return ProgressDisplay(self.rank, self.role, course, run=self._run, live=live, log_to=self._log_to)

    def _look(self) -> None:
        if self._display is not None:
            if self._role_shown != self.role:  # a spare has taken over
                self._role_shown = self.role
                self._display.take_over(self.role)
            self._display.look(self._report, lambda: numbers(self._logs))

    def _report(self) -> TrainingReport:
        """Return this rank's counts, in samples; `Distribute` counts batches."""
        if self.distribute is not None and self.team is not None and not self.trains:
            return self._in_samples(self.distribute.report)
        return self._in_samples(TrainingReport(samples=self._before + self._batch))

    def _in_samples(self, told: TrainingReport) -> TrainingReport:
        return replace(told, samples=told.samples * self._size)
