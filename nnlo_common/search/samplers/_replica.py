"""A search rank: a copy of the study, kept up to date by letters, in which parameters are chosen.

coordinator ─► search rank     Choose: for this trial, knowing what is new of others;  End
search rank ─► coordinator     Chosen: what the sampler chooses together;  Left
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, cast

import optuna
from optuna.distributions import distribution_to_json
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, QMCSampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from nnlo_common.base._errors import PeerLostError
from nnlo_common.cluster.transport._mail import Mail
from nnlo_common.protocol import Lost
from nnlo_common.search._compat import forget_trials, loop_begins, number_in
from nnlo_common.search._mailbox import DIED
from nnlo_common.search._messages import Choose, Chosen, End, Told, from_text, to_text
from nnlo_common.search.coordinator._endings import bring_up
from nnlo_common.search.coordinator._study_snapshots import Seen
from nnlo_common.search.journal._record import unpacked
from nnlo_common.search.samplers._bayesian import BayesianSampler
from nnlo_common.search.samplers._grid import Grid
from nnlo_common.search.samplers._names import IN_SEQUENCE
from nnlo_common.search.samplers._seeding import Seeded

__all__ = ["Replica", "choose_for_others", "in_sequence"]

# `docs/optimisation.md` has what it is good for.
_LEFT_OUT = 0.25


def in_sequence(asked: str | BaseSampler) -> bool:
    """Whether a sampler goes on from what was chosen last, so that it cannot choose in several copies."""
    return asked in IN_SEQUENCE or isinstance(asked, QMCSampler | CmaEsSampler | Grid)


class Replica:
    """A copy of a study, in which the same sampler chooses.

    Args:
        study: what it is a copy of, as this rank's script has made it.
        sampler: chooses.
        seed: of its random numbers, which begin anew with each trial.
    """

    def __init__(self, study: optuna.Study, sampler: BaseSampler, seed: int) -> None:
        seeded, storage = Seeded(sampler, seed), InMemoryStorage()
        if not seeded.found:  # or all search ranks might choose the same
            sampler.reseed_rng()
        number = storage.create_new_study(study.directions, study.study_name)
        for key, value in study.user_attrs.items():
            storage.set_study_user_attr(number, key, value)
        self._storage, self._would_repeat = storage, isinstance(sampler, GPSampler | BayesianSampler)
        self._study = optuna.Study(study.study_name, storage, seeded, study.pruner)
        # Some samplers say that they are at their end; the coordinator's does so, too.
        loop_begins(self._study)

    def learn(self, news: Iterable[Mapping[str, Any]]) -> None:
        """Take in trials that are new, or have changed; those that are new come in the order of numbers."""
        for content in news:
            self._learn(unpacked(content))

    def choose(self, number: int, *, beside: bool = False) -> Chosen:
        """Choose for a trial that is known of.

        Args:
            number: of the trial.
            beside: whether others choose at the same time.
        """
        study = self._study
        if beside and self._would_repeat:
            study = optuna.Study(
                study.study_name,
                cast(BaseStorage, Seen(study, lambda trials: _thinned(trials, number))),
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
            {
                name: (float(space[name].to_internal_repr(value)), distribution_to_json(space[name]))
                for name, value in params.items()
            },
            {key: value for key, value in after.items() if key not in before or before[key] != value},
        )

    def _at(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _learn(self, trial: FrozenTrial) -> None:
        known = self._study.get_trials(deepcopy=False)
        if trial.number == len(known):
            self._study.add_trial(trial)
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
    """Leave some of the ended trials out.

    A Gaussian process finds the same best point whatever its random numbers are, so several that know the
    same would choose the same.
    """
    chance = random.Random(number)
    kept = {trial.number for trial in trials if chance.random() >= _LEFT_OUT}
    return (trial for trial in trials if trial.number in kept or not trial.state.is_finished())


def choose_for_others(mail: Mail, coordinator: int, replica: Replica, where: str) -> End:
    """Choose what the coordinator asks for, until it ends the search.

    Args:
        mail: this rank's letter box.
        coordinator: the rank that hands out trials.
        replica: where to choose.
        where: which rank this is, for messages.

    Raises:
        PeerLostError: the coordinator has died.
    """
    while True:
        letter = mail.receive(None)
        if isinstance(letter, Lost):
            if letter.rank == coordinator:
                raise PeerLostError(coordinator, DIED)
            continue
        if letter is None:
            continue
        message = from_text(letter[1])
        if isinstance(message, End):
            return message
        if isinstance(message, Told):
            lost = PeerLostError(coordinator, DIED)
            lost.said = True
            raise lost
        assert isinstance(message, Choose)
        mail.send(coordinator, to_text(_chosen(message, replica, where)))


def _chosen(message: Choose, replica: Replica, where: str) -> Chosen:
    try:
        replica.learn(message.news)
        return replica.choose(message.run, beside=message.beside)
    except Exception as error:  # the coordinator ends the search with it, as with one of its own sampler
        text = "".join(traceback.format_exception(error))
        return Chosen(message.run, {}, {}, f"the sampler has failed on {where}:\n{text}")
