"""Oracle of keras-tuner that chooses by the samplers of `nnlo_keras.optimize`."""

from __future__ import annotations

from typing import Any

import keras_tuner
import optuna
from keras_tuner.engine.hyperparameters import HyperParameters
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState, create_trial

from nnlo_common.plugin import engine
from nnlo_keras.tune._compat import is_duplicate, most_collisions, random_values, set_seed
from nnlo_keras.tune._sampler_space import distribution, from_sampler, to_sampler

__all__ = ["SamplerOracle"]

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
