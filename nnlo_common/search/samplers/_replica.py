"""Search rank: keeps a copy of the study up to date by messages, and chooses parameters in it.

coordinator ─► search rank     Choose: a trial to choose for, and changes of the others;  End
search rank ─► coordinator     Chosen: the parameters that the sampler chooses together;  Left
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, cast

import optuna
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, QMCSampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from nnlo_common.search._channels import RankChannel
from nnlo_common.search._compat import forget_trials, loop_begins, number_in
from nnlo_common.search._journal import bring_up, packed_parameters, unpacked
from nnlo_common.search._search_messages import Choose, Chosen, End
from nnlo_common.search.coordinator._parameter_choice import StorageView
from nnlo_common.search.samplers._bayesian import BayesianSampler
from nnlo_common.search.samplers._grid import Grid
from nnlo_common.search.samplers._names import IN_SEQUENCE
from nnlo_common.search.samplers._seeding import Seeded

__all__ = ["Replica", "choose_for_others", "in_sequence"]

# 48 trials of Branin, 8 chosen at a time, are off by 0.017 with it (median of 10 seeds), by 0.67 if all
# choose from the same results, and by 0.0009 if one rank chooses all 8 in turn.
_LEFT_OUT = 0.25


def in_sequence(asked: str | BaseSampler) -> bool:
    """Whether a sampler continues from its last choice, so that several copies would choose the same."""
    return asked in IN_SEQUENCE or isinstance(asked, QMCSampler | CmaEsSampler | Grid)


class Replica:
    """A copy of a study with a copy of its sampler.

    Args:
        study: the study as this rank's script made it.
        sampler: the sampler.
        seed: seeds its random numbers, which restart with each trial.
    """

    def __init__(self, study: optuna.Study, sampler: BaseSampler, seed: int) -> None:
        seeded, storage = Seeded(sampler, seed), InMemoryStorage()
        if not seeded.found:  # else all search ranks might choose the same
            sampler.reseed_rng()
        number = storage.create_new_study(study.directions, study.study_name)
        for key, value in study.user_attrs.items():
            storage.set_study_user_attr(number, key, value)
        self._storage, self._would_repeat = storage, isinstance(sampler, GPSampler | BayesianSampler)
        self._study = optuna.Study(study.study_name, storage, seeded, study.pruner)
        # Exhausted samplers call `Study.stop`; the coordinator's sampler does too and ends the search.
        loop_begins(self._study)

    def learn(self, news: Iterable[Mapping[str, Any]]) -> None:
        """Add new trials, which come in order of number, and update changed ones."""
        for content in news:
            self._learn(unpacked(content))

    def choose(self, number: int, *, beside: bool = False) -> Chosen:
        """Choose parameters for a known trial.

        Args:
            number: the trial's number.
            beside: whether other ranks choose at the same time.
        """
        study = self._study
        if beside and self._would_repeat:
            study = optuna.Study(
                study.study_name,
                cast(BaseStorage, StorageView(study, lambda trials: _thinned(trials, number))),
                study.sampler,
                study.pruner,
            )
        forget_trials(study)
        before = self._at(number).system_attrs
        trial = Trial(study, number_in(self._at(number)))
        params, space = trial.relative_params, trial.relative_search_space or {}
        after = self._at(number).system_attrs
        return Chosen(
            number,
            packed_parameters(params, space),
            {key: value for key, value in after.items() if key not in before or before[key] != value},
        )

    def _at(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _learn(self, trial: FrozenTrial) -> None:
        known = self._study.get_trials(deepcopy=False)
        if trial.number == len(known):
            self._study.add_trial(trial)
            return
        if known[trial.number].state.is_finished():  # told again, by a coordinator that has taken over
            return
        there = number_in(known[trial.number])
        bring_up(self._storage, there, trial)
        if trial.state.is_finished():
            self._study.sampler.after_trial(
                self._study, self._storage.get_trial(there), trial.state, trial.values
            )
            self._storage.set_trial_state_values(there, trial.state, trial.values)
        elif trial.state is TrialState.RUNNING:
            self._storage.set_trial_state_values(there, TrialState.RUNNING)  # if it waits


def _thinned(trials: Iterable[FrozenTrial], number: int) -> Iterable[FrozenTrial]:
    """Leave out some of the finished trials.

    A Gaussian process finds the same best point with any random numbers, so several with the same trials
    would choose the same.
    """
    chance = random.Random(number)
    kept = {trial.number for trial in trials if chance.random() >= _LEFT_OUT}
    return (trial for trial in trials if trial.number in kept or not trial.state.is_finished())


def choose_for_others(channel: RankChannel, replica: Replica, where: str) -> End:
    """Choose parameters for the coordinator until it ends the search.

    Args:
        channel: this rank's channel to the coordinator.
        replica: the copy of the study to choose in.
        where: names this rank in messages.

    Raises:
        PeerLostError: the coordinator died.
    """
    while isinstance(order := channel.next_order(), Choose):
        before = channel.successions
        chosen = _chosen(order, replica, where)
        while channel.take_in(0):
            pass
        if channel.successions == before:  # the next coordinator asks again
            channel.tell_coordinator(chosen)
    assert isinstance(order, End)
    return order


def _chosen(message: Choose, replica: Replica, where: str) -> Chosen:
    try:
        replica.learn(message.news)
        return replica.choose(message.run, beside=message.beside)
    except Exception as error:  # the coordinator ends the search with it
        text = "".join(traceback.format_exception(error))
        return Chosen(message.run, {}, {}, f"the sampler failed on {where}:\n{text}")
