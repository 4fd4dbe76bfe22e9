"""Report: the facts of a training, one file for each rank, for `nnlo report`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras

from nnlo_common import FlatVector, TrainingReport
from nnlo_common.plugin import (
    FactsWriter,
    StepProfiler,
    Vector,
    begin_torch_profile,
    span,
    warn,
    whole_number,
)
from nnlo_keras._callbacks._rank_callback import Driver, RankCallback, numbers

__all__ = ["Report", "begin_profile"]

# -- profilers of Keras's back ends --------------------------------------------------------------------


def begin_profile(folder: Path) -> Callable[[], object]:
    """Begin to profile with the profiler of the back end, and return what ends that.

    Args:
        folder: gets a trace.json from torch, and files for TensorBoard from TensorFlow and JAX.
    """
    backend = keras.backend.backend()
    framework: Any = importlib.import_module(backend)
    if backend == "torch":
        return begin_torch_profile(framework, folder)
    if backend == "tensorflow":
        framework.profiler.experimental.start(str(folder))
        stop: Callable[[], object] = framework.profiler.experimental.stop
        return stop
    framework.profiler.start_trace(str(folder))
    end: Callable[[], object] = framework.profiler.stop_trace
    return end


class Report(RankCallback):
    """Writes down what happens on each rank while it happens; `nnlo report FOLDER` makes a page of it.

    `Report("run")` appends lines of JSON to run/ranks/facts.rank0.jsonl and so on: the layout, versions
    and your configuration at the start; each epoch with its time, batches, metrics, staleness and where the
    time went; memory, processor and GPU about once a second; ranks that stall or die. Lines are whole at any
    time, even after the training is killed. On a server `batches` are those of all workers, as far as it
    knows, and the metrics those of the centre.

    With `timeline=True` each rank also writes a trace, run/ranks/timeline.rank0.json and so on, of its
    computing, waits, messages, reads, checkpoints and validations. `nnlo trace FOLDER` merges them for
    https://ui.perfetto.dev.

    Args:
        folder: the folder of the run; created if missing.
        config: what to write down about this run, such as your options.
        timeline: write a trace, too.
        profile: run the profiler of the back end for steps of some ranks: "10-20" or "10-20@1,3"; it
            writes into run/ranks/profile.rank1 and so on. Servers make no steps.
        limit_mb: the most that each rank's trace takes; it keeps the latest events.
        every_s: seconds between two looks at memory and processor; in a long run they become rarer.
        gradients: write down how large the values of each layer's gradient are, in the first and then every
            so many of those that this rank sends; 0: never. A process alone sends none, and neither do
            algorithms whose optimizer runs on the workers, such as EASGD.

    Example:
        >>> import json, tempfile
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((40, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fitted = model.fit(x, x, callbacks=[Report(folder, config={"data": "ones"})], verbose=0)
        ...     lines = map(json.loads, Path(folder, "ranks", "facts.rank0.jsonl").read_text().splitlines())
        ...     (epoch,) = [line for line in lines if line["what"] == "epoch"]
        >>> [epoch[name] for name in ("batches", "samples")]
        [2, 40]
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        timeline: bool = False,
        profile: str | None = None,
        limit_mb: float = 100.0,
        every_s: float = 1.0,
        gradients: int = 0,
    ) -> None:
        super().__init__()
        self._every = whole_number("gradients", gradients, 0)
        self.folder, self._config, self._profile = Path(folder), config, profile
        self._profiler: StepProfiler | None = None
        self._options: dict[str, Any] = {"timeline": timeline, "limit_mb": limit_mb, "every_s": every_s}
        self._facts: FactsWriter | None = None
        self._samples: int | None = None
        self._earlier = 0  # samples of this epoch that an earlier start has taken
        self._test: Any = span("validate")

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        options = {**self._options, "gradients": self._every}
        return type(self)(self.folder, config=self._config, profile=self._profile, **options)

    def before_part(self, distribute: Driver) -> None:
        """Begin to write, before this rank waits for others."""
        self.distribute, self.team = distribute, distribute.team
        self._begin()

    def after_start(self, distribute: Driver | None) -> None:
        """In a process alone: begin to write."""
        super().after_start(distribute)
        if self.team is None:
            self._begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Start measuring the epoch."""
        if self._facts is not None:
            self._facts.begin_epoch()
        self._batches = self._earlier = 0
        self._samples = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count the batches."""
        self._batches = batch + 1
        self._counts.batches += 1
        if self._profiler is not None:
            self._profiler.end_step()

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the samples now: the validation resets Keras's count. Its time is that of validating."""
        self._samples = self._samples_here
        self._test = span("validate")
        self._test.__enter__()

    def on_test_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """End the validation."""
        self._test.__exit__(None, None, None)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the line."""
        counts = {"batches": self._batches}
        if self.trains:
            counts["samples"] = self._samples_here if self._samples is None else self._samples
        elif self.distribute is not None:
            counts["batches"] = self._batches_served()
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        if self._facts is not None:
            self._facts.epoch(epoch, counts, rate, numbers(logs))

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """In a process alone: write the last line."""
        if self.team is None:
            self._close()

    def resume_epoch(self) -> None:
        """Count from here: an earlier start has begun this epoch."""
        self._earlier = self.samples_in_epoch

    @property
    def _samples_here(self) -> int:
        return self.samples_in_epoch - self._earlier

    def begin_to_serve(self) -> None:
        """Begin the counts of this epoch anew: they are those of the server from now on."""
        if self.distribute is not None:
            self._served = self.distribute.report.samples

    def after_leaving(self) -> None:
        """Write the last line."""
        self._close()

    def _begin(self) -> None:
        self._batches, team = 0, self.team
        self._served = 0 if team is None else team.report().samples  # of a checkpoint
        self._close()
        counts = _BatchCount()
        self._counts = counts
        report = counts if team is None else team.report
        self._facts = FactsWriter(
            self.folder, team, report, unit="batches", config=self._config, **self._options
        )
        if self._profile is not None:
            rank, size = (0, 1) if team is None else (team.rank, team.size)
            self._profiler = StepProfiler(self._profile, self.folder, rank, size, begin_profile)
        self._facts.end_with(self)
        if not self._every:
            return
        if team is None or not team.sends_gradients:
            who = "a process alone" if team is None else type(team.algorithm).__name__
            warn(f"Report(gradients={self._every}) writes down gradients that are sent, but {who} sends none")
        else:
            look = self._facts.gradient_watch(self._every)
            team.gradient_made = lambda gradient: look(partial(_layers, gradient))

    def _close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        if self._facts is not None:
            self._facts.close()
            self._facts = None
        if self.team is not None:
            self.team.gradient_made = None

    def _batches_served(self) -> int:
        assert self.distribute is not None  # only servers call this
        total = self.distribute.report.samples  # Distribute reports batches as samples
        batches, self._served = total - self._served, total
        return batches


def _layers(gradient: FlatVector) -> Iterator[tuple[str, Vector]]:
    """Yield the name of each weight and its gradient."""
    for segment in gradient.layout.segments:
        yield segment.name, gradient.vector[segment.place]


class _BatchCount:
    """Counts of a process alone; apart from the callback, so that writing does not keep that in memory."""

    batches = 0

    def __call__(self) -> TrainingReport:
        """Return the counts."""
        return TrainingReport(steps=self.batches, samples=self.batches)
