"""Table of a running search: finished and running trials, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnlo_common.commands.train._settings import OPTIONS
from nnlo_common.commands.tune._search_facts import HELPERS, FinishedTrial, SearchFacts, best_of
from nnlo_common.commands.tune._search_folder import BEGAN, BLOCK

__all__ = ["Board", "TrialRow", "lasting", "short"]

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A running trial.

    Attributes:
        number: its number.
        block: the number of its block; None: it has not begun.
        began_s: the start, in seconds since 1970.
        params: its parameters.
        epoch: the number of finished epochs.
        value: the last value; None before the first.
        helpers: the blocks that help.
    """

    number: int
    block: int | None
    began_s: float
    params: dict[str, Any]
    epoch: int
    value: float | None
    helpers: tuple[int, ...] = ()

    @classmethod
    def of(cls, trial: Any) -> TrialRow:
        """Return the state of a running trial of a study."""
        steps, user = trial.intermediate_values, trial.user_attrs
        last = max(steps, default=-1)
        began = user.get(BEGAN, 0.0)
        helpers = tuple(block for block, _ in user.get(HELPERS, ()))
        return cls(
            trial.number, user.get(BLOCK), began, dict(trial.params), last + 1, steps.get(last), helpers
        )


class Board:
    """Lines on the terminal about a search at one moment.

    Args:
        facts: of the search.
        trials: the finished ones.
        now_s: the time, in seconds since 1970.
    """

    def __init__(self, facts: SearchFacts, trials: Sequence[FinishedTrial], now_s: float) -> None:
        self._facts, self._trials, self._now_s = facts, trials, now_s
        self._asked = facts.request.search.num_iterations

    def line(self, one: FinishedTrial, best: FinishedTrial | None) -> str:
        """Return the line of a finished trial.

        Args:
            one: the trial.
            best: the best one so far.
        """
        came_to = one.fate if one.value is None else f"{self._facts.figure.name} {one.value:.4f}"
        star = " (best)" if best is not None and one.number == best.number else ""
        problem = f": {one.problem}" if one.fate == "failed" else ""
        seconds = lasting(one.ended_s - one.began_s)
        parts = [f"trial {one.number}", f"{came_to}{star}{problem}", f"{seconds}", _params(one.params)]
        return _cut(f"nnlo tune: {'  '.join(parts)}", 3 * _WIDTH)

    def rows(self, running: Sequence[TrialRow]) -> list[str]:
        """Return a line for each block, and one for the whole search."""
        by_block = {block: one for one in running for block in (*one.helpers, one.block) if block is not None}
        count = max(len(self._facts.layout.blocks), 1)
        rows = [self._row(block, by_block.get(block)) for block in range(count)]
        return [_cut(row, _WIDTH) for row in [*rows, self._whole()]]

    def left_s(self) -> float | None:
        """Estimate the remaining time from complete trials; None before the first."""
        lasted = [one.ended_s - one.began_s for one in self._trials if one.state == "complete"]
        if not lasted:
            return None
        blocks = max(len(self._facts.layout.blocks), 1)
        return max(self._asked - len(self._trials), 0) * sum(lasted) / len(lasted) / blocks

    def _row(self, block: int, one: TrialRow | None) -> str:
        if one is None:
            return f"  block {block:<3} idle"
        if one.block != block:
            return f"  block {block:<3} helps with trial {one.number}"
        epochs = self._facts.request.given.get("epochs")
        total = f"/{epochs.read(OPTIONS['epochs'])}" if epochs is not None else ""
        value = "" if one.value is None else f"  {self._facts.figure.name} {one.value:.4f}"
        lasts = lasting(self._now_s - one.began_s)
        epoch = f"epoch {one.epoch}{total}"
        return f"  block {block:<3} trial {one.number:<4} {lasts:>8}  {epoch}{value}  {_params(one.params)}"

    def _whole(self) -> str:
        best = best_of(self._facts.figure, self._trials)
        told = "" if best is None else f"  best {self._facts.figure.name} {best.value:.4f}"
        left = self.left_s()
        rest = "" if left is None else f"  about {lasting(left)} left"
        return f"  {len(self._trials)} of {self._asked} trials{told}{rest}"


def lasting(seconds: float) -> str:
    """Return a duration for people.

    Example:
        >>> lasting(3.14), lasting(75), lasting(7300)
        ('3.1 s', '1:15 min', '2:01 h')
    """
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"


def short(value: Any) -> str:
    """Return a value as a short text.

    Example:
        >>> short(0.000123456), short(64), short(True)
        ('0.0001235', '64', 'True')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _params(params: dict[str, Any]) -> str:
    return "  ".join(f"{name} {short(value)}" for name, value in params.items())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
