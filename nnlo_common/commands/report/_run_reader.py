"""Facts of a run, as values, and their reader: from what its ranks have written, and its options."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from nnlo_common.algorithms import GainReport
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_TOML
from nnlo_common.base._spans import KINDS, STAGES
from nnlo_common.commands.train._run_folder import CONFIG, SEARCH
from nnlo_common.training._rank_parts import serves, speaks
from nnlo_common.training.report._facts_writer import facts_files, read_facts

__all__ = ["EpochFacts", "PAGE", "RankFacts", "RunFacts", "Sample", "TimeShares", "read_run"]

# -- shares of a rank's time, by kind ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Where the time of a rank went.

    Attributes:
        seconds: by kind, see `nnlo_common.base._spans.KINDS`.
        batch_s: the median over epochs of the time of a batch: its data and its gradient; None: unknown.

    Example:
        >>> TimeShares(seconds={"compute": 3.0, "wait": 1.0}, batch_s=None).share("wait", "idle")
        0.25
    """

    seconds: Mapping[str, float]
    batch_s: float | None

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    def share(self, *kinds: str) -> float:
        """Return the part of the time that went into some kinds, from 0 to 1."""
        found = sum(self.seconds.get(kind, 0.0) for kind in kinds)
        return found / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """One epoch of one rank.

    Attributes:
        ended_s: when it ended, in seconds since 1970.
        seconds: how long it took.
        samples: how many this rank trained on; on a server those of all workers.
        batches: the same, for batches.
        spent: seconds by kind.
        memory_mb: resident memory at its end.
        cpu_s: processor time within it.
        core_wait_s: how long its threads were ready within it, and had no core; None: unknown.
        metrics: by name; None: not a finite number.
        shared_mb: the part of the memory that other processes have, too.
        stages: seconds of reading by stage, see `nnlo_common.base._spans.STAGES`.
        reading: further facts about it: `how` samples are encoded, the bytes of a stored piece, and what of
            them is kept in memory.
    """

    ended_s: float
    seconds: float
    samples: float
    memory_mb: float
    cpu_s: float
    metrics: Mapping[str, float | None]
    core_wait_s: float | None = None
    batches: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    shared_mb: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    reading: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The usage of one rank at a moment.

    Attributes:
        at_s: in seconds since 1970.
        memory_mb: resident memory.
        peak_memory_mb: the most that it was since the process started.
        cpu_s: processor time since the process started.
        moved_mb: bytes read and written since then.
        gpu: the mean load of the GPUs that it sees, from 0 to 1; None: unknown.
        gain: how much work the workers have done together so far; None: it is not measured here.
    """

    at_s: float
    memory_mb: float
    peak_memory_mb: float
    cpu_s: float
    moved_mb: float
    gpu: float | None
    gain: GainReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank of a run.

    Attributes:
        rank: its number.
        role: "alone", "server 0", "worker 0", ...
        former: whether only an earlier start of the run had it, on more ranks.
        host: the machine; empty: unknown.
        cores: how many processor cores of that machine this job may use; None: unknown.
        samples: how many it has trained on, or served.
        exchanges: the contributions that a server has applied.
        dropped: those that it has dropped as too stale.
        staleness: the mean staleness of those that it has applied.
        lost: a line for each rank that died.
        stalls: a line for each worker that was silent for longer than usual.
        diverged: a line about numbers that were not finite, which a server has refused or a group has used.
        stalenesses: for each worker's rank, how often each staleness came.
        epochs: those that have ended.
        samples_of_usage: about one for each second.
        shares: where its time went; None: unknown.
        gain: how much work the workers have done together; None: it is not measured here.
        noise_scale: the gradient noise scale at the end; None: the same.
        noise_in_batches: whether that is in batches, not in samples.
        gradients: the step that was last looked at, and how many values each layer's gradient had up to each
            power of two; None: it was not asked for.
    """

    rank: int
    role: str
    former: bool = False
    host: str = ""
    cores: int | None = None
    samples: int = 0
    exchanges: int = 0
    dropped: int = 0
    staleness: float = 0.0
    lost: Sequence[str] = ()
    stalls: Sequence[str] = ()
    diverged: Sequence[str] = ()
    stalenesses: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    samples_of_usage: Sequence[Sample] = ()
    epochs: Sequence[EpochFacts] = ()
    shares: TimeShares | None = None
    gain: GainReport | None = None
    noise_scale: float | None = None
    noise_in_batches: bool = False
    gradients: tuple[int, Mapping[str, Mapping[int, int]]] | None = None

    @property
    def trains(self) -> bool:
        """Whether it computes gradients."""
        return not serves(self.role) and not self.former

    @property
    def peak_memory_mb(self) -> float | None:
        """The most resident memory that it had at any time; None: unknown."""
        return max((one.peak_memory_mb for one in self.samples_of_usage), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run.

    Attributes:
        folder: of its files.
        history: the centre's metrics, a number for each epoch; None: not a finite number; NaN: that epoch
            did not have it.
        workers: the same for each worker, by role.
        ranks: all that are known.
        began: when it began, as text; empty: unknown.
        seconds: how long it took; None: it has not ended.
        command: the line that started it.
        versions: of programs, by name.
        layout: how its ranks were arranged, by name.
        config: its options, as text.
    """

    folder: Path
    history: Mapping[str, Sequence[float | None]]
    workers: Mapping[str, Mapping[str, Sequence[float | None]]]
    ranks: Sequence[RankFacts]
    began: str = ""
    seconds: float | None = None
    command: str = ""
    versions: Mapping[str, str]
    layout: Mapping[str, str] = field(default_factory=dict)
    config: str = ""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def center(self) -> RankFacts | None:
        """The rank that has the centre: the last one, which has taken over from those before it."""
        return next((one for one in reversed(self.ranks) if speaks(one.role) and not one.former), None)

    @property
    def workers_count(self) -> int:
        """How many ranks train."""
        return sum(one.trains for one in self.ranks)

    @property
    def epoch_samples(self) -> list[float]:
        """The samples of all workers in each epoch of the centre."""
        epochs = self.center.epochs if self.center is not None else ()
        if self.center is not None and self.center.role != "lead" and any(one.samples for one in epochs):
            return [one.samples for one in epochs]
        # A lead tells of its own samples only, and a server of Keras of none.
        return [
            sum(rank.epochs[number].samples for rank in self.ranks if number < len(rank.epochs))
            for number in range(len(epochs))
        ]

    @property
    def samples_per_second(self) -> float | None:
        """The pace of all workers together, over the epochs; None before the first has ended."""
        seconds = sum(one.seconds for one in self.center.epochs) if self.center is not None else 0.0
        return sum(self.epoch_samples) / seconds if seconds else None


# -- reader of a run's folder: the facts that its ranks have written, and its options -------------------

#: The page of a run, or of a search, in its folder.
PAGE = "report.html"
_LONGEST_HOW = 60
_LARGEST = 1e300  # whole numbers beyond it are no floats
_MOST_POWER = 2000  # of two, beyond that of any float
_LAYOUT = ("algorithm", "workers", "servers", "group_size", "parameters")


def read_run(folder: Path) -> RunFacts:
    """Read the files of a run, also of one that is under way or was killed.

    Raises:
        ConfigurationError: the folder has no such files, or one of them is damaged.
    """
    if not folder.is_dir():
        there = "it is a file" if folder.exists() else "there is no such folder"
        raise ConfigurationError(f"{folder}: {there}; name the folder of a run, or the journal of a search")
    ranks = [_RankLines(path, rank) for path, rank in sorted(facts_files(folder), key=lambda one: one[1])]
    if not ranks:
        raise ConfigurationError(_without_facts(folder))
    size = _size(ranks)
    center = next((one for one in reversed(ranks) if speaks(one.role) and one.rank < size), ranks[0])
    start = center.start
    versions = start.get("versions")
    began_s = _number(start.get("time"))
    return RunFacts(
        folder=folder,
        history=center.history("metrics"),
        workers=_by_role(ranks),
        ranks=[replace(one.facts(), former=one.rank >= size) for one in ranks],
        began="" if began_s is None else _as_text(began_s),
        seconds=center.seconds,
        command=str(start.get("command", "")),
        versions={str(name): str(one) for name, one in versions.items()}
        if isinstance(versions, Mapping)
        else {},
        layout={name: str(start[name]) for name in _LAYOUT if name in start},
        config=_config(folder, start),
    )


def _size(ranks: Sequence[_RankLines]) -> float:
    """Return how many ranks the last start has; infinite: it does not tell."""
    start = max((one.start for one in ranks), key=lambda start: _number(start.get("time")) or 0.0)
    return 1 if start.get("role") == "alone" else _number(start.get("size")) or math.inf


def _without_facts(folder: Path) -> str:
    """Return why a folder has no facts, and which has."""
    below = min((path.parents[1] for path in folder.glob("**/facts.rank0.jsonl")), default=None)
    if (folder / SEARCH).is_file():
        page = folder / PAGE
        told = f"its page is {page}" if page.is_file() else "it writes its page when it ends"
        one = f". For one of its trials: nnlo report {below}" if below else ""
        return f"{folder} is the folder of a search; {told}{one}"
    lacks = f"{folder} has no facts of a run (ranks/facts.rank0.jsonl)"
    if below:
        return f"{lacks}, but a folder in it has: nnlo report {below}"
    return (
        f"{lacks}: name the folder of `nnlo train`, or of a Report or a Checkpoint in a script; without any "
        "of these, add the callback Report('run') in Keras, or Report(optimizer, 'run') in PyTorch"
    )


def _by_role(ranks: Sequence[_RankLines]) -> dict[str, dict[str, list[float | None]]]:
    """Return each worker's history; of two ranks in one place, one died, and is named with its number."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for one in reversed(ranks):
        if one.role.startswith("worker"):
            again = f", rank {one.rank}" if one.role in found else ""
            found[one.role + again] = one.history("own")
    return dict(reversed(found.items()))


class _RankLines:
    """The lines of one rank's file; of an epoch that was made again after a restart, the last one counts."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self.rank = path, rank
        self.start: Mapping[str, Any] = {}
        self._epochs: dict[int, Mapping[str, Any]] = {}
        self._told: dict[str, list[str]] = {"lost": [], "stall": [], "diverged": []}
        self._samples: list[Sample] = []
        self._last: Mapping[str, Any] = {}  # with what a server tells of its workers
        self._spent: Any = None
        self._gradients: tuple[int, dict[str, dict[int, int]]] | None = None
        self._before_s = 0.0  # the time of earlier starts
        self._seconds = 0.0
        self._ended = False
        self.role = f"rank {rank}"
        for line in read_facts(path):
            self._take(line)

    @property
    def seconds(self) -> float | None:
        """How long it ran; None: it has not ended."""
        return self._before_s + self._seconds if self._ended else None

    def history(self, what: str) -> dict[str, list[float | None]]:
        """Return the metrics of all epochs, by name."""
        found: dict[str, list[float | None]] = {}
        for number, epoch in enumerate(sorted(self._epochs)):
            line = self._epochs[epoch]
            metrics = line.get(what, line.get("metrics"))
            for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
                known = found.setdefault(str(name), [])
                known += [math.nan] * (number - len(known)) + [_number(value)]
        return found

    def facts(self) -> RankFacts:
        """Return what a report uses."""
        epochs = [self._epoch(self._epochs[number]) for number in sorted(self._epochs)]
        cores = _number(self.start.get("cores"))
        return RankFacts(
            rank=self.rank,
            role=self.role,
            host=str(self.start.get("host", "")),
            cores=None if cores is None else int(cores),
            samples=int(sum(one.samples for one in epochs)),
            exchanges=int(_number(self._last.get("exchanges")) or 0),
            dropped=int(_number(self._last.get("dropped")) or 0),
            staleness=_number(self._last.get("mean_staleness")) or 0.0,
            lost=self._told["lost"],
            stalls=self._told["stall"],
            diverged=self._told["diverged"],
            stalenesses=_counts(self._last.get("staleness")),
            epochs=epochs,
            samples_of_usage=self._samples,
            shares=_shares(epochs, self._spent),
            gain=_gain(self._last.get("gain")),
            noise_scale=_number(self._last.get("noise_scale")),
            noise_in_batches=self._last.get("noise_unit") == "batches",
            gradients=self._gradients,
        )

    def _take(self, line: Mapping[str, Any]) -> None:
        what = line["what"]
        if what == "start":
            self.start, self._ended = line, False
            self.role = str(line.get("role", self.role))
            self._told["diverged"].clear()  # that start goes on from before it
            self._before_s, self._seconds = self._before_s + self._seconds, 0.0
        elif what == "epoch":
            number = _number(line.get("epoch"))
            if number is None:
                raise self._error(line)
            self._epochs[int(number)] = self._last = line
        elif what == "sample":
            self._samples.append(self._sample(line))
            self._spent = line.get("spent")
        elif what == "gradients":
            self._gradients = _gradients(line)
        elif what in self._told:
            self._told[what].append(str(line.get("text")))
        elif what == "role":  # a spare has taken over
            self.role = str(line.get("role"))
        elif what == "end":
            self._ended, self._last = line.get("over") is True, {**self._last, **line}
        if what in ("sample", "end"):
            self._seconds = _number(line.get("seconds")) or self._seconds

    def _epoch(self, line: Mapping[str, Any]) -> EpochFacts:
        numbers = self._numbers(line, "time", "seconds", "memory_mb", "cpu_s")
        metrics = line.get("metrics")
        if not isinstance(metrics, Mapping):
            raise self._error(line)
        return EpochFacts(
            ended_s=numbers[0],
            seconds=numbers[1],
            samples=_number(line.get("samples")) or 0.0,
            batches=_number(line.get("batches")) or 0.0,
            spent=_spent(line.get("spent")),
            memory_mb=numbers[2],
            cpu_s=numbers[3],
            core_wait_s=_number(line.get("core_wait_s")),
            metrics={str(name): _number(value) for name, value in metrics.items()},
            shared_mb=_number(line.get("shared_mb")) or 0.0,
            stages=_spent(line.get("stages"), STAGES),
            reading=_reading(line.get("reading")),
        )

    def _sample(self, line: Mapping[str, Any]) -> Sample:
        at_s, memory_mb, cpu_s = self._numbers(line, "time", "memory_mb", "cpu_s")
        gpus = line.get("gpus")
        found = gpus if isinstance(gpus, list) else []
        loads = [_number(one.get("busy")) for one in found if isinstance(one, Mapping)]
        known = [one for one in loads if one is not None]
        return Sample(
            at_s=at_s,
            memory_mb=memory_mb,
            peak_memory_mb=_number(line.get("peak_memory_mb")) or memory_mb,
            cpu_s=cpu_s,
            moved_mb=(_number(line.get("read_mb")) or 0.0) + (_number(line.get("written_mb")) or 0.0),
            gpu=sum(known) / len(known) if known else None,
            gain=_gain(line.get("gain")),
        )

    def _numbers(self, line: Mapping[str, Any], *names: str) -> list[float]:
        found = [_number(line.get(name)) for name in names]
        known = [one for one in found if one is not None]
        if len(known) < len(names):
            raise self._error(line)
        return known

    def _error(self, line: Mapping[str, Any]) -> ConfigurationError:
        return ConfigurationError(f"{self._path}: {dict(line)!s:.80} is none of a report; remove that line")


def _shares(epochs: Sequence[EpochFacts], spent_so_far: Any) -> TimeShares | None:
    """Return where the time of the epochs went; before the first has ended, that since the start."""
    seconds: dict[str, float] = {kind: sum(one.spent.get(kind, 0.0) for one in epochs) for kind in KINDS}
    if not any(seconds.values()):
        seconds = _spent(spent_so_far)
    paces = [
        (one.spent.get("compute", 0.0) + one.spent.get("read", 0.0)) / one.batches
        for one in epochs
        if one.batches
    ]
    if not any(seconds.values()):
        return None
    return TimeShares(seconds=seconds, batch_s=median(paces) if paces else None)


def _spent(found: Any, known: Sequence[str] = KINDS) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    numbers = {str(kind): _number(value) for kind, value in found.items() if kind in known}
    return {kind: value for kind, value in numbers.items() if value is not None and value >= 0}


def _reading(found: Any) -> dict[str, float | str]:
    """Return the facts about reading that a line tells."""
    if not isinstance(found, Mapping):
        return {}
    numbers = {name: _number(found.get(name)) for name in ("piece_bytes", "cached_mb")}
    known: dict[str, float | str] = {name: one for name, one in numbers.items() if one is not None}
    if isinstance(how := found.get("how"), str):
        known["how"] = how[:_LONGEST_HOW]
    return known


def _gain(found: Any) -> GainReport | None:
    """Return how much work the workers have done together, if a line tells it."""
    if not isinstance(found, Mapping):
        return None
    workers, batches, progress = (_number(found.get(name)) for name in ("workers", "batches", "progress"))
    if workers is None or batches is None or progress is None:
        return None
    return GainReport(
        workers=int(workers),
        batches=batches,
        progress=progress,
        worth_having=_number(found.get("worth_having")),
        shortened=_number(found.get("shortened")) or 0.0,
        retreats=int(_number(found.get("retreats")) or 0),
        held_bytes=int(_number(found.get("held_bytes")) or 0),
    )


def _gradients(line: Mapping[str, Any]) -> tuple[int, dict[str, dict[int, int]]] | None:
    """Return how large the values of gradients were; None: the line does not tell."""
    step, layers = _number(line.get("step")), line.get("layers")
    if step is None or not isinstance(layers, Mapping):
        return None
    found: dict[str, dict[int, int]] = {}
    for name, one in layers.items():
        counts = one.get("counts") if isinstance(one, Mapping) else None
        for exponent, count in counts.items() if isinstance(counts, Mapping) else ():
            power, number = _whole(str(exponent).removeprefix("-")), _number(count)
            if power is not None and power < _MOST_POWER and number is not None and number > 0:
                signed = -power if str(exponent).startswith("-") else power
                found.setdefault(str(name), {})[signed] = int(number)
    return int(step), found


def _counts(found: Any) -> dict[int, dict[int, int]]:
    """Return how often each staleness came, by worker."""
    counts: dict[int, dict[int, int]] = {}
    for rank, of_rank in found.items() if isinstance(found, Mapping) else ():
        if _whole(rank) is not None and isinstance(of_rank, Mapping):
            numbers = {_whole(stale): _number(count) for stale, count in of_rank.items()}
            counts[int(rank)] = {
                stale: int(count)
                for stale, count in numbers.items()
                if stale is not None and count is not None
            }
    return counts


def _whole(text: Any) -> int | None:
    """Return the number that a key of JSON names; None: none, or one that nobody has written."""
    text = str(text)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


def _number(value: Any) -> float | None:
    """Return a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None  # False for NaN


def _as_text(at_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    except (ValueError, OverflowError, OSError):  # no year of ours
        return ""


def _config(folder: Path, start: Mapping[str, Any]) -> str:
    """Return the options: the file of `nnlo train`, else what the script has given."""
    path = folder / CONFIG
    if path.exists():
        try:
            return read_whole(path, LARGEST_TOML).decode(errors="replace")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path}: {error}") from None
    config = start.get("config")
    return json.dumps(config, indent=1) if config else ""
