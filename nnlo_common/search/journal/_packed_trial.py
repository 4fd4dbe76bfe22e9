"""Trials as JSON, and copies of their results into another study."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import optuna
from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.search._compat import is_pickle, number_in, storage_of

__all__ = [
    "PackedParameters",
    "bring_up",
    "end_in",
    "packed",
    "packed_parameters",
    "take_over",
    "unpacked",
    "unpacked_parameters",
]

#: Each parameter's internal number, and its distribution as JSON.
PackedParameters: TypeAlias = Mapping[str, tuple[float, str]]


def packed_parameters(
    values: Mapping[str, Any], space: Mapping[str, BaseDistribution]
) -> dict[str, tuple[float, str]]:
    """Return parameters as plain JSON values."""
    return {
        name: (float(space[name].to_internal_repr(value)), distribution_to_json(space[name]))
        for name, value in values.items()
    }


def unpacked_parameters(packed: PackedParameters) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """Return the values and the distributions that `packed_parameters` has packed."""
    space = {name: _distribution(text) for name, (_, text) in packed.items()}
    return {name: space[name].to_external_repr(number) for name, (number, _) in packed.items()}, space


def _distribution(text: str) -> BaseDistribution:
    parsed_json(text)  # Optuna's own reading has no limits
    return json_to_distribution(text)


def packed(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial as plain JSON values; numbers stay exact."""
    return {
        "trial": trial.number,
        "state": trial.state.name,
        "values": None if trial.values is None else list(trial.values),
        "params": {
            name: [*one] for name, one in packed_parameters(trial.params, trial.distributions).items()
        },
        "steps": [[step, value] for step, value in trial.intermediate_values.items()],
        "user": trial.user_attrs,
        "system": _without_code(trial.system_attrs),
        "time": [moment and moment.isoformat() for moment in (trial.datetime_start, trial.datetime_complete)],
    }


def unpacked(content: Mapping[str, Any]) -> FrozenTrial:
    """Return the trial that `packed` has packed."""
    params, distributions = unpacked_parameters(content["params"])
    start, complete = (moment and datetime.datetime.fromisoformat(moment) for moment in content["time"])
    trial = optuna.trial.create_trial(
        state=TrialState[content["state"]],
        values=content["values"],
        params=params,
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
