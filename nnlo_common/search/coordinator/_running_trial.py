"""A trial that a block trains: which of its folds wait, train and have ended, and what they have reported.

one team      fold after fold; what the first fold reports counts for the pruner, as trials are compared alike
as many       all folds side by side; the pruner is told the mean of a step once all have reported it
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from nnlo_common.search.coordinator._trial_results import mean
from nnlo_common.search.messages._search_messages import Done

__all__ = ["RunningTrial"]


class RunningTrial:
    """One trial on one block.

    Attributes:
        trial: the trial, as its source has it.
        began_s: when.
        block: the block that it was given to.
        seconds: how long it has taken, once it has ended.
        waiting: the folds that have not begun.
        running: the folds that train, by team.
        runs: the numbers of their runs, by team.
        values: what the folds have returned that have ended well.
        asking: the teams that wait for a verdict.
        ending: how the trial ends, once that does not hang on its folds any more.
        halted: why those that train have been told to break off; empty where they have not.

    Args:
        folds: how many there are.
        teams: how many of them train side by side.
    """

    def __init__(self, trial: Any, *, folds: int, teams: int, began_s: float, block: int) -> None:
        self.trial, self.began_s, self.block = trial, began_s, block
        self.waiting, self.running, self.runs = deque(range(folds)), dict[int, int](), dict[int, int]()
        self.values: dict[int, tuple[float, ...]] = {}
        self.asking: set[int] = set()
        self.ending: Done | None = None
        self.halted = ""
        self.seconds = 0.0
        self._folds, self._heard = folds, range(folds) if teams == folds else range(1)
        self._reports: dict[int, dict[int, float]] = {fold: {} for fold in self._heard}
        self._told: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether nothing of it trains or waits."""
        return not self.running and not self.waiting

    @property
    def judged(self) -> bool:
        """Whether a verdict of the pruner is for the folds that train."""
        return any(fold in self._heard for fold in self.running.values())

    @property
    def all_ask(self) -> bool:
        """Whether all that train wait for a verdict."""
        return bool(self.running) and self.asking >= self.running.keys()

    @property
    def result(self) -> Done:
        """How the trial has ended, when it is over."""
        if self.ending is not None:
            return self.ending
        if len(self.values) < self._folds:
            return Done(0, "halted", error=f"broken off: {self.halted}")
        return Done(0, "complete", mean(self.outcomes))

    @property
    def outcomes(self) -> list[tuple[float, ...] | None]:
        """What each fold has returned; None: nothing."""
        return [self.values.get(fold) for fold in range(self._folds)]

    def report(self, fold: int, step: int, value: float) -> None:
        """Take in an intermediate value."""
        if fold in self._reports:
            self._reports[fold].setdefault(step, value)

    def means(self) -> list[tuple[int, float]]:
        """Return the steps, with their means, that have become complete since the last call.

        A fold that has ended counts with the last that it has reported.
        """
        found = []
        steps = {step for reports in self._reports.values() for step in reports}
        for step in sorted(steps - self._told):
            values = [self._at(fold, step) for fold in self._heard]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                self._told.add(step)
                found.append((step, math.fsum(known) / len(known) if len(known) > 1 else known[0]))
        return found

    def _at(self, fold: int, step: int) -> float | None:
        reports = self._reports[fold]
        if step not in reports and fold in self.values and reports:
            step = max(reports)
        return reports.get(step)
