"""Choosers of the next trial's parameters, and the time when they choose; pure, as the coordinator is.

    Here      the coordinator's rank, when a block asks, or ahead while all blocks train
    InOrder   the same, trial k as soon as trial k - blocks has been told, whatever the blocks' pace
    Afar      search ranks, several trials at the same time; see `_afar.py`

A chooser begins trials in the study, and keeps those that no block has begun yet.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, Trial

from nnlo_common.search._compat import number_in, storage_of
from nnlo_common.search._messages import Done, Message
from nnlo_common.search.coordinator._lookahead import Ahead
from nnlo_common.search.coordinator._running_trial import UnderWay
from nnlo_common.search.coordinator._study_snapshots import ask_at_this_moment
from nnlo_common.search.samplers._grid import Grid

__all__ = ["Here", "InOrder", "Post"]


@dataclass(frozen=True, slots=True)
class Post:
    """Action: a message to a team.

    Attributes:
        team: its index; those of the search ranks come after those of the blocks.
        message: what it says.
        leader_only: whether it is for the leader alone; else each rank of the team gets it.
        made_of: the teams that are one from now on; empty: as it has been.
    """

    team: int
    message: Message
    leader_only: bool = False
    made_of: tuple[int, ...] = ()


class Here:
    """Chooses on this rank.

    Attributes:
        left: how many trials are still to be begun in the study.
        cut: whether nothing counts that ends from now on: for those who tell in order.

    Args:
        study: the study.
        blocks: how many blocks there are.
        n_trials: how many trials are to be begun.
    """

    def __init__(self, study: optuna.Study, blocks: int, n_trials: int) -> None:
        self.left, self.cut = n_trials, False
        self._study, self._blocks = study, blocks
        self._ready: deque[Trial] = deque()  # for whoever ends next
        self._ahead = Ahead(blocks)

    @property
    def open(self) -> int:
        """How many trials no block has begun."""
        return self.left + len(self._ready)

    @property
    def pending(self) -> bool:
        """Whether something is chosen, or being chosen, that a block is to begin."""
        return bool(self._ready)

    def take(self, block: int, *, first: bool) -> Trial | None:  # noqa: ARG002
        """Return the next trial for a block; None if it is not chosen yet.

        Args:
            block: which.
            first: whether no block has a trial yet.
        """
        if not first:
            self._ahead.taken(len(self._ready))
        if self._ready:
            return self._ready.popleft()
        return None if self._spent else self._ask()

    def think(self, living: int) -> bool:
        """Choose a trial ahead, while all blocks train; say whether there was one to choose.

        With one block it would be chosen without the result of the only trial before it.
        """
        if living == 1 or len(self._ready) >= self._ahead.depth or not self.left or self._spent:
            return False
        self._ready.append(self._ask())
        _ = self._ready[-1].relative_params  # or Optuna would choose them when the first is asked for
        return True

    def ended(self, under: UnderWay) -> Iterator[UnderWay]:
        """A trial has ended; give the ended trials that are to be told now, one after another."""
        yield under

    def told(self) -> None:
        """A trial has been told."""

    def orders(self, idle: int, living: int) -> list[Post]:  # noqa: ARG002
        """Return what search ranks are to do.

        Args:
            idle: how many blocks wait for a trial.
            living: how many blocks there are.
        """
        return []

    def withdraw(self) -> list[Trial]:
        """Begin no more; return what was begun in the study without a block."""
        withdrawn = [*self._ready]
        self._ready.clear()
        self.left = 0
        return withdrawn

    @property
    def _spent(self) -> bool:
        """Whether there is nothing to choose until something ends, or any more."""
        return isinstance(self._study.sampler, Grid) and self._study.sampler.spent(self._study)

    def _ask(self) -> Trial:
        self.left -= 1
        return self._study.ask()


class InOrder(Here):
    """Chooses so that a search repeats: trial k when trials 0 to k - blocks are told, in this order.

    Which block trains it and how fast does not matter, nor does what those trials do that begin or run
    meanwhile: each sees the study as it was when it began.

    Args:
        study: the study.
        blocks: how many blocks there are.
        n_trials: how many trials are to be begun.
        seed: of the random numbers, which begin anew with each trial.
    """

    def __init__(self, study: optuna.Study, blocks: int, n_trials: int, seed: int) -> None:
        super().__init__(study, blocks, n_trials)
        self._seed = seed
        self._begun: dict[int, FrozenTrial] = {}  # those not told, as others see them, in order
        self._held: dict[int, UnderWay] = {}  # those that have ended before one before them
        self.told()

    def take(self, block: int, *, first: bool) -> Trial | None:  # noqa: ARG002
        """Return the next trial; None if one must end before that is not the block's."""
        return self._ready.popleft() if self._ready else None

    def think(self, living: int) -> bool:  # noqa: ARG002
        """Choose nothing: it is too early."""
        return False

    def ended(self, under: UnderWay) -> Iterator[UnderWay]:
        """A trial has ended; give those that may be told now."""
        self._held[under.trial.number] = under
        while self._begun and (number := next(iter(self._begun))) in self._held:
            one = self._held.pop(number)
            if self.cut:  # whether it ended in time was chance
                one.ending = Done(0, "halted", error="broken off: an earlier trial was the last")
            self.cut |= one.result.state == "halted"
            del self._begun[number]
            yield one

    def told(self) -> None:
        """Choose what is due now that a trial has been told."""
        while self.left and len(self._begun) < self._blocks:
            trial = self._ask()
            # A copy, because Optuna's trial writes what it suggests into what it has got from the storage.
            self._begun[trial.number] = copy.deepcopy(storage_of(self._study).get_trial(number_in(trial)))
            self._ready.append(trial)

    def withdraw(self) -> list[Trial]:
        """Begin no more."""
        withdrawn = super().withdraw()
        for trial in withdrawn:
            del self._begun[trial.number]
        return withdrawn

    def _ask(self) -> Trial:
        self.left -= 1
        return ask_at_this_moment(self._study, self._seed, self._begun)
