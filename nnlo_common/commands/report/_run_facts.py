"""Facts of a run, as a report uses them; `_run_reader` reads them from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nnlo_common.algorithms import GainReport
from nnlo_common.training._rank_parts import serves, speaks

__all__ = ["EpochFacts", "RankFacts", "RunFacts", "Sample", "TimeShares"]

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
        noise_scale: the gradient noise scale at the end, in samples; None: the same.
        gradients: the step that was last looked at, and how many values each layer's gradient had up to each
            power of two; None: it was not asked for.
    """

    rank: int
    role: str
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
    gradients: tuple[int, Mapping[str, Mapping[int, int]]] | None = None

    @property
    def trains(self) -> bool:
        """Whether it computes gradients."""
        return not serves(self.role)

    @property
    def peak_memory_mb(self) -> float | None:
        """The most resident memory that it had at any time; None: unknown."""
        return max((one.peak_memory_mb for one in self.samples_of_usage), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run.

    Attributes:
        folder: of its files.
        history: the centre's metrics, a number for each epoch; None: not a finite number.
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
        return next((one for one in reversed(self.ranks) if speaks(one.role)), None)

    @property
    def workers_count(self) -> int:
        """How many ranks train."""
        return sum(one.trains for one in self.ranks)

    @property
    def samples_per_second(self) -> float | None:
        """The pace of all workers together, over the epochs; None before the first has ended."""
        epochs = self.center.epochs if self.center is not None else ()
        seconds = sum(one.seconds for one in epochs)
        if not seconds or self.center is None:
            return None
        if self.center.role == "lead":  # it tells of its own samples only
            return sum(one.samples for rank in self.ranks for one in rank.epochs) / seconds
        return sum(one.samples for one in epochs) / seconds
