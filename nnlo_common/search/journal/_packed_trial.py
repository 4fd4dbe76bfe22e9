"""Trials as JSON, and in another study: what one of them has got elsewhere is brought to it."""

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
    """Return a trial as plain JSON values, every number exactly."""
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
    """Return the trial that was packed so."""
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
    """Leave out what Optuna would unpickle: CMA-ES as it was, which learns from the trials again."""
    return {key: value for key, value in system.items() if not is_pickle(key)}


def take_over(study: optuna.Study, trials: Iterable[Mapping[str, Any]]) -> None:
    """Give a study the packed trials that have ended elsewhere; what waits in it ends as it did there."""
    known = study.get_trials(deepcopy=False)
    for content in trials:
        trial = unpacked(content)
        if trial.number >= len(known):
            study.add_trial(trial)
        elif known[trial.number].state is TrialState.WAITING:
            end_in(storage_of(study), number_in(known[trial.number]), trial)


def end_in(storage: optuna.storages.BaseStorage, there: int, trial: FrozenTrial) -> None:
    """Let a trial that waits or runs in a storage end as `trial` has ended elsewhere.

    Args:
        storage: which.
        there: its number in the storage.
        trial: how it has ended.
    """
    if storage.get_trial(there).state is TrialState.WAITING:
        storage.set_trial_state_values(there, TrialState.RUNNING)
    bring_up(storage, there, trial)
    storage.set_trial_state_values(there, trial.state, trial.values)


def bring_up(storage: optuna.storages.BaseStorage, there: int, trial: FrozenTrial) -> None:
    """Give a trial in a storage what `trial` has got elsewhere, its state and values apart."""
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
