"""Running trial of a block: its waiting, running and ended folds, and their reports.

one team         trains fold after fold; the pruner sees only the first fold, so that trials are comparable
team per fold    trains all folds side by side; the pruner gets the mean of a step once all have reported it
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
        began_s: when it began.
        block: the block that trains it.
        seconds: how long it took, once it ended.
        waiting: folds that have not begun.
        running: folds that train, by team.
        runs: their run numbers, by team.
        values: the values of complete folds.
        asking: teams that wait for the pruner's verdict.
        ending: how the trial ends, once one fold has decided it for all.
        halted: why its running folds were interrupted; empty if they were not.

    Args:
        folds: the number of folds.
        teams: how many folds train side by side.
    """

    def __init__(self, trial: Any, *, folds: int, teams: int, began_s: float, block: int) -> None:
        self.trial, self.began_s, self.block = trial, began_s, block
        self.waiting, self.running, self.runs = deque(range(folds)), dict[int, int](), dict[int, int]()
        self.values: dict[int, tuple[float, ...]] = {}
        self.asking: set[int] = set()
        self.ending: Done | None = None
        self.halted = ""
        self.seconds = 0.0
        self._folds, self._reporting = folds, range(folds) if teams == folds else range(1)
        self._reports: dict[int, dict[int, float]] = {fold: {} for fold in self._reporting}
        self._reported_steps: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether no fold trains or waits."""
        return not self.running and not self.waiting

    @property
    def judged(self) -> bool:
        """Whether the pruner judges the running folds."""
        return any(fold in self._reporting for fold in self.running.values())

    @property
    def all_ask(self) -> bool:
        """Whether every running fold waits for a verdict."""
        return bool(self.running) and self.asking >= self.running.keys()

    @property
    def result(self) -> Done:
        """The trial's result, once it is over."""
        if self.ending is not None:
            return self.ending
        if len(self.values) < self._folds:
            return Done.halted(0, self.halted)
        return Done(0, "complete", mean(self.outcomes))

    @property
    def outcomes(self) -> list[tuple[float, ...] | None]:
        """The values of each fold; None: it did not complete."""
        return [self.values.get(fold) for fold in range(self._folds)]

    def report(self, fold: int, step: int, value: float) -> None:
        """Record an intermediate value."""
        if fold in self._reports:
            self._reports[fold].setdefault(step, value)

    def means(self) -> list[tuple[int, float]]:
        """Return the means of the steps that all folds have reported since the last call.

        A complete fold counts with its last report.
        """
        found = []
        steps = {step for reports in self._reports.values() for step in reports}
        for step in sorted(steps - self._reported_steps):
            values = [self._at(fold, step) for fold in self._reporting]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                self._reported_steps.add(step)
                found.append((step, math.fsum(known) / len(known) if len(known) > 1 else known[0]))
        return found

    def _at(self, fold: int, step: int) -> float | None:
        reports = self._reports[fold]
        if step not in reports and fold in self.values and reports:
            step = max(reports)
        return reports.get(step)
