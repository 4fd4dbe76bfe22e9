"""Requests of running trials: parameters, reports, verdicts, notes, and ends of folds."""

from __future__ import annotations

import optuna
from optuna.distributions import json_to_distribution
from optuna.pruners import WilcoxonPruner
from optuna.trial import Trial

from nnlo_common.base._errors import ProtocolError
from nnlo_common.search._compat import suggested
from nnlo_common.search.coordinator._running_trial import RunningTrial
from nnlo_common.search.journal._journal import SearchRecord
from nnlo_common.search.messages._search_messages import (
    Done,
    Note,
    ParameterRequest,
    PruneRequest,
    RequestAnswer,
    SearchMessage,
    TrialReport,
)
from nnlo_common.search.messages._team_events import TeamMessage

__all__ = ["TrialRequests"]


class TrialRequests:
    """Handles the requests of a study's running trials.

    Args:
        study: the study.
        folds: folds per trial.
        record: records the chosen parameters.
    """

    def __init__(self, study: optuna.Study, folds: int, record: SearchRecord) -> None:
        self._study, self._folds, self._record = study, folds, record
        self._by_fold = folds > 1 and isinstance(study.pruner, WilcoxonPruner)

    def handle(self, team: int, running: RunningTrial, message: SearchMessage) -> list[TeamMessage]:
        """Handle a message from a team's leader about its trial; return the replies.

        Raises:
            ProtocolError: the message is not about a trial.
        """
        if isinstance(message, ParameterRequest):
            return [TeamMessage(team, self._suggest(running.trial, message), leader_only=True)]
        if isinstance(message, PruneRequest):
            running.asking.add(team)
            return self.judged(running)
        if isinstance(message, TrialReport):
            if not self._by_fold:
                running.report(running.running[team], message.step, message.value)
                self._tell_means(running)
        elif isinstance(message, Note):
            _note(running.trial, message)
        else:
            raise ProtocolError(f"team {team} sent {message!r}, which is not for the coordinator")
        return []

    def judged(self, running: RunningTrial) -> list[TeamMessage]:
        """Send a trial's teams the pruner's verdict once all have asked, so that all get the same one."""
        if running.halted or not running.all_ask:
            return []
        # Some pruners return NumPy's bool.
        prune = not self._by_fold and running.judged and bool(running.trial.should_prune())
        asking, running.asking = sorted(running.asking), set()
        answers = [(team, running.runs[team]) for team in asking]
        return [TeamMessage(team, RequestAnswer(run, prune), leader_only=True) for team, run in answers]

    def fold_done(self, running: RunningTrial, fold: int, message: Done) -> None:
        """Report the end of a fold to the pruner."""
        if self._folds == 1 or running.ending is not None:
            return
        if not self._by_fold:
            self._tell_means(running)
        elif len(self._study.directions) == 1:
            running.trial.report(message.values[0], fold)
            if not running.over and running.trial.should_prune():
                running.ending = Done(message.run, "pruned")

    def _suggest(self, trial: Trial, message: ParameterRequest) -> RequestAnswer:
        distribution = json_to_distribution(message.distribution)
        try:
            value = suggested(trial, message.name, distribution)
        except ValueError as error:
            if message.name not in trial.distributions:
                raise
            return RequestAnswer(message.run, 0.0, f"suggest {message.name!r} differs between folds: {error}")
        internal = float(distribution.to_internal_repr(value))
        self._record.suggested(trial.number, message.name, internal, message.distribution)
        return RequestAnswer(message.run, internal)

    def _tell_means(self, running: RunningTrial) -> None:
        for step, value in running.means():
            running.trial.report(value, step)


def _note(trial: Trial, message: Note) -> None:
    if message.constraint:
        trial.set_constraint(message.key, message.value)
    else:
        trial.set_user_attr(message.key, message.value)
