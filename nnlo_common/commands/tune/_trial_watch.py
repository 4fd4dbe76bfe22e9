"""Watch over the trials of a running search: report each, and remove the models of worse ones."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

from nnlo_common.commands.tune._search_facts import FinishedTrial, SearchFacts, finished
from nnlo_common.commands.tune._search_folder import TRIAL, drop_models
from nnlo_common.commands.tune._trial_table import Board, TrialRow
from nnlo_common.training.report._terminal import is_live

__all__ = ["TrialWatch"]

_EVERY_S = 0.5


class TrialWatch:
    """A thread beside a search, on the rank with the study; it only reads the study.

    Args:
        study: of the search.
        facts: of the search.
    """

    def __init__(self, study: Any, facts: SearchFacts) -> None:
        self._study, self._facts = study, facts
        asked = facts.request.search.table
        self._live = is_live() if asked is None else asked
        self._reported: set[int] = set()
        self._best: FinishedTrial | None = None
        self._shown = 0  # table lines on the screen
        self._first: int | None = None  # how many trials were there before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nnlo tune", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.look(over=True)

    def look(self, *, over: bool = False) -> None:
        """Print new finished trials, and show the running ones."""
        trials = finished(self._study)
        board = Board(self._facts, trials, time.time())
        lines = []
        for one in trials:
            if one.number not in self._reported:
                self._reported.add(one.number)
                self._clear(one)
                lines.append(board.line(one, self._best))
        rows = board.rows(self._running()) if self._live and not over else []
        self._write(lines, rows)

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.look()

    def _running(self) -> list[TrialRow]:
        trials = self._study.get_trials(deepcopy=False)
        return [TrialRow.of(trial) for trial in trials if trial.state.name == "RUNNING"]

    def _clear(self, one: FinishedTrial) -> None:
        """Keep the model of the best trial only."""
        worse: FinishedTrial | None = one
        if one.value is not None and (self._best is None or self._better(one.value, self._best.value)):
            worse, self._best = self._best, one
        if worse is not None and not self._facts.request.search.keep_models:
            drop_models(self._facts.folder / TRIAL / worse.folder)

    def _better(self, value: float, than: float | None) -> bool:
        assert than is not None  # the best has a value
        return value > than if self._facts.figure.maximize else value < than

    def _write(self, lines: list[str], rows: list[str]) -> None:
        """Print lines that stay, and below them rows that the next call replaces."""
        if not lines and not rows and not self._shown:
            return
        up = f"\x1b[{self._shown}F\x1b[J" if self._shown else ""
        sys.stdout.write(up + "".join(f"{line}\n" for line in [*lines, *rows]))
        sys.stdout.flush()
        self._shown = len(rows)
