"""Timeline: a trace of the time spent by each rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnlo_common.plugin import Trace
from nnlo_torch._wrapper import Wrapper

__all__ = ["Timeline"]


class Timeline:
    """Writes a trace of epochs, batches and exchanges, in a file of each rank's own.

    `Timeline(optimizer, "run/timeline.json")` writes run/timeline.rank0.json and so on, to be opened with
    https://ui.perfetto.dev or chrome://tracing; several at once lie side by side, a process for each rank. A
    "batch" is what your loop does before it steps: it waits for the data and computes the gradient. A "step"
    is a step here without others, an "exchange" one with them; of whatever is done with other ranks it says
    how many milliseconds were spent waiting. On a server, "serve" is the workers' epoch, which it waits
    through but for their exchanges. The file grows by about 100 bytes for each of these, is written about
    once a second, and is valid JSON at any time, also when the training is killed.

    Args:
        optimizer: the wrapper.
        path: the file; the rank is added to its name, and an old one is replaced.
        initial_epoch: how many epochs there were before, of a training that goes on.

    Example:
        >>> import json, tempfile, torch
        >>> import nnlo_torch
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     timeline = Timeline(optimizer, folder + "/timeline.json")
        ...     for x in optimizer.epoch([torch.ones(20, 1)]):
        ...         model(x).mean().backward()
        ...         optimizer.step()
        ...     timeline.epoch()
        ...     events = json.loads(Path(folder, "timeline.rank0.json").read_text())
        >>> [event["name"] for event in events]
        ['process_name', 'batch', 'step', 'epoch 0']
    """

    def __init__(self, optimizer: Wrapper, path: str | Path, *, initial_epoch: int = 0) -> None:
        self._trace = Trace.of_rank(path, optimizer.rank, optimizer.role)
        self._optimizer, self._epochs, self._exchanges = optimizer, initial_epoch, False
        self._epoch_s = self._last_s = self._step_s = time.perf_counter()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.observe(self._see)

    def epoch(self, scores: Mapping[str, float] | None = None) -> None:  # noqa: ARG002 - as for `Progress`
        """Add an epoch that has ended."""
        now_s = time.perf_counter()
        self._trace.add(f"epoch {self._epochs}", self._epoch_s, now_s)
        self._epochs += 1
        self._epoch_s = self._last_s = now_s
        self._trace.flush()

    def _before_step(self, *_: Any) -> None:
        self._step_s, self._exchanges = time.perf_counter(), self._optimizer.due
        self._trace.add("batch", self._last_s, self._step_s)

    def _after_step(self, *_: Any) -> None:
        self._last_s = time.perf_counter()
        if not self._exchanges:
            self._trace.add("step", self._step_s, self._last_s)

    def _see(self, what: str, begin_s: float, end_s: float, waited_s: float) -> None:
        """Take an exchange, or what else is done with other ranks."""
        if what == "exchange" and not self._exchanges:
            return  # a step without one
        if what == "end epoch" and self._optimizer.serves:
            what = "serve"
        self._trace.add(what, begin_s, end_s, waited_ms=round(1e3 * waited_s, 3))
        self._last_s = end_s
        if what == "leave":
            self._trace.flush()
