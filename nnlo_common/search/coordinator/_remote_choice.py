"""Choice of parameters on search ranks, each for another trial at the same time; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import optuna
from optuna.trial import Trial

from nnlo_common.base._errors import NNLOError
from nnlo_common.search._compat import chosen_together, number_in, storage_of
from nnlo_common.search.coordinator._look_ahead import LookAhead
from nnlo_common.search.coordinator._parameter_choice import LocalChooser
from nnlo_common.search.journal._journal import packed, unpacked_parameters
from nnlo_common.search.messages._channels import TeamMessage
from nnlo_common.search.messages._search_messages import Choose, Chosen

__all__ = ["RemoteChooser"]


class RemoteChooser(LocalChooser):
    """Lets search ranks choose; chooses on this rank once none is left.

    Search ranks choose the parameters that the sampler chooses together. The rest (parameters that not all
    trials have) are chosen on this rank when a block asks.

    Args:
        study: the study.
        blocks: the number of blocks.
        n_trials: how many trials to begin.
        searchers: the teams of the search ranks.
    """

    def __init__(self, study: optuna.Study, blocks: int, n_trials: int, searchers: Sequence[int]) -> None:
        super().__init__(study, blocks, n_trials)
        self._ahead = LookAhead(blocks, most=blocks + len(searchers))
        self._idle = deque(searchers)
        self._busy: dict[int, Trial] = {}  # by search rank
        self._orphaned: deque[Trial] = deque()  # trials whose search rank died
        self._unserved: set[int] = set()  # blocks that asked while none was ready
        self._known = {team: _KnownTrials(study) for team in searchers}

    @property
    def pending(self) -> bool:
        return bool(self._ready or self._busy or self._orphaned)

    def left(self) -> int:
        return super().left() + len(self._busy) + len(self._orphaned)

    def take(self, block: int, *, first: bool) -> Trial | None:
        """Return the next trial; None while it is being chosen."""
        if not self._ready and self._known:
            self._unserved.add(block)
            return None
        if not self._ready:
            return super().take(block, first=first)
        waited = block in self._unserved
        self._unserved.discard(block)
        if not first:
            self._ahead.taken(0 if waited else len(self._ready))
        return self._ready.popleft()

    def think(self, living: int) -> bool:
        """Choose ahead if no search ranks are left."""
        return not self._known and super().think(living)

    def orders(self, idle: int, living: int) -> list[TeamMessage]:
        messages = []
        wanted = max(idle, self._ahead.depth if living > 1 else 0)
        while self._idle:
            if not self._orphaned and (not self.to_begin or len(self._ready) + len(self._busy) >= wanted):
                break
            trial = self._orphaned.popleft() if self._orphaned else self._ask()
            team = self._idle.popleft()
            choose = Choose(trial.number, self._known[team].news(), bool(self._busy))
            messages.append(TeamMessage(team, choose))
            self._busy[team] = trial
        return messages

    def chosen(self, team: int, message: Chosen) -> None:
        if message.problem:
            raise NNLOError(message.problem)
        self._idle.append(team)
        trial = self._busy.pop(team, None)
        if trial is None:  # it was withdrawn
            return
        values, space = unpacked_parameters(message.params)
        chosen_together(trial, space, values)
        for key, value in message.system.items():
            storage_of(self._study).set_trial_system_attr(number_in(trial), key, value)
        self._ready.append(trial)

    def lose_search_rank(self, team: int) -> int:
        del self._known[team]
        if team in self._idle:
            self._idle.remove(team)
        if team in self._busy:
            self._orphaned.append(self._busy.pop(team))
        if not self._known:
            self._ready += self._orphaned
            self._orphaned.clear()
        return len(self._known)

    def withdraw(self) -> list[Trial]:
        withdrawn = [*super().withdraw(), *self._busy.values(), *self._orphaned]
        self._busy.clear()
        self._orphaned.clear()
        return withdrawn


class _KnownTrials:
    """Record of the trials that a search rank knows.

    Args:
        study: the study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._count = study, 0
        self._unfinished: set[int] = set()

    def news(self) -> tuple[dict[str, object], ...]:
        """Return the trials that are new to the search rank or may have changed, in order."""
        trials = self._study.get_trials(deepcopy=False)
        fresh = sorted(self._unfinished | set(range(self._count, len(trials))))
        self._count = len(trials)
        self._unfinished = {number for number in fresh if not trials[number].state.is_finished()}
        # Samplers ignore reports of unfinished trials.
        return tuple(
            packed(trials[number]) | ({"steps": []} if number in self._unfinished else {}) for number in fresh
        )
