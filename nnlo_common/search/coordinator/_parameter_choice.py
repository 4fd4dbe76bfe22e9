"""Choice of the next trial's parameters: where, and when; pure, as the coordinator is.

    LocalChooser      on the coordinator's rank, when a block asks, or ahead while all blocks train
    LockstepChooser   the same, trial k as soon as trial k - blocks is told, whatever the blocks' pace
    RemoteChooser     on search ranks, several trials at the same time; see `_remote_choice.py`

A chooser begins trials in the study, and keeps those that no block has begun yet. Which block gets them, and
when, `_coordinator.py` says.
"""

from __future__ import annotations

import copy
from collections import deque

import optuna
from optuna.trial import FrozenTrial, Trial

from nnlo_common.base._errors import ProtocolError
from nnlo_common.search._compat import number_in, storage_of
from nnlo_common.search.coordinator._look_ahead import LookAhead
from nnlo_common.search.coordinator._storage_view import ask_at_this_moment
from nnlo_common.search.messages._search_messages import Chosen
from nnlo_common.search.messages._team_events import TeamMessage
from nnlo_common.search.samplers._grid import Grid

__all__ = ["LocalChooser", "LockstepChooser"]


class LocalChooser:
    """Chooses on this rank.

    Attributes:
        left: how many trials are still to be begun in the study.

    Args:
        study: the study.
        blocks: how many blocks there are.
        n_trials: how many trials are to be begun.
    """

    def __init__(self, study: optuna.Study, blocks: int, n_trials: int) -> None:
        self.left = n_trials
        self._study, self._blocks = study, blocks
        self._ready: deque[Trial] = deque()  # for whoever ends next
        self._ahead = LookAhead(blocks)

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

    def told(self, number: int) -> None:
        """The study has been told of a trial's end."""

    def orders(self, idle: int, living: int) -> list[TeamMessage]:  # noqa: ARG002
        """Return what search ranks are to do.

        Args:
            idle: how many blocks wait for a trial.
            living: how many blocks there are.
        """
        return []

    def chosen(self, team: int, message: Chosen) -> None:
        """A search rank has chosen."""
        raise ProtocolError(f"team {team} sent {message!r}, but there are no search ranks")

    def lost(self, team: int) -> int:
        """A search rank has died; return how many are left."""
        raise ProtocolError(f"team {team} has died, but there are no search ranks")

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


class LockstepChooser(LocalChooser):
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
        self._fill()

    def take(self, block: int, *, first: bool) -> Trial | None:  # noqa: ARG002
        """Return the next trial; None if one must end before that is not the block's."""
        return self._ready.popleft() if self._ready else None

    def think(self, living: int) -> bool:  # noqa: ARG002
        """Choose nothing: it is too early."""
        return False

    def told(self, number: int) -> None:
        """Choose what is due now that the study has been told of a trial's end."""
        del self._begun[number]
        self._fill()

    def _fill(self) -> None:
        while self.left and len(self._begun) < self._blocks:
            trial = self._ask()
            # A copy, because Optuna's trial writes what it suggests into what it has got from the storage.
            self._begun[trial.number] = copy.deepcopy(storage_of(self._study).get_trial(number_in(trial)))
            self._ready.append(trial)

    def withdraw(self) -> list[Trial]:
        withdrawn = super().withdraw()
        for trial in withdrawn:
            del self._begun[trial.number]
        return withdrawn

    def _ask(self) -> Trial:
        self.left -= 1
        return ask_at_this_moment(self._study, self._seed, self._begun)
