"""Choice of the next trial's parameters: on the coordinator or on search ranks, at once or ahead; pure.

    LocalChooser      on the coordinator's rank, when a block asks, or ahead while all blocks train
    LockstepChooser   likewise, but trial k as soon as the study has the result of trial k - blocks
    RemoteChooser     on search ranks, several trials at the same time; see `_remote_choice.py`

A chooser begins trials in the study and holds them until a block takes them; `_coordinator.py` decides
which block and when.
"""

from __future__ import annotations

import copy
from collections import deque

import optuna
from optuna.trial import FrozenTrial, Trial

from nnlo_common.search._compat import number_in, storage_of
from nnlo_common.search.coordinator._look_ahead import LookAhead
from nnlo_common.search.coordinator._storage_view import ask_at_this_moment
from nnlo_common.search.coordinator._trial_source import TrialChooser
from nnlo_common.search.samplers._grid import Grid

__all__ = ["LocalChooser", "LockstepChooser"]


class LocalChooser(TrialChooser):
    """Chooses parameters on this rank.

    Attributes:
        to_begin: trials still to begin in the study.

    Args:
        study: the study.
        blocks: the number of blocks.
        n_trials: how many trials to begin.
    """

    def __init__(self, study: optuna.Study, blocks: int, n_trials: int) -> None:
        self.to_begin = n_trials
        self._study, self._blocks = study, blocks
        self._ready: deque[Trial] = deque()  # for the next idle blocks
        self._ahead = LookAhead(blocks)

    @property
    def open(self) -> bool:
        return self.left() > 0

    @property
    def pending(self) -> bool:
        return bool(self._ready)

    def left(self) -> int:
        """Return the number of trials that no block has begun."""
        return self.to_begin + len(self._ready)

    def take(self, block: int, *, first: bool) -> Trial | None:  # noqa: ARG002
        """Return the next trial for a block; None if none is chosen yet.

        Args:
            block: the block.
            first: whether no block has a trial yet.
        """
        if not first:
            self._ahead.taken(len(self._ready))
        if self._ready:
            return self._ready.popleft()
        return None if self._spent else self._ask()

    def think(self, living: int) -> bool:
        """Choose a trial ahead while all blocks train; return whether there was one to choose.

        With one block nothing is chosen ahead: the choice would lack the result of the running trial.
        """
        if living == 1 or len(self._ready) >= self._ahead.depth or not self.to_begin or self._spent:
            return False
        self._ready.append(self._ask())
        _ = self._ready[-1].relative_params  # else Optuna chooses only at the first suggest_... call
        return True

    def told(self, number: int) -> None:
        """Note that the study knows a trial's result."""

    def withdraw(self) -> list[Trial]:
        """Begin no more trials; return those begun in the study that no block has."""
        withdrawn = [*self._ready]
        self._ready.clear()
        self.to_begin = 0
        return withdrawn

    @property
    def _spent(self) -> bool:
        """Whether the grid has nothing to choose, now or ever."""
        return isinstance(self._study.sampler, Grid) and self._study.sampler.spent(self._study)

    def _ask(self) -> Trial:
        self.to_begin -= 1
        return self._study.ask()


class LockstepChooser(LocalChooser):
    """Chooses so that a search repeats: trial k once the study knows trials 0 to k - blocks, in this order.

    The block that trains it and its pace do not matter, nor do trials that begin or report meanwhile: each
    trial sees the study as it was when the trial began.

    Args:
        study: the study.
        blocks: the number of blocks.
        n_trials: how many trials to begin.
        seed: seeds the random numbers, which restart with each trial.
    """

    def __init__(self, study: optuna.Study, blocks: int, n_trials: int, seed: int) -> None:
        super().__init__(study, blocks, n_trials)
        self._seed = seed
        self._begun: dict[int, FrozenTrial] = {}  # unfinished trials as others see them, in order
        self._fill()

    def take(self, block: int, *, first: bool) -> Trial | None:  # noqa: ARG002
        """Return the next trial; None if another block's trial must end first."""
        return self._ready.popleft() if self._ready else None

    def think(self, living: int) -> bool:  # noqa: ARG002
        """Choose nothing ahead; `told` chooses."""
        return False

    def told(self, number: int) -> None:
        """Choose the trials due now that the study knows one more result."""
        del self._begun[number]
        self._fill()

    def _fill(self) -> None:
        while self.to_begin and len(self._begun) < self._blocks:
            trial = self._ask()
            # Copy it: Optuna's trial writes its suggestions into the object from the storage.
            self._begun[trial.number] = copy.deepcopy(storage_of(self._study).get_trial(number_in(trial)))
            self._ready.append(trial)

    def withdraw(self) -> list[Trial]:
        withdrawn = super().withdraw()
        for trial in withdrawn:
            del self._begun[trial.number]
        return withdrawn

    def _ask(self) -> Trial:
        self.to_begin -= 1
        return ask_at_this_moment(self._study, self._seed, self._begun)
