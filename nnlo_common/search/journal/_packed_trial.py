"""Trials as JSON, and copies of their results into another study."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.search._compat import is_pickle, number_in, storage_of

__all__ = ["bring_up", "end_in", "packed", "take_over", "unpacked"]


def packed(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial as plain JSON values; numbers stay exact."""
    return {
        "trial": trial.number,
        "state": trial.state.name,
        "values": None if trial.values is None else list(trial.values),
        "params": {
            name: [
                float(distribution.to_internal_repr(trial.params[name])),
                distribution_to_json(distribution),
            ]
            for name, distribution in trial.distributions.items()
        },
        "steps": [[step, value] for step, value in trial.intermediate_values.items()],
        "user": trial.user_attrs,
        "system": _without_code(trial.system_attrs),
        "time": [moment and moment.isoformat() for moment in (trial.datetime_start, trial.datetime_complete)],
    }


def unpacked(content: Mapping[str, Any]) -> FrozenTrial:
    """Return the trial that `packed` has packed."""
    distributions = {name: json_to_distribution(text) for name, (_, text) in content["params"].items()}
    start, complete = (moment and datetime.datetime.fromisoformat(moment) for moment in content["time"])
    trial = optuna.trial.create_trial(
        state=TrialState[content["state"]],
        values=content["values"],
        params={
            name: distributions[name].to_external_repr(value)
            for name, (value, _) in content["params"].items()
        },
        distributions=distributions,
        user_attrs=dict(content["user"]),
        system_attrs=_without_code(content["system"]),
        intermediate_values={int(step): value for step, value in content["steps"]},
    )
    trial.number = content["trial"]
    trial.datetime_start, trial.datetime_complete = start, complete
    return trial


def _without_code(system: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what Optuna would unpickle: the state of CMA-ES, which it rebuilds from the trials."""
    return {key: value for key, value in system.items() if not is_pickle(key)}


def take_over(study: optuna.Study, trials: Iterable[Mapping[str, Any]]) -> None:
    """Add packed trials to a study; finish those that it already has waiting."""
    known = study.get_trials(deepcopy=False)
    for content in trials:
        trial = unpacked(content)
        if trial.number >= len(known):
            study.add_trial(trial)
        elif known[trial.number].state is TrialState.WAITING:
            end_in(storage_of(study), number_in(known[trial.number]), trial)


def end_in(storage: optuna.storages.BaseStorage, there: int, trial: FrozenTrial) -> None:
    """Finish a waiting or running trial of a storage with the result of `trial`.

    Args:
        storage: the storage.
        there: the trial's number in the storage.
        trial: the finished trial.
    """
    if storage.get_trial(there).state is TrialState.WAITING:
        storage.set_trial_state_values(there, TrialState.RUNNING)
    bring_up(storage, there, trial)
    storage.set_trial_state_values(there, trial.state, trial.values)


def bring_up(storage: optuna.storages.BaseStorage, there: int, trial: FrozenTrial) -> None:
    """Copy parameters, reports and attributes of `trial` to a trial of a storage; leave state and values."""
    known = storage.get_trial(there)
    for name, distribution in trial.distributions.items():
        if name not in known.params:
            value = distribution.to_internal_repr(trial.params[name])
            storage.set_trial_param(there, name, value, distribution)
    for step, value in trial.intermediate_values.items():
        storage.set_trial_intermediate_value(there, step, value)
    for key, kept in trial.user_attrs.items():
        storage.set_trial_user_attr(there, key, kept)
    for key, kept in trial.system_attrs.items():
        storage.set_trial_system_attr(there, key, kept)
