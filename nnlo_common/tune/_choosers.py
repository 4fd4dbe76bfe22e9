"""Who chooses what the next trial tries, and when; pure, as the coordinator is.

    Here      the coordinator's rank, when a block asks, or ahead while all blocks train
    InOrder   the same, trial k as soon as trial k - blocks has been told, whatever the blocks' pace
    Afar      search ranks, several trials at the same time

A chooser begins trials in the study, and keeps those that no block has begun yet.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import json_to_distribution
from optuna.trial import FrozenTrial, Trial

from nnlo_common._errors import NNLOError
from nnlo_common.tune._ahead import Ahead
from nnlo_common.tune._messages import Choose, Chosen, Done, Message
from nnlo_common.tune._moments import ask_at_this_moment
from nnlo_common.tune._record import packed
from nnlo_common.tune._under_way import UnderWay

__all__ = ["Afar", "Here", "InOrder", "Post"]


@dataclass(frozen=True, slots=True)
class Post:
    """Action: a message to a team.

    Attributes:
        team: its index; those of the search ranks come after those of the blocks.
        message: what it says.
        leader_only: whether it is for the leader alone; else each rank of the team gets it.
    """

    team: int
    message: Message
    leader_only: bool = False


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
        return self._ready.popleft() if self._ready else self._ask()

    def think(self, living: int) -> bool:
        """Choose a trial ahead, while all blocks train; say whether there was one to choose.

        With one block it would be chosen without the result of the only trial before it.
        """
        if living == 1 or len(self._ready) >= self._ahead.depth or not self.left:
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
            self._begun[trial.number] = copy.deepcopy(self._study._storage.get_trial(trial._trial_id))
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
            self._busy[team] = trial
            posts.append(Post(team, Choose(trial.number, self._known[team].news())))
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
        trial.relative_search_space = space
        trial._relative_params = {
            name: space[name].to_external_repr(value) for name, (value, _) in message.params.items()
        }
        for key, value in message.system.items():
            self._study._storage.set_trial_system_attr(trial._trial_id, key, value)
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
