"""Watch over the trials of a running search: report each, and remove the models of worse ones."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnlo_common.commands.tune._search_facts import FinishedTrial, SearchFacts, best_of, finished
from nnlo_common.commands.tune._search_folder import drop_models
from nnlo_common.commands.tune._trial_table import Board, TrialRow
from nnlo_common.training.report._terminal import is_live

__all__ = ["watching"]

_EVERY_S = 0.5


@contextmanager
def watching(study: Any, facts: SearchFacts) -> Iterator[None]:
    """Watch the search of the body in a thread, on the rank with the study.

    Args:
        study: of the search.
        facts: of the search.
    """
    watch, over = _TrialWatch(study, facts), threading.Event()

    def look() -> None:
        while not over.wait(_EVERY_S):
            watch.look()

    thread = threading.Thread(target=look, name="nnlo tune", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        watch.look(over=True)


class _TrialWatch:
    """Lines on the terminal about the trials of a study; it only reads the study."""

    def __init__(self, study: Any, facts: SearchFacts) -> None:
        self._study, self._facts = study, facts
        asked = facts.request.search.table
        self._live = is_live() if asked is None else asked
        self._reported: set[int] = set()
        self._best: FinishedTrial | None = None
        self._shown = 0  # table lines on the screen

    def look(self, *, over: bool = False) -> None:
        """Print new finished trials, and show the running ones."""
        trials = finished(self._study)
        board = Board(self._facts, trials, time.time())
        lines, rows = [], []
        for one in trials:
            if one.number not in self._reported:
                self._reported.add(one.number)
                self._clear(one)
                lines.append(board.line(one, self._best))
        if self._live and not over:
            known = self._study.get_trials(deepcopy=False)
            rows = board.rows([TrialRow.of(trial) for trial in known if trial.state.name == "RUNNING"])
        self._write(lines, rows)

    def _clear(self, one: FinishedTrial) -> None:
        """Keep the model of the best trial only."""
        before = self._best
        self._best = best_of(self._facts.figure, [one] if before is None else [before, one])
        worse = before if self._best is one else one
        if worse is not None and not self._facts.request.search.keep_models:
            drop_models(self._facts.folder, worse.folder)

    def _write(self, lines: list[str], rows: list[str]) -> None:
        """Print lines that stay, and below them rows that the next call replaces."""
        if not lines and not rows and not self._shown:
            return
        up = f"\x1b[{self._shown}F\x1b[J" if self._shown else ""
        sys.stdout.write(up + "".join(f"{line}\n" for line in [*lines, *rows]))
        sys.stdout.flush()
        self._shown = len(rows)
