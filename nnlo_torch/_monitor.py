"""Monitor: a line of JSON for each epoch of each rank, with its work and its usage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nnlo_common.plugin import EpochLog
from nnlo_torch._wrapper import Wrapper

__all__ = ["Monitor"]


class Monitor:
    """Appends a line of JSON for each epoch to one file per rank.

    `Monitor(optimizer, "run/monitor.jsonl")` writes run/monitor.rank0.jsonl and so on. A line holds: epoch,
    rank, role; time (seconds since 1970) and the seconds since the previous line; samples and samples per
    second (on a server the sum over all workers, as far as it knows); on a worker batches and batches per
    second; memory_mb and cpu_s of the process (cpu_s within the epoch); on a server exchanges and
    mean_staleness since the training's start; learning_rate of the first parameter group; metrics: the scores
    passed to `epoch`. Numbers that are not finite are written as null.

    Args:
        optimizer: the wrapper.
        path: the file; the rank is added to its name.
        initial_epoch: number of epochs done before, in a resumed training.

    Example:
        >>> import json, tempfile, torch
        >>> import nnlo_torch
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     monitor = Monitor(optimizer, folder + "/monitor.jsonl")
        ...     for x in optimizer.epoch([torch.ones(20, 1), torch.ones(20, 1)]):
        ...         optimizer.zero_grad()
        ...         model(x).mean().backward()
        ...         optimizer.step()
        ...     monitor.epoch({"loss": 0.5})
        ...     line = json.loads(Path(folder, "monitor.rank0.jsonl").read_text())
        >>> [line[name] for name in ("role", "batches", "samples", "metrics")]
        ['alone', 2, 40, {'loss': 0.5}]
    """

    def __init__(self, optimizer: Wrapper, path: str | Path, *, initial_epoch: int = 0) -> None:
        self._optimizer, self._epochs, self._before = optimizer, initial_epoch, optimizer.report()
        self._log = EpochLog(path, optimizer.rank, optimizer.role)

    def epoch(self, scores: Mapping[str, float] | None = None) -> None:
        """Write the line of a finished epoch, with its scores."""
        optimizer, before = self._optimizer, self._before
        report = self._before = optimizer.report()
        counts = {"samples": report.samples - before.samples}
        if not optimizer.serves:
            counts["batches"] = report.steps - before.steps
        rate = float(optimizer.param_groups[0]["lr"])
        metrics = {name: float(value) for name, value in (scores or {}).items()}
        self._log.end(self._epochs, counts, rate, metrics, report if optimizer.serves else None)
        self._epochs += 1
        self._log.begin()
