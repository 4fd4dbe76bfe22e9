"""Progress display: what a training shows while it runs, on a terminal, in a batch job, and to `nnlo top`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.cluster._hosts import describe_here
from nnlo_common.training._rank_parts import TrainingReport, speaks
from nnlo_common.training.report._course import Course, Moment, progress_line
from nnlo_common.training.report._live_ranks import LiveFile, read_live
from nnlo_common.training.report._live_table import Screen, live_table, rich_module
from nnlo_common.training.report._trackers import Trackers

__all__ = ["PLAIN_S", "ProgressDisplay"]

#: Seconds between two lines where the output is no terminal; with a batch between them, at most 10.
PLAIN_S = 9.0
_NOTED_S, _TABLE_S, _TRACK_S = 0.5, 1.0, 10.0
_MOST_RANKS = 12  # in the table beside a training

Scores: TypeAlias = Mapping[str, float]


class ProgressDisplay:
    """Shows one rank's training; the framework packages call it between batches.

    The rank whose model is the centre shows lines, or on a terminal a live line, and a table of all ranks if
    there is a folder and rich is installed. With a folder every rank writes its live file there.

    Args:
        rank: this rank's number.
        role: "alone", "server 0", "worker 0", ...
        course: how far the training is.
        run: the folder of the run; None: no live files.
        live: whether lines may change.
        log_to: trackers to hand the numbers to, see `TRACKERS`; needs `run`.
        every_s: seconds between two updates of a live line.
        clock: returns the time.
    """

    def __init__(
        self,
        rank: int,
        role: str,
        course: Course,
        *,
        run: str | Path | None = None,
        live: bool = False,
        log_to: str | Sequence[str] = (),
        every_s: float = 0.5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._course, self._speaks, self._clock, self._role = course, speaks(role), clock, role
        self._run = None if run is None else Path(run)
        self._screen, self._live = Screen(live=live), live
        self._file = None if run is None else LiveFile(run, rank, role, str(describe_here()["host"]))
        self._trackers = self._made_trackers([log_to] if isinstance(log_to, str) else log_to)
        self._track_s = clock() + _TRACK_S
        self._table = self._made_table() if self._speaks and live and run is not None else None
        shown_s = _TABLE_S if self._table is not None else every_s if live else PLAIN_S
        self._shown_s = shown_s
        self._every_s = min(shown_s, _NOTED_S if self._file is not None else shown_s)
        self._next_s = clock() + self._every_s
        self._show_s = clock() + shown_s
        self._scores: Scores = {}
        if self._file is not None:
            self._file.end_with(self)
            self._file.start()

    def begin_at(self, report: TrainingReport, epoch: int) -> None:
        """Begin with this epoch, after what an earlier start has done."""
        self._course.begin_at(report, epoch)
        if self._file is not None:
            self._file.begin_at(report.samples)

    def take_over(self, role: str) -> None:
        """Show the training from now on in the place of a dead rank, whose role this is."""
        self._speaks, self._role = speaks(role), role
        if self._file is not None:
            self._file.take_over(role)

    @property
    def every_s(self) -> float:
        """How often to call `look`, at least."""
        return self._every_s

    def look(self, report: Callable[[], TrainingReport], scores: Callable[[], Scores] = dict) -> None:
        """Show where the training is, if it is time to; costs next to nothing otherwise.

        Args:
            report: returns this rank's counts.
            scores: returns the loss and other metrics of late.
        """
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        known = report()
        moment, self._scores = self._course.now(known), {**self._scores, **scores()}
        if self._file is not None:
            self._file.note(moment, known, self._scores)
        if self._trackers is not None and now_s >= self._track_s:
            self._track(moment, {})
        if self._speaks and now_s >= self._show_s:
            self._show_s = now_s + self._shown_s
            if self._table is not None and self._run is not None:
                self._table.update(live_table(read_live(self._run), _MOST_RANKS), refresh=True)
            else:
                line = progress_line(moment, self._present())
                self._screen.show(line) if self._live else self._screen.settle(line)

    def end_epoch(self, report: TrainingReport, scores: Scores) -> None:
        """Write the line of a finished epoch, with its scores."""
        moment = self._course.end_epoch(report)
        if self._file is not None:
            self._file.note(self._course.now(report), report, {**self._scores, **scores})
        self._scores = dict(scores)
        self._track(moment, scores)
        if self._speaks:
            self._screen.settle(progress_line(moment, scores))
            self._show_s = self._clock() + self._shown_s

    def say(self, text: str) -> None:
        """Write a text that stays."""
        self._screen.settle(text)

    def end(self) -> None:
        """Leave the terminal as it was, and write that this rank has ended."""
        if self._table is not None:
            self._table.stop()
            self._table = None
        if self._file is not None:
            self._file.end()
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None

    @property
    def seconds(self) -> float:
        """The time since the display was made."""
        return self._course.seconds

    def _present(self) -> Scores:
        """Return the scores of now: of all workers, if they write live files, else this rank's."""
        found = {} if self._run is None else read_live(self._run).scores
        loss = found.get("loss")
        return self._scores if loss is None else {**self._scores, "loss": loss}

    def _track(self, moment: Moment, scores: Scores) -> None:
        """Hand the numbers of all ranks to the trackers."""
        if self._trackers is None or self._run is None:
            return
        self._track_s = self._clock() + _TRACK_S
        run, series = read_live(self._run), dict[str, dict[str, float | None]]()
        for one in run.ranks:
            if not speaks(one.role):
                pace = {} if one.serves else {"samples_per_second": one.rate}
                series[one.role] = {**pace, **({"loss": one.scores["loss"]} if "loss" in one.scores else {})}
        own: dict[str, float | None] = {**scores, "epoch": moment.epoch, "samples_per_second": moment.rate}
        if moment.staleness is not None:
            own["staleness"] = moment.staleness
        self._trackers.log(moment.samples, {self._role: own, **series})

    def _made_trackers(self, names: Sequence[str]) -> Trackers | None:
        if names and self._run is None:
            raise ConfigurationError(f"log_to={list(names)}: also give run=FOLDER, where the ranks write")
        if not names or self._run is None or not self._speaks:
            return None
        return Trackers(names, self._run)

    def _made_table(self) -> Any:
        """Return rich's live display; None if it is not installed."""
        try:
            rich = rich_module("a table of a run")
        except MissingExtraError:
            return None
        table = rich.live.Live(
            console=rich.console.Console(highlight=False), auto_refresh=False, transient=True
        )
        table.start()
        table.console.show_cursor()  # a rank that is killed would leave it hidden
        return table
