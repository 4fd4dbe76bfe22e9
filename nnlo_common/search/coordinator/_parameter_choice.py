"""Choice of the next trial's parameters: on the coordinator or on search ranks, at once or ahead; pure.

    LocalChooser      on the coordinator's rank, when a block asks, or ahead while all blocks train
    LockstepChooser   likewise, but trial k as soon as the study has the result of trial k - blocks
    RemoteChooser     on search ranks, several trials at the same time

A chooser begins trials in the study and holds them until a block takes them; `_coordinator.py` decides
which block and when.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from nnlo_common.base._errors import NNLOError, ProtocolError
from nnlo_common.base._limited_formats import content_of, message_of
from nnlo_common.search._channels import Death, TeamMessage
from nnlo_common.search._compat import (
    chosen_together,
    has_no_name,
    loop_begins,
    number_in,
    storage_of,
    study_number,
)
from nnlo_common.search._journal import packed, unpacked_parameters
from nnlo_common.search._search_messages import Choose, Chosen, Done, SearchMessage, Start
from nnlo_common.search.coordinator._trial_results import mean
from nnlo_common.search.samplers._grid import Grid
from nnlo_common.search.samplers._seeding import Seeded

__all__ = [
    "LocalChooser",
    "LockstepChooser",
    "LookAhead",
    "RemoteChooser",
    "RunningTrial",
    "StorageView",
    "TrialChooser",
    "TrialSource",
    "ask_at_this_moment",
]

# -- view of the study as it was when a trial began, for as long as the trial lasts ---------------------


def ask_at_this_moment(study: optuna.Study, seed: int, under_way: Mapping[int, FrozenTrial]) -> Trial:
    """Begin the next trial and choose its joint parameters; it sees the study as it is now.

    Args:
        study: the study.
        seed: seeds its random numbers.
        under_way: unfinished trials, as other trials see them.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    number = waiting[0].number if waiting else len(study.get_trials(deepcopy=False))
    then = dict(under_way)

    def as_it_was(trials: list[FrozenTrial]) -> list[FrozenTrial]:
        return [then.get(trial.number, trial) for trial in trials[: number + 1]]

    moment = optuna.Study(
        study.study_name,
        cast(BaseStorage, StorageView(study, as_it_was)),
        Seeded(study.sampler, seed),
        # Copy it: some pruners learn from the first trials they judge, and timing decides which these are.
        copy.deepcopy(study.pruner),
    )
    if has_no_name(study):  # Hyperband seeds its brackets with the name
        moment.study_name = ""
    loop_begins(moment)
    trial = moment.ask()
    _ = trial.relative_params  # else Optuna chooses only at the first suggest_... call
    return trial


class StorageView:
    """A storage that shows only some trials, or earlier states of them.

    Args:
        study: the study to read from and write to.
        picked: selects the trials to show.
    """

    def __init__(
        self, study: optuna.Study, picked: Callable[[list[FrozenTrial]], Iterable[FrozenTrial]]
    ) -> None:
        self._storage, self._study_id, self._picked = storage_of(study), study_number(study), picked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def get_study_id_from_name(self, name: str) -> int:  # noqa: ARG002
        """Return this study's number; Hyperband's brackets ask under other names."""
        return self._study_id

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the visible trials."""
        trials = self._picked(self._storage.get_all_trials(study_id, deepcopy=False))
        found = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the best of the visible trials."""
        trials = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        if not trials:
            raise ValueError("No trials are completed yet.")
        best = max if self._storage.get_study_directions(study_id)[0] is StudyDirection.MAXIMIZE else min
        return best(trials, key=lambda trial: trial.value or 0.0)


# -- look-ahead: choose just enough trials in advance to keep every block busy -------------------------
# A trial chosen early is chosen with fewer results. If trials end one by one, a few are enough; if all
# blocks end together, each may need one.

_BLOCKS_PER_AHEAD = 8


class LookAhead:
    """Adapts how many trials to choose ahead.

    It starts with few: Optuna's samplers draw at random until they have ten results, so each trial chosen
    early is one more that is drawn at random. Over every `blocks` trials it counts how often none was ready
    (choose that many more), and how many were spare at least (choose that many fewer).

    Attributes:
        depth: how many trials to choose ahead.

    Args:
        blocks: the number of blocks.
        most: the largest depth; None: the number of blocks.

    Example:
        >>> ahead = LookAhead(16)
        >>> for ready in [3, 2, 1] + 13 * [0]:  # all blocks end at once
        ...     ahead.taken(ready)
        >>> ahead.depth
        16
        >>> for ready in 16 * [16]:  # one by one
        ...     ahead.taken(ready)
        >>> ahead.depth
        3
    """

    def __init__(self, blocks: int, most: int | None = None) -> None:
        self._most = blocks if most is None else most
        self._blocks, self._fewest = blocks, 1 + blocks // _BLOCKS_PER_AHEAD
        self.depth = self._fewest
        self._count, self._missed, self._spare = 0, 0, blocks

    def taken(self, ready: int) -> None:
        """Count a trial taken by a block while `ready` trials were ready."""
        self._count += 1
        self._missed += not ready
        self._spare = min(self._spare, max(0, ready - 1))
        if self._count == self._blocks:
            depth = self.depth + self._missed - self._spare
            self.depth = max(self._fewest, min(self._most, depth))
            self._count, self._missed, self._spare = 0, 0, self._blocks


# -- running trial of a block: its waiting, running and ended folds, and their reports -----------------
# one team trains fold after fold; the pruner sees only the first fold, so that trials are comparable team
# per fold trains all folds side by side; the pruner gets the mean of a step once all have reported it


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

    def state(self) -> dict[str, Any]:
        """Return it as plain values, without what the teams tell again: reports, requests."""
        told = ((fold, reports) for fold, reports in self._reports.items() if fold in self.values)
        return {
            "trial": self.trial.number,
            "began_s": self.began_s,
            "block": self.block,
            "waiting": [*self.waiting],
            "running": [[team, fold, self.runs[team]] for team, fold in self.running.items()],
            "values": [[fold, [*values]] for fold, values in self.values.items()],
            "ending": None if self.ending is None else content_of(self.ending),
            "halted": self.halted,
            "reports": [[fold, [*reports.items()]] for fold, reports in told]
            if len(self._reports) > 1
            else [],
            "reported": sorted(self._reported_steps),
        }

    @classmethod
    def again(cls, trial: Any, state: Mapping[str, Any], *, folds: int, teams: int) -> RunningTrial:
        """Return the running trial that has this state."""
        one = cls(trial, folds=folds, teams=teams, began_s=state["began_s"], block=state["block"])
        one.waiting = deque(state["waiting"])
        for team, fold, run in state["running"]:
            one.running[team], one.runs[team] = fold, run
        one.values = {fold: tuple(values) for fold, values in state["values"]}
        if state["ending"] is not None:
            one.ending = message_of([Done], state["ending"], "a copy of a trial")
        one.halted = state["halted"]
        for fold, reports in state["reports"]:
            one._reports[fold] = dict(reports)
        one._reported_steps = set(state["reported"])
        return one

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


# -- source of trials: gives the coordinator the next trial and receives each result -------------------
# Its chooser decides when there is one, and handles the search ranks.


class TrialChooser(ABC):
    """Chooses the trials of a source; by default nothing ahead, and without search ranks."""

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether there may be another trial to begin."""

    @property
    def pending(self) -> bool:
        """Whether a trial is chosen, or being chosen, and waits for a block."""
        return False

    @abstractmethod
    def left(self) -> float:
        """Return how many trials are left to begin; infinite: an unknown number."""

    def think(self, living: int) -> bool:  # noqa: ARG002
        """Choose a trial ahead while all blocks train; return whether there was one to choose."""
        return False

    def orders(self, idle: int, living: int) -> list[TeamMessage]:  # noqa: ARG002
        """Return orders for search ranks, given the idle and the living blocks."""
        return []

    def chosen(self, team: int, message: Chosen) -> None:
        """Handle a search rank's choice."""
        raise ProtocolError(f"team {team} sent {message!r}, but there are no search ranks")

    def lose_search_rank(self, team: int) -> int:
        """Handle the death of a search rank; return how many are left."""
        raise ProtocolError(f"team {team} has died, but there are no search ranks")


class TrialSource(ABC):
    """Source of trials: an Optuna study, or an oracle of keras-tuner. Optional methods do nothing here.

    Attributes:
        chooser: chooses the trials.
        stop_reason: why the search must end now; empty while it continues.
    """

    chooser: TrialChooser
    stop_reason = ""

    @abstractmethod
    def take(self, block: int, *, first: bool, living: int) -> Any:
        """Return the next trial for a block, an object with a `number`; None if there is none now.

        `first`: no block has a trial yet; `living`: blocks still alive.
        """

    @abstractmethod
    def start(self, running: RunningTrial, run: int, fold: int) -> Start:
        """Return the message that makes a team train a fold of a trial as this run."""

    @abstractmethod
    def handle(self, team: int, running: RunningTrial, message: SearchMessage) -> list[TeamMessage]:
        """Handle a message from a team's leader about its trial; return the replies."""

    def judged(self, running: RunningTrial) -> list[TeamMessage]:  # noqa: ARG002
        """Send a trial's teams the pruner's verdict once all have asked."""
        return []

    def fold_done(self, running: RunningTrial, fold: int, message: Done) -> None:  # noqa: B027
        """Handle a complete fold of a trial."""

    def add_helpers(self, running: RunningTrial, blocks: Iterable[int], now_s: float) -> None:  # noqa: B027
        """Record that blocks help to train a trial from now on."""

    @abstractmethod
    def tell(self, running: RunningTrial, *, interrupted: bool, stopped: bool) -> None:
        """Handle the end of a trial.

        `stopped`: running trials are halted; `interrupted`: they are, and the next start trains them again.
        """

    @abstractmethod
    def withdraw(self, reason: str) -> None:
        """Begin no more trials."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what another rank needs to go on with these trials, besides the trials themselves."""

    @abstractmethod
    def changes(self) -> tuple[dict[str, Any], list[str]]:
        """Return the trials that have changed since the last call, by name, and new lines of the journal."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a state; this rank has the trials already."""

    @abstractmethod
    def trial(self, number: int) -> Any:
        """Return a trial that runs, as `take` has returned it on a rank that has died."""

    @abstractmethod
    def finish(self, lost: Sequence[Death]) -> tuple[dict[str, Any], ...]:
        """End the search, without the ranks that died; return the results for all ranks."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Warn the user."""


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

    @property
    def ahead(self) -> list[Trial]:
        """The trials begun in the study that no block has."""
        return [*self._ready]

    def restore(self, to_begin: int, ahead: Sequence[Trial]) -> None:
        """Go on from another rank's choices.

        Args:
            to_begin: trials still to begin in the study.
            ahead: trials begun in the study that no block has; their parameters are chosen anew.
        """
        self.to_begin = to_begin
        self._ready = deque(ahead)

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


# -- choice of parameters on search ranks, each for another trial at the same time; pure ---------------


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

    @property
    def ahead(self) -> list[Trial]:
        return [*super().ahead, *self._busy.values(), *self._orphaned]

    def restore(self, to_begin: int, ahead: Sequence[Trial]) -> None:
        super().restore(to_begin, [])
        self._orphaned.extend(ahead)

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
