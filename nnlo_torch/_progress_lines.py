"""Progress of a training on the terminal and for `nnlo top`: lines in each epoch, a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nnlo_common.plugin import Course, ProgressDisplay, function_given, is_live, spaced, speaks, table
from nnlo_torch._wrapper import Wrapper, wrapper_given

__all__ = ["Progress"]


class Progress:
    """Shows a training's progress on the rank whose model is the centre.

    A line has always the same columns: the epoch and how much of it is done, the samples per second of all
    workers, the loss and other scores, the staleness of the contributions, the time left. On a terminal it is
    one live line. Elsewhere a line comes at least every 10 s, as far as the training calls its optimizer.

    With `run` each rank also keeps a small file in that folder up to date, for `nnlo top RUN`, and on a
    terminal the table of `nnlo top` takes the place of the line, if the package rich is installed.

    Args:
        optimizer: the wrapper.
        model: the model, for `loss`.
        loss: returns a model's loss on few samples; called again and again with copies of the centre, beside
            the training, while a live line is shown.
        every_s: seconds between two updates of the live line.
        live: whether to show the live line; None: only on an interactive terminal, not in a batch job.
        initial_epoch: number of epochs done before, in a resumed training.
        run: a folder for what `nnlo top` shows; None: it shows nothing.
        epochs: the number of epochs, for the time left; None: unknown.
        samples: the number of samples in an epoch of all workers; None: as many as the first one has.
        log_to: "tensorboard", "mlflow", "wandb", or several of them: hand the numbers of all ranks to them as
            one run; needs `run`.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> import nnlo_torch
        >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> progress = Progress(optimizer, live=False, epochs=1)
        >>> progress.epoch({"loss": 0.25, "val_loss": 0.5})  # doctest: +ELLIPSIS
        epoch   1/1  100 % ... samples/s  loss 0.2500 | val_loss 0.5000
    """

    def __init__(
        self,
        optimizer: Wrapper,
        model: torch.nn.Module | None = None,
        loss: Callable[[torch.nn.Module], float] | None = None,
        *,
        every_s: float = 0.5,
        live: bool | None = None,
        initial_epoch: int = 0,
        run: str | Path | None = None,
        epochs: int | None = None,
        samples: int | None = None,
        log_to: str | Sequence[str] = (),
    ) -> None:
        function_given("Progress(): loss", loss, may_miss=True)
        self._optimizer, self._model, self._loss = wrapper_given(optimizer, "Progress"), model, loss
        self._live = is_live() if live is None else live
        # Without a server rank 0 knows of its own samples only, and all ranks take equally many.
        times = optimizer.size if optimizer.role == "lead" else 1
        speaking = speaks(optimizer.role)
        own = samples if speaking or optimizer.serves else None
        course = Course(epochs=epochs, samples=own, initial_epoch=initial_epoch, times=times)
        self._display = ProgressDisplay(
            optimizer.rank, optimizer.role, course, run=run, live=self._live, log_to=log_to, every_s=every_s
        )
        self._begin_at(initial_epoch)
        optimizer._joint.at_loading.append(self._begin_at)
        self._noted: Mapping[str, Any] = {}
        self._center_loss: float | None = None
        self._measuring = False
        optimizer._joint.at_taking_over.append(self._take_over)
        if speaking or optimizer.serves or run is not None:
            if optimizer.serves:
                optimizer.watch(self._look, self._display.every_s)
            else:
                optimizer.register_step_post_hook(lambda *_: self._look())
            optimizer._joint.glances.append(self._look)

    def _begin_at(self, epoch: int) -> None:
        self._display.begin_at(self._optimizer.report(), epoch)

    def note(self, scores: Mapping[str, Any]) -> None:
        """Keep the scores of a batch, such as its loss, to show; costs nothing on ranks that show none.

        Args:
            scores: numbers or tensors of one number, by name; they are read only when they are shown.

        Example:
            >>> import nnlo_torch
            >>> model = torch.nn.Linear(1, 1)
            >>> progress = Progress(nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1)))
            >>> progress.note({"loss": model(torch.ones(1, 1)).mean()})
        """
        self._noted = {
            name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in scores.items()
        }

    def epoch(self, scores: Mapping[str, float] | None = None) -> None:
        """Write the line of a finished epoch, with its scores."""
        self._center_loss, self._noted = None, {}
        self._display.end_epoch(self._optimizer.report(), dict(scores or {}))

    def end(self, scores: Mapping[str, float] | None = None) -> None:
        """Write a table of the training's results."""
        self.close()
        if not speaks(self._optimizer.role):
            return
        report = self._optimizer.report()
        rows = {f"{name} of the centre": f"{value:.4f}" for name, value in (scores or {}).items()}
        rows["time"] = f"{self._display.seconds:.1f} s"
        rows["samples"] = spaced(report.samples)
        if self._optimizer.size > 1:
            rows["exchanges"] = spaced(report.exchanges)
            rows["mean staleness"] = f"{report.mean_staleness:.2f}"
        if report.gain is not None:
            rows["gain"] = str(report.gain)
        self._display.say(table(rows))

    def close(self) -> None:
        """Leave the terminal as it was, without a table; `nnlo top` shows that this rank has ended."""
        self._display.end()

    def _take_over(self, role: str) -> None:
        """Show what this rank does from now on: it serves, or it was a spare and trains."""
        self._display.take_over(role)
        if role.startswith("worker"):  # it is not watched while it serves any more
            self._optimizer.register_step_post_hook(lambda *_: self._look())

    def _look(self) -> None:
        self._display.look(self._optimizer.report, self._scores)

    def _scores(self) -> dict[str, float]:
        """Return the scores to show; begin to measure the centre's loss again."""
        if self._loss is not None and self._model is not None and self._live and speaks(self._optimizer.role):
            if not self._measuring:
                self._measuring = True
                self._optimizer.aside(self._loss, self._model, self._measured)
            return {} if self._center_loss is None else {"centre loss": self._center_loss}
        return {name: float(value) for name, value in self._noted.items()}

    def _measured(self, loss: float) -> None:
        self._center_loss, self._measuring = loss, False
