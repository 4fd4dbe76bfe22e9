"""Progress of a training on the terminal: a live line in each epoch, a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nnlo_common.plugin import Meter, Screen, is_live, spaced, speaks, table
from nnlo_torch._wrapper import Wrapper

__all__ = ["Progress"]


class Progress:
    """Shows a training's progress on the rank whose model is the centre; does nothing on other ranks.

    During an epoch one line shows the samples per second of all workers, the staleness of their
    contributions, and the centre's loss, measured on a copy of the centre beside the training.

    Args:
        optimizer: the wrapper.
        model: the model, for `loss`.
        loss: returns a model's loss on few samples; called again and again with copies of the centre.
        every_s: seconds between two updates of the line.
        live: whether to show the line; None: only on an interactive terminal, not in a batch job.
        initial_epoch: number of epochs done before, in a resumed training.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> import nnlo_torch
        >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> progress = Progress(optimizer, live=False)
        >>> progress.epoch({"loss": 0.25})  # doctest: +ELLIPSIS
        epoch   1 ...  loss 0.2500
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
    ) -> None:
        self._optimizer, self._model, self._loss = optimizer, model, loss
        self._speaks = speaks(optimizer.role)
        self._live = is_live() if live is None else live
        self._meter, self._screen = Meter(), Screen(live=self._live)
        self._center_loss: float | None = None
        self._measuring = False
        self._epochs = initial_epoch
        if self._speaks and self._live:
            optimizer.watch(self._look, every_s)

    def epoch(self, scores: Mapping[str, float] | None = None) -> None:
        """Write the line of a finished epoch, with its scores."""
        self._epochs += 1
        self._center_loss = None
        if not self._speaks:
            return
        report = self._optimizer.report()
        shown = [f"{name} {value:.4f}" for name, value in (scores or {}).items()]
        self._screen.settle("  ".join([f"epoch {self._epochs:>3}", self._meter.line(report), *shown]))
        self._meter.mark(report)

    def end(self, scores: Mapping[str, float] | None = None) -> None:
        """Write a table of the training's results."""
        if not self._speaks:
            return
        report = self._optimizer.report()
        rows = {f"{name} of the centre": f"{value:.4f}" for name, value in (scores or {}).items()}
        rows["time"] = f"{self._meter.seconds:.1f} s"
        rows["samples"] = spaced(report.samples)
        if self._optimizer.size > 1:
            rows["exchanges"] = spaced(report.exchanges)
            rows["mean staleness"] = f"{report.mean_staleness:.2f}"
        self._screen.settle(table(rows))

    def _look(self) -> None:
        shown = [] if self._center_loss is None else [f"centre loss {self._center_loss:.4f}"]
        line = self._meter.line(self._optimizer.report())
        self._screen.show("  ".join([f"epoch {self._epochs + 1:>3}", line, *shown]))
        if self._loss is not None and self._model is not None and not self._measuring:
            self._measuring = True
            self._optimizer.aside(self._loss, self._model, self._measured)

    def _measured(self, loss: float) -> None:
        self._center_loss, self._measuring = loss, False
