"""Several search ranks choose, each for another trial; pure, as the coordinator is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import optuna
from optuna.distributions import json_to_distribution
from optuna.trial import Trial

from nnlo_common.base._errors import NNLOError
from nnlo_common.search._compat import chosen_together, number_in, storage_of
from nnlo_common.search._messages import Choose, Chosen
from nnlo_common.search.coordinator._choosers import Here, Post
from nnlo_common.search.coordinator._lookahead import Ahead
from nnlo_common.search.journal._record import packed

__all__ = ["Afar"]


class Afar(Here):
    """Lets search ranks choose; on this rank once none is left.

    What is chosen afar is what the sampler chooses together. The rest, parameters that not all trials have
    among them, is chosen on this rank when a block asks.

    Args:
        study: the study.
        blocks: how many blocks there are.
        n_trials: how many trials are to be begun.
        searchers: the teams of the search ranks.
    """

    def __init__(self, study: optuna.Study, blocks: int, n_trials: int, searchers: Sequence[int]) -> None:
        super().__init__(study, blocks, n_trials)
        self._ahead = Ahead(blocks, most=blocks + len(searchers))
        self._idle = deque(searchers)
        self._busy: dict[int, Trial] = {}  # by search rank
        self._again: deque[Trial] = deque()  # those that a search rank has died over
        self._hungry: set[int] = set()  # the blocks that have asked in vain
        self._known = {team: _Known(study) for team in searchers}

    @property
    def pending(self) -> bool:
        """Whether something is chosen, or being chosen, that a block is to begin."""
        return bool(self._ready or self._busy or self._again)

    @property
    def open(self) -> int:
        """How many trials no block has begun."""
        return super().open + len(self._busy) + len(self._again)

    def take(self, block: int, *, first: bool) -> Trial | None:
        """Return the next trial; None if it is being chosen."""
        if not self._ready and self._known:
            self._hungry.add(block)
            return None
        if not self._ready:
            return super().take(block, first=first)
        waited = block in self._hungry
        self._hungry.discard(block)
        if not first:
            self._ahead.taken(0 if waited else len(self._ready))
        return self._ready.popleft()

    def think(self, living: int) -> bool:
        """Choose ahead, if there are no search ranks left to do it."""
        return not self._known and super().think(living)

    def orders(self, idle: int, living: int) -> list[Post]:
        """Give idle search ranks a trial to choose for, if it will be needed."""
        posts = []
        wanted = max(idle, self._ahead.depth if living > 1 else 0)
        while self._idle:
            if not self._again and (not self.left or len(self._ready) + len(self._busy) >= wanted):
                break
            trial = self._again.popleft() if self._again else self._ask()
            team = self._idle.popleft()
            posts.append(Post(team, Choose(trial.number, self._known[team].news(), bool(self._busy))))
            self._busy[team] = trial
        return posts

    def chosen(self, team: int, message: Chosen) -> None:
        """A search rank has chosen.

        Raises:
            NNLOError: its sampler has failed.
        """
        if message.problem:
            raise NNLOError(message.problem)
        self._idle.append(team)
        trial = self._busy.pop(team, None)
        if trial is None:  # it is not to be begun any more
            return
        space = {name: json_to_distribution(text) for name, (_, text) in message.params.items()}
        values = {name: space[name].to_external_repr(value) for name, (value, _) in message.params.items()}
        chosen_together(trial, space, values)
        for key, value in message.system.items():
            storage_of(self._study).set_trial_system_attr(number_in(trial), key, value)
        self._ready.append(trial)

    def lost(self, team: int) -> int:
        """A search rank has died; return how many are left."""
        del self._known[team]
        if team in self._idle:
            self._idle.remove(team)
        if team in self._busy:
            self._again.append(self._busy.pop(team))
        if not self._known:
            self._ready += self._again
            self._again.clear()
        return len(self._known)

    def withdraw(self) -> list[Trial]:
        """Begin no more."""
        withdrawn = [*super().withdraw(), *self._busy.values(), *self._again]
        self._busy.clear()
        self._again.clear()
        return withdrawn


class _Known:
    """What a search rank has been told of the study.

    Args:
        study: the study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._count = study, 0
        self._unfinished: set[int] = set()

    def news(self) -> tuple[dict[str, object], ...]:
        """Return the trials that are new to it, or may have changed, in order."""
        trials = self._study.get_trials(deepcopy=False)
        fresh = sorted(self._unfinished | set(range(self._count, len(trials))))
        self._count = len(trials)
        self._unfinished = {number for number in fresh if not trials[number].state.is_finished()}
        # What a trial has reported says nothing to samplers before its end.
        return tuple(
            packed(trials[number]) | ({"steps": []} if number in self._unfinished else {}) for number in fresh
        )
