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
    """Writes a trace of epochs, batches and exchanges, one file per rank.

    `Timeline(optimizer, "run/timeline.json")` writes run/timeline.rank0.json and so on. Open them with
    https://ui.perfetto.dev or chrome://tracing; several files opened together show one process per rank. A
    "batch" is your loop up to the step: waiting for data and computing the gradient. A "step" is a step
    without other ranks, an "exchange" one with them; each event with other ranks has the milliseconds spent
    waiting. On a server, "serve" is the workers' epoch: it waits except for their exchanges. Each event takes
    about 100 bytes. The file is written about once a second and is valid JSON at any time, even after the
    training is killed.

    Args:
        optimizer: the wrapper.
        path: the file; the rank is added to its name, and an old file is replaced.
        initial_epoch: number of epochs done before, in a resumed training.

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
        """Add a finished epoch."""
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
        """Add an exchange or another operation with other ranks."""
        if what == "exchange" and not self._exchanges:
            return  # a step that exchanged nothing
        if what == "end epoch" and self._optimizer.serves:
            what = "serve"
        self._trace.add(what, begin_s, end_s, waited_ms=round(1e3 * waited_s, 3))
        self._last_s = end_s
        if what == "leave":
            self._trace.flush()
