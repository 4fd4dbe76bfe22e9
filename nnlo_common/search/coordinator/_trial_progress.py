"""Progress of a running trial: parameters, reports, verdicts, notes, and the ends of folds."""

from __future__ import annotations

import math

import optuna
from optuna.distributions import json_to_distribution
from optuna.pruners import WilcoxonPruner
from optuna.trial import Trial

from nnlo_common.base._errors import ProtocolError
from nnlo_common.search._compat import suggested
from nnlo_common.search._messages import Answer, Done, Message, Note, Report, Suggest, Verdict
from nnlo_common.search.coordinator._choosers import Post
from nnlo_common.search.coordinator._running_trial import UnderWay
from nnlo_common.search.journal._record import Record

__all__ = ["Progress", "checked"]


class Progress:
    """What happens within the trials of a study.

    Args:
        study: the study.
        folds: in how many folds each trial is trained.
        record: where to write down what is chosen.
    """

    def __init__(self, study: optuna.Study, folds: int, record: Record) -> None:
        self._study, self._folds, self._record = study, folds, record
        self._by_fold = folds > 1 and isinstance(study.pruner, WilcoxonPruner)

    def handle(self, team: int, under: UnderWay, message: Message) -> list[Post]:
        """Take in what the leader of a team says of its trial, and return what to answer.

        Raises:
            ProtocolError: it is nothing that is said of a trial.
        """
        if isinstance(message, Suggest):
            return [Post(team, self._suggest(under.trial, message), leader_only=True)]
        if isinstance(message, Verdict):
            under.asking.add(team)
            return self.judged(under)
        if isinstance(message, Report):
            if not self._by_fold:
                under.report(under.running[team], message.step, message.value)
                self._tell_means(under)
        elif isinstance(message, Note):
            _note(under.trial, message)
        else:
            raise ProtocolError(f"team {team} sent {message!r}, which is not for the coordinator")
        return []

    def judged(self, under: UnderWay) -> list[Post]:
        """Answer the teams of a trial once all have asked, so that all obey the same verdict."""
        if under.halted or not under.all_ask:
            return []
        # Some pruners return NumPy's bool.
        prune = not self._by_fold and under.judged and bool(under.trial.should_prune())
        asking, under.asking = sorted(under.asking), set()
        answers = [(team, under.runs[team]) for team in asking]
        return [Post(team, Answer(run, prune), leader_only=True) for team, run in answers]

    def fold_done(self, under: UnderWay, fold: int, message: Done) -> None:
        """Let the pruner know of a fold's end."""
        if self._folds == 1 or under.ending is not None:
            return
        if not self._by_fold:
            self._tell_means(under)
        elif len(self._study.directions) == 1:
            under.trial.report(message.values[0], fold)
            if not under.over and under.trial.should_prune():
                under.ending = Done(message.run, "pruned")

    def _suggest(self, trial: Trial, message: Suggest) -> Answer:
        distribution = json_to_distribution(message.distribution)
        try:
            value = suggested(trial, message.name, distribution)
        except ValueError as error:
            if message.name not in trial.distributions:
                raise
            return Answer(message.run, 0.0, f"suggest {message.name!r} differs between the folds: {error}")
        internal = float(distribution.to_internal_repr(value))
        self._record.suggested(trial.number, message.name, internal, message.distribution)
        return Answer(message.run, internal)

    def _tell_means(self, under: UnderWay) -> None:
        for step, value in under.means():
            under.trial.report(value, step)


def _note(trial: Trial, message: Note) -> None:
    if message.constraint:
        trial.set_constraint(message.key, message.value)
    else:
        trial.set_user_attr(message.key, message.value)


def checked(message: Done) -> Done:
    """Return a message as it is, or the failure that NaN is."""
    if message.state != "complete" or not any(map(math.isnan, message.values)):
        return message
    said = f"the objective returned {message.values}, which holds NaN"
    return Done(message.run, "failed", error=said, failure="NaN")
