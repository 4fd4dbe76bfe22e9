"""Oracle of keras-tuner that chooses by the samplers of `nnlo_keras.optimize`."""

from __future__ import annotations

import itertools
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras_tuner
import optuna
from keras_tuner.engine import hyperparameters as kinds
from keras_tuner.engine.hyperparameters import HyperParameters
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState, create_trial

from nnlo_common import ProtocolError
from nnlo_common.plugin import (
    Death,
    Note,
    RunningTrial,
    Start,
    TeamMessage,
    TrialChooser,
    TrialSource,
    engine,
    warn,
)
from nnlo_keras.tune._compat import (
    is_duplicate,
    mean_metrics,
    most_collisions,
    random_values,
    refill_grid,
    set_seed,
)

__all__ = [
    "FATAL",
    "NOT_AGAIN",
    "OracleTrials",
    "RESULT",
    "SamplerOracle",
    "averaged",
    "distribution",
    "failure_told",
    "from_sampler",
    "to_sampler",
    "told_failure",
]

# -- conversion of keras-tuner's hyper-parameters to an Optuna sampler's parameters, and back ----------
# For a parameter with steps, or an ordered choice, the sampler sees the index of the step, so neighbours
# stay neighbours. Unordered choices are categories.


def distribution(hp: Any) -> BaseDistribution | None:
    """Return the sampler's distribution for a parameter; None if there is nothing to choose.

    Example:
        >>> distribution(kinds.Int("width", 8, 32, step=8))
        IntDistribution(high=3, log=False, low=0, step=1)
        >>> distribution(kinds.Float("rate", 1e-4, 1e-2, sampling="log"))
        FloatDistribution(high=0.01, log=True, low=0.0001, step=None)
    """
    if isinstance(hp, kinds.Fixed):
        return None
    if isinstance(hp, kinds.Boolean):
        return CategoricalDistribution([False, True])
    if isinstance(hp, kinds.Choice) and not hp.ordered:
        return CategoricalDistribution(list(hp.values))
    if (count := _steps(hp)) is not None:
        return IntDistribution(0, count - 1)
    if hp.sampling == "reverse_log":
        return FloatDistribution(0.0, 1.0)
    kind = IntDistribution if isinstance(hp, kinds.Int) else FloatDistribution
    made: BaseDistribution = kind(hp.min_value, hp.max_value, log=hp.sampling == "log")
    return made


def from_sampler(hp: Any, chosen: Any) -> Any:
    """Convert a sampler's choice to the parameter's value.

    Example:
        >>> from_sampler(kinds.Int("width", 8, 32, step=8), 2)
        24
    """
    if isinstance(hp, kinds.Boolean) or (isinstance(hp, kinds.Choice) and not hp.ordered):
        return chosen
    if _steps(hp) is None:
        return hp.prob_to_value(min(chosen, _BELOW_1)) if hp.sampling == "reverse_log" else chosen
    if _counted(hp):
        value = hp.min_value + chosen * hp.step
        return int(value) if isinstance(hp, kinds.Int) else float(value)
    value = list(hp.values)[chosen]
    return int(value) if isinstance(hp, kinds.Int) else value


def to_sampler(hp: Any, value: Any) -> Any:
    """Convert a parameter's value to the sampler's choice.

    Example:
        >>> to_sampler(kinds.Int("width", 8, 32, step=8), 24)
        2
    """
    if isinstance(hp, kinds.Boolean) or (isinstance(hp, kinds.Choice) and not hp.ordered):
        return value
    if (count := _steps(hp)) is None:
        return hp.value_to_prob(value) if hp.sampling == "reverse_log" else value
    if _counted(hp):
        return min(max(round((value - hp.min_value) / hp.step), 0), count - 1)
    values = list(hp.values)
    return min(range(count), key=lambda index: (values[index] != value, abs(_gap(values[index], value))))


# Keras-tuner's probabilities do not reach 1.
_BELOW_1 = 1 - 1e-9


def _counted(hp: Any) -> bool:
    return not isinstance(hp, kinds.Choice) and hp.sampling == "linear"


def _steps(hp: Any) -> int | None:
    """Return the number of values of a stepped or ordered parameter; None for others."""
    if isinstance(hp, kinds.Choice):
        return len(hp.values)
    if hp.step is None:
        return None
    if _counted(hp):
        return int((hp.max_value - hp.min_value) // hp.step) + 1
    return len(list(hp.values))


def _gap(one: Any, other: Any) -> float:
    return 0.0 if isinstance(one, str) or isinstance(other, str) else float(one) - float(other)


# -- trials of an oracle, handed out by the coordinator that runs every search -------------------------
# The oracle lives on the first rank only, and is called as in a search without blocks.

#: Attribute of a run: its results.
RESULT = "nnlo:result"
#: Notes in the traceback of an error that ends the search, and of one that ends its trial for good.
FATAL = "(keras-tuner ends a search at an error like this)"
NOT_AGAIN = "(keras-tuner does not try a trial again after an error like this)"

# How often an oracle may answer that it waits while no trial runs: it may be computing, but not for ever.
_PATIENCE = 250


def told_failure(failure: Exception | None) -> list[str] | None:
    """Return an error that ends a search as plain values for other ranks."""
    return None if failure is None else [type(failure).__name__, str(failure)]


def failure_told(told: Sequence[str] | None) -> Exception | None:
    """Return the error that `told_failure` was given on another rank."""
    if told is None:
        return None
    name, text = told
    kind = getattr(keras_tuner.errors, name, RuntimeError)
    error: Exception = kind(text)
    return error


@dataclass(eq=False)
class _OracleTrial:
    """A trial given to a block.

    Attributes:
        number: counts the trials of this job, retries too.
        trial: the oracle's trial.
        name: the tuner name given to the oracle for this trial.
        results: the results of the folds.
    """

    number: int
    trial: Any
    name: str
    results: dict[int, Any] = field(default_factory=dict)


class OracleTrials(TrialSource, TrialChooser):
    """The trials of an oracle; an error of the oracle or the disk ends the search on all ranks.

    Args:
        tuner: owns the oracle; its `on_trial_...` methods are called.
        folds: folds per trial.

    Attributes:
        failure: the error that ended the search early.
    """

    def __init__(self, tuner: Any, folds: int = 1) -> None:
        self._tuner, self._folds, self.chooser = tuner, folds, self
        self._count = 0  # trials of this job, retries too
        self._copied: dict[str, str] = {}  # what spares know of each trial
        self._unreported: list[_OracleTrial] = []  # trials whose result the oracle does not have
        self._withdrawn = self._idle = False
        self._idle_answers = 0.0
        self.failure: Exception | None = None

    @property
    def open(self) -> bool:
        return not self._withdrawn

    @property
    def pending(self) -> bool:
        """Whether the oracle must be asked again although no trial runs."""
        return self._idle and self.open

    def left(self) -> float:
        """Return infinity if the oracle gives another trial, else 0; only asking it tells."""
        return math.inf if self.open and self._ask() != "STOPPED" else 0

    def take(self, block: int, *, first: bool, living: int) -> _OracleTrial | None:  # noqa: ARG002
        """Return the oracle's next trial; None if it has none now."""
        if len(self._unreported) >= living:  # in lock-step idle blocks wait for the oldest trial
            return None
        status = self._ask()
        self._idle_answers += 1 / living if self._idle else -self._idle_answers
        if self._idle_answers > _PATIENCE:
            self._fail(RuntimeError("the oracle waits for a trial, but none is running; it cannot continue"))
        return self._unreported[-1] if status == "RUNNING" else None

    def start(self, running: RunningTrial, run: int, fold: int) -> Start:
        trial = running.trial.trial
        hyperparameters = json.loads(json.dumps(trial.hyperparameters.get_config()))
        attributes = {"id": trial.trial_id, "hyperparameters": hyperparameters}
        number = running.trial.number
        return Start(run, self._tuner.oracle.seed, 1, attributes, number, fold, self._folds)

    def handle(self, team: int, running: RunningTrial, message: object) -> list[TeamMessage]:
        if not isinstance(message, Note) or message.key != RESULT:
            raise ProtocolError(f"team {team} sent {message!r}, which is not for the oracle")
        running.trial.results[running.running[team]] = message.value
        return []

    def tell(self, running: RunningTrial, *, interrupted: bool, stopped: bool) -> None:  # noqa: ARG002
        """Report a trial's result to the oracle; the next job trains an interrupted trial again."""
        self._unreported.remove(running.trial)
        if running.result.state != "halted" and self.failure is None:
            self._guarded(self._tell, running)

    def withdraw(self, reason: str) -> None:  # noqa: ARG002
        self._withdrawn = True

    def finish(self, lost: Sequence[Death]) -> tuple[dict[str, Any], ...]:  # noqa: ARG002
        """Return the oracle's state, its trials, and the error that ended the search early."""
        oracle, failure = self._tuner.oracle, self.failure
        content = {
            "oracle": oracle.get_state(),
            "trials": [trial.get_state() for trial in oracle.trials.values()],
            "failure": told_failure(failure),
        }
        return (json.loads(json.dumps(content)),)  # convert as for files

    def warn(self, text: str) -> None:
        warn(text)

    # -- copies for spares ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "oracle": self._tuner.oracle.get_state(),
            "tuner": self._tuner.get_state(),
            "count": self._count,
            "unreported": [
                [one.number, one.trial.trial_id, one.name, [*one.results.items()]] for one in self._unreported
            ],
            "withdrawn": self._withdrawn,
            "stop_reason": self.stop_reason,
            "failure": told_failure(self.failure),
        }

    def changes(self) -> tuple[dict[str, Any], list[str]]:
        every = {key: json.dumps(trial.get_state()) for key, trial in self._tuner.oracle.trials.items()}
        changed = {key: json.loads(text) for key, text in every.items() if self._copied.get(key) != text}
        self._copied = every
        return changed, []

    def restore(self, state: Mapping[str, Any]) -> None:
        oracle = self._tuner.oracle
        oracle.set_state(state["oracle"])
        if isinstance(oracle, keras_tuner.oracles.GridSearchOracle):
            refill_grid(oracle)
        self._tuner.set_state(state["tuner"])
        self._count, self._withdrawn = state["count"], state["withdrawn"]
        for number, trial_id, name, results in state["unreported"]:
            self._unreported.append(_OracleTrial(number, oracle.trials[trial_id], name, dict(results)))
        self.stop_reason, self.failure = state["stop_reason"], failure_told(state["failure"])

    def trial(self, number: int) -> _OracleTrial:
        return next(one for one in self._unreported if one.number == number)

    # -- inside ---------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[..., str], *args: Any) -> str:
        try:
            return call(*args)
        except Exception as error:  # raised again on all ranks once no trial runs
            self._fail(error)
            return "STOPPED"

    def _fail(self, error: Exception) -> None:
        self.failure, self.stop_reason = error, f"the search failed: {error}"
        self._withdrawn = True

    def _ask(self) -> str:
        """Ask the oracle for a trial; return its status."""
        status = self._guarded(self._create)
        self._idle = status == "IDLE" and not self._unreported
        return status

    def _create(self) -> str:
        self._tuner.pre_create_trial()
        oracle = self._tuner.oracle
        for trial in oracle.trials.values():
            if trial.status in {"FAILED", "INVALID"}:
                # It may have failed before it had all parameters, which a grid requires.
                trial.hyperparameters.merge(oracle.get_space(), overwrite=False)
                trial.hyperparameters.ensure_active_values()
        # The oracle repeats a name's trial until that trial's result is reported.
        taken = {one.name for one in self._unreported}
        name = next(name for index in itertools.count() if (name := f"block{index}") not in taken)
        trial = oracle.create_trial(name)
        if trial.status == "RUNNING":
            trial.metrics = type(trial.metrics)()  # of an earlier try
            self._unreported.append(_OracleTrial(self._count, trial, name))
            self._count += 1
            self._tuner.on_trial_begin(trial)
        return str(trial.status)

    def _tell(self, running: RunningTrial) -> str:
        trial, ending = running.trial.trial, running.result
        problem = "" if ending.state == "complete" else ending.error or ending.state
        if problem:
            trial.status = "FAILED" if NOT_AGAIN in problem else "INVALID"
            trial.message = problem
        else:
            self._complete(trial, [running.trial.results[fold] for fold in range(self._folds)])
        if FATAL in problem:
            raise keras_tuner.errors.FatalError(f"trial {trial.trial_id}: {problem}")
        self._tuner.on_trial_end(trial)
        return str(trial.status)

    def _complete(self, trial: Any, results: Sequence[Any]) -> None:
        oracle, objective = self._tuner.oracle, self._tuner.oracle.objective.name
        reports = results[0]["reports"]
        if self._folds > 1:
            # Folds have their best epochs at different steps, so a mean belongs to none.
            best = [_best(result["reports"], oracle.objective) for result in results]
            reports = [(0, averaged(best, objective))]
        trial.hyperparameters = HyperParameters.from_config(results[0]["hyperparameters"])
        scores = [metrics.get(objective, 0.0) for _, metrics in reports]
        if not any(map(math.isfinite, scores)):
            trial.status, trial.message = "INVALID", f"the objective {objective} is {scores[-1]}"
            return
        try:
            for step, metrics in reports:
                oracle.update_trial(trial.trial_id, metrics, step=step)
            trial.status = "COMPLETED"
        except Exception as error:  # like keras-tuner, blame the trial
            trial.status, trial.message = "INVALID", "".join(traceback.format_exception(error))


def _best(reports: Sequence[tuple[float, dict[str, float]]], objective: Any) -> dict[str, float]:
    """Return the metrics of the report with the best objective; nearly always there is only one report."""
    best = reports[0][1]
    for _, metrics in reports[1:]:
        if objective.better_than(*(one.get(objective.name, math.nan) for one in (metrics, best))):
            best = metrics
    return best


def averaged(found: Sequence[dict[str, float]], objective: str) -> dict[str, float]:
    """Return the means of the folds' metrics, and each fold's objective as a metric of its own.

    Example:
        >>> averaged([{"val_loss": 0.5}, {"val_loss": 0.25}], "val_loss")
        {'val_loss': 0.375, 'val_loss of fold 0': 0.5, 'val_loss of fold 1': 0.25}
    """
    return mean_metrics(found) | {
        f"{objective} of fold {fold}": float(metrics[objective])
        for fold, metrics in enumerate(found)
        if objective in metrics
    }


# Stands for a missing `max_trials`, for samplers that need the length of the search.
_MANY = 300


class SamplerOracle(keras_tuner.Oracle):
    """Oracle that lets a sampler choose: a name as in `nnlo_keras.optimize`, or any Optuna sampler.

    Parameters in conditional scopes are chosen where they are active. `seed=0` is a seed like any other.

    Args:
        sampler: a name, as in `nnlo_keras.optimize`, or a sampler.
        objective: as for any oracle.
        max_trials: as for any oracle.
        seed: seeds the sampler; None: a new seed each time.
        options: other arguments of oracles.

    Example:
        >>> oracle = SamplerOracle("evolutionary", objective="val_loss", max_trials=20, seed=0)
        >>> oracle.seed
        0
    """

    def __init__(
        self,
        sampler: str | BaseSampler,
        *,
        objective: Any = None,
        max_trials: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        if (known := options.get("hyperparameters")) is not None:
            options["hyperparameters"] = known.copy()  # an oracle adds entries to the object that it gets
        super().__init__(objective=objective, max_trials=max_trials, seed=seed, **options)
        if seed is not None:
            set_seed(self, seed)
        self._sampler = sampler
        self._asked: dict[str, Trial] = {}
        self._study = self._begun(0)

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        """Choose the values of a trial."""
        for _ in range(most_collisions(self)):
            asked = self._study.ask()
            values = self._chosen(asked)
            if not is_duplicate(self, values):
                self._asked[trial_id] = asked
                return {"status": "RUNNING", "values": values}
            self._study.tell(asked, state=TrialState.FAIL)
        # The sampler repeats tried values; random ones may find what is left.
        found = random_values(self)
        return {"status": "STOPPED"} if found is None else {"status": "RUNNING", "values": found}

    @keras_tuner.synchronized
    def end_trial(self, trial: Any) -> None:
        """Report a trial's result to the sampler."""
        super().end_trial(trial)
        ended = self.trials[trial.trial_id]
        if ended.status in {"COMPLETED", "FAILED"}:
            self._tell(ended)

    def set_state(self, state: Any) -> None:
        """Resume a search: report its trials to the sampler."""
        super().set_state(state)
        self._asked.clear()
        # Use another seed: with the same one the sampler would choose the first points again.
        self._study = self._begun(len(self.trials))
        for trial_id in dict.fromkeys(self.end_order):
            if trial_id in self.trials:
                self._tell(self.trials[trial_id])

    def _begun(self, known: int) -> optuna.Study:
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        minimized = self.objective.direction != "max"
        study = optuna.create_study(direction="minimize" if minimized else "maximize")
        optuna.logging.set_verbosity(verbosity)
        study.sampler = engine(self._sampler, self.seed + known, self.max_trials or _MANY, study)
        return study

    def _chosen(self, asked: Trial) -> dict[str, Any]:
        found = HyperParameters()
        for hp in self.hyperparameters.space:
            found.merge([hp])
            if not found.is_active(hp):
                continue
            choices = distribution(hp)
            found.values[hp.name] = (
                hp.default if choices is None else from_sampler(hp, _suggested(asked, hp.name, choices))
            )
        return dict(found.values)

    def _tell(self, trial: Any) -> None:
        asked = self._asked.pop(trial.trial_id, None)
        completed = trial.status == "COMPLETED"
        if asked is not None:
            score = trial.score if completed else None
            self._study.tell(asked, score, state=TrialState.COMPLETE if completed else TrialState.FAIL)
        elif completed:
            self._study.add_trial(self._known(trial))

    def _known(self, trial: Any) -> Any:
        """Return a trial that the sampler did not choose, in the sampler's form."""
        params, distributions = {}, {}
        hyperparameters = trial.hyperparameters
        for hp in hyperparameters.space:
            choices = distribution(hp)
            if choices is None or not hyperparameters.is_active(hp) or hp.name not in hyperparameters.values:
                continue
            params[hp.name] = to_sampler(hp, hyperparameters.values[hp.name])
            distributions[hp.name] = choices
        return create_trial(
            state=TrialState.COMPLETE, value=trial.score, params=params, distributions=distributions
        )


def _suggested(asked: Trial, name: str, choices: BaseDistribution) -> Any:
    if isinstance(choices, CategoricalDistribution):
        return asked.suggest_categorical(name, choices.choices)
    if isinstance(choices, IntDistribution):
        return asked.suggest_int(name, choices.low, choices.high, log=choices.log)
    assert isinstance(choices, FloatDistribution)
    return asked.suggest_float(name, choices.low, choices.high, log=choices.log)
