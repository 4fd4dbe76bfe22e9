"""Course of a training: how far it is, how fast it goes, and when it will end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nnlo_common.algorithms import GainReport
from nnlo_common.training._rank_parts import TrainingReport

__all__ = ["Course", "Moment", "duration", "in_order", "progress_line", "spaced"]

_VALIDATION = "val_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a training is at one moment.

    Attributes:
        epoch: the current epoch, from 1.
        epochs: how many there will be; None: unknown.
        share: how much of the epoch is done, from 0 to 1; None: unknown.
        samples: how many were taken since the start of this process.
        rate: how many were taken in a second since the epoch began.
        unit: what is counted.
        staleness: the mean staleness of the contributions since then; None: there was none.
        gain: the work that the workers have done together since then; None: it is not measured.
        left_s: the estimated seconds to the end; None: unknown.
    """

    epoch: int
    epochs: int | None = None
    share: float | None = None
    samples: int = 0
    rate: float = 0.0
    unit: str = "samples"
    staleness: float | None = None
    gain: GainReport | None = None
    left_s: float | None = None


class Course:
    """The course of a training on one rank, from its reports.

    Args:
        epochs: how many epochs there will be; None: unknown.
        samples: how many samples an epoch has, on all workers; None: as many as
            those before had in the mean.
        initial_epoch: how many epochs were done before, in a resumed training.
        times: how many ranks take as many samples as this one reports.
        unit: what the reports count.
        clock: returns the time.

    Example:
        >>> seconds = iter([0.0, 10.0])
        >>> course = Course(epochs=2, samples=400, clock=lambda: next(seconds))
        >>> moment = course.now(TrainingReport(samples=100))
        >>> moment.epoch, moment.share, moment.rate, moment.left_s
        (1, 0.25, 10.0, 70.0)
    """

    def __init__(
        self,
        *,
        epochs: int | None = None,
        samples: int | None = None,
        initial_epoch: int = 0,
        times: int = 1,
        unit: str = "samples",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._epochs, self._samples, self._initial = epochs, samples or None, initial_epoch
        self._told = samples is not None
        self._times, self._unit, self._clock = times, unit, clock
        self._began_s = self._epoch_s = clock()
        self._done = 0
        self._first = self._before = TrainingReport()

    def begin_at(self, report: TrainingReport, epoch: int) -> None:
        """Begin with this epoch, after what an earlier start has done."""
        self._initial, self._done = epoch, 0
        self._first = self._before = report
        self._began_s = self._epoch_s = self._clock()

    @property
    def seconds(self) -> float:
        """The time since the start of this process' part."""
        return self._clock() - self._began_s

    def now(self, report: TrainingReport) -> Moment:
        """Return where the training is."""
        return self._moment(report, ended=False)

    def end_epoch(self, report: TrainingReport) -> Moment:
        """Return the finished epoch as a whole, and begin the next."""
        moment = self._moment(report, ended=True)
        self._done, self._before, self._epoch_s = self._done + 1, report, self._clock()
        if not self._told:  # the mean, since a worker that is ahead has taken some of the next epoch
            made = (report.samples - self._first.samples) * self._times
            self._samples = math.ceil(made / self._done) or None
        return moment

    def _moment(self, report: TrainingReport, *, ended: bool) -> Moment:
        now_s, before = self._clock(), self._before
        taken = (report.samples - before.samples) * self._times
        done_here: float = taken
        if report.progress is not None:  # which ends an epoch then
            done_here = report.progress - (before.progress or 0.0)
        share = 1.0 if ended else None if self._samples is None else min(done_here / self._samples, 1.0)
        over = self._epochs is not None and self._initial + self._done >= self._epochs
        exchanges = report.exchanges - before.exchanges
        stale = report.mean_staleness * report.exchanges - before.mean_staleness * before.exchanges
        left_s = None
        if self._epochs is not None and share is not None and (done := self._done + share):
            left_s = (now_s - self._began_s) / done * max(self._epochs - self._initial - done, 0.0)
        return Moment(
            epoch=self._initial + self._done + (not over),
            epochs=self._epochs,
            share=1.0 if over else share,
            samples=report.samples * self._times,
            rate=taken / max(now_s - self._epoch_s, 1e-9),
            unit=self._unit,
            staleness=stale / exchanges if exchanges > 0 else None,
            gain=None if report.gain is None else report.gain.since(before.gain),
            left_s=left_s,
        )


def progress_line(moment: Moment, scores: Mapping[str, float] | None = None) -> str:
    """Return a line about a training: always the same columns in the same order.

    Args:
        moment: where it is.
        scores: the loss and other metrics; those of the validation, val_..., come after all others.

    Example:
        >>> moment = Moment(epoch=2, epochs=10, share=0.37, rate=12345, staleness=1.2, left_s=65)
        >>> progress_line(moment, {"val_loss": 0.5, "loss": 0.25})
        'epoch   2/10   37 %     12 345 samples/s  loss 0.2500 | val_loss 0.5000  staleness 1.20  1:05 left'
    """
    of = "" if moment.epochs is None else f"/{moment.epochs}"
    parts = [f"epoch {moment.epoch:>3}{of}"]
    if moment.share is not None:
        parts.append(f"{100 * moment.share:>3.0f} %")
    parts.append(f"{spaced(moment.rate):>9} {moment.unit}/s")
    scores = scores or {}
    sides = [
        "  ".join(f"{name} {scores[name]:.4f}" for name in in_order(scores) if _validates(name) is side)
        for side in (False, True)
    ]
    if any(sides):
        parts.append(" | ".join(filter(None, sides)))
    if moment.staleness is not None:
        parts.append(f"staleness {moment.staleness:.2f}")
    if moment.gain is not None:
        parts.append(f"gain {moment.gain.gain:.1f} of {moment.gain.workers}")
    if moment.left_s is not None and moment.left_s > 0:
        parts.append(f"{duration(moment.left_s)} left")
    return "  ".join(parts)


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of scores in the order in which they are shown: the loss first, the validation last.

    Example:
        >>> in_order(["val_loss", "accuracy", "loss"])
        ['loss', 'accuracy', 'val_loss']
    """
    return sorted(names, key=lambda name: (_validates(name), name.removeprefix(_VALIDATION) != "loss"))


def _validates(name: str) -> bool:
    return name.startswith(_VALIDATION)


def duration(seconds: float) -> str:
    """Return seconds as minutes and seconds, or with hours.

    Example:
        >>> duration(65.4), duration(3 * 3600 + 5)
        ('1:05', '3:00:05')
    """
    minutes, rest = divmod(round(min(max(seconds, 0.0), 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def spaced(number: float) -> str:
    """Return a rounded number with spaces between thousands.

    Example:
        >>> spaced(16000)
        '16 000'
    """
    return f"{number:,.0f}".replace(",", " ")
