"""Parts of keras-tuner that are not public, all in one place, each in a function that says what it gives.

What is missing in another version of keras-tuner raises a `ConfigurationError` that names the part and the
version. `test_tuner_compat.py` says it before users find it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras_tuner

from nnlo_common import ConfigurationError

__all__ = [
    "HookedTuner",
    "best_epoch_saver",
    "best_step",
    "file_of_oracle",
    "hook_callback",
    "is_duplicate",
    "mean_metrics",
    "metrics_of",
    "most_collisions",
    "random_values",
    "redirect_saves",
    "refill_grid",
    "replace_retries",
    "set_seed",
    "trial_file",
    "validate_results",
    "waiting_retries",
]

_TESTED = "1.4.8"


def _part(owner: Any, name: str) -> Any:
    """Return a part that is not public."""
    try:
        return getattr(owner, name)
    except AttributeError:
        version = getattr(keras_tuner, "__version__", "of unknown version")
        where = getattr(owner, "__name__", type(owner).__name__)
        raise ConfigurationError(
            f"keras-tuner {version} has no {where}.{name}, which MPITuner needs; "
            f"install keras-tuner=={_TESTED}"
        ) from None


def _utility(name: str) -> Any:
    """Return a function or class of the module in which keras-tuner keeps what its tuners share."""
    try:
        module = importlib.import_module("keras_tuner.src.engine.tuner_utils")
    except ImportError:
        module = keras_tuner
    return _part(module, name)


# -- what a trial has found ----------------------------------------------------------------------------


def validate_results(results: Any, objective: Any, caller: str) -> None:
    """Refuse what a `fit` or a `run_trial` must not return."""
    _utility("validate_trial_results")(results, objective, caller)


def metrics_of(results: Any, objective: Any) -> dict[str, float]:
    """Return the metrics in what a `run_trial` has returned."""
    found = _utility("convert_to_metrics_dict")(results, objective)
    return {name: float(value) for name, value in found.items()}


def mean_metrics(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric."""
    return {name: float(value) for name, value in _utility("average_metrics_dicts")(found).items()}


def best_step(results: Any, objective: Any) -> int:
    """Return the epoch that was the best in what a `run_trial` has returned."""
    return int(_utility("get_best_step")(results, objective))


def best_epoch_saver(objective: Any, file: str) -> Any:
    """Return a callback that saves the weights of the best epoch."""
    return _utility("SaveBestEpoch")(objective, file)


def hook_callback(tuner: Any, trial: Any) -> Any:
    """Return a callback that calls the tuner's `on_epoch_end` and its like."""
    return _utility("TunerCallback")(tuner, trial)


# -- oracles -------------------------------------------------------------------------------------------


def file_of_oracle(oracle: Any) -> str:
    """Return the path of an oracle's file."""
    return str(_part(oracle, "_get_oracle_fname")())


def trial_file(oracle: Any, trial_id: str) -> str:
    """Return the path of a trial's file."""
    return f"{_part(oracle, '_get_trial_dir')(trial_id)}/trial.json"


def redirect_saves(oracle: Any, save: Callable[[], None], save_trial: Callable[[Any], None]) -> None:
    """Let an oracle call these instead of writing its file, and that of a trial."""
    _part(oracle, "_save_trial")
    oracle.save, oracle._save_trial = save, save_trial


def waiting_retries(oracle: Any) -> list[str]:
    """Return the trials that are to be tried again."""
    return list(_part(oracle, "_retry_queue"))


def replace_retries(oracle: Any, trial_ids: Iterable[str]) -> None:
    """Let these trials be tried again, and no others."""
    _part(oracle, "_retry_queue")
    oracle._retry_queue = list(trial_ids)


def refill_grid(oracle: Any) -> None:
    """Let a grid know which of its points have been tried, which keras-tuner does not keep on disk."""
    compare, ordered = _part(oracle, "_compare"), _part(oracle, "_ordered_ids")

    def compared(one: str, other: str) -> int:
        values = oracle.trials[one].hyperparameters.values, oracle.trials[other].hyperparameters.values
        return int(compare(*values))

    before = None
    for trial_id in sorted(oracle.trials, key=functools.cmp_to_key(compared)):
        ordered.insert(trial_id, before)
        before = trial_id
    _part(oracle, "_populate_next")[:] = [one for one in oracle.end_order if one in oracle.trials]


def set_seed(oracle: Any, seed: int) -> None:
    """Let an oracle have a seed, also 0, for which keras-tuner draws another."""
    _part(oracle, "_seed_state")
    oracle.seed = oracle._seed_state = seed


def most_collisions(oracle: Any) -> int:
    """Return how often values may be chosen that have been tried, before the space counts as used up."""
    return int(_part(oracle, "_max_collisions"))


def is_duplicate(oracle: Any, values: dict[str, Any]) -> bool:
    """Say whether a trial has had these values."""
    return bool(_part(oracle, "_duplicate")(values))


def random_values(oracle: Any) -> dict[str, Any] | None:
    """Return values by chance that no trial has had; None: there seem to be none."""
    found: dict[str, Any] | None = _part(oracle, "_random_values")()
    return found


# -- tuners --------------------------------------------------------------------------------------------


class HookedTuner(keras_tuner.Tuner):
    """A tuner of keras-tuner whose private steps `MPITuner` changes and calls by names of ours.

    Attributes:
        has_directory: whether this rank has the directory; to be set before `__init__`.
    """

    has_directory = True
    _made = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._made = True

    def _finished_model(self, hp: Any, model: Any) -> Any:  # noqa: ARG002
        """Change a model that was built; the model is returned."""
        return model

    def _built_model(self, hp: Any) -> Any:
        """Build a model, and refuse one that is none or too large."""
        return _part(self, "_try_build")(hp)

    @property
    def state_file(self) -> str:
        """The path of the tuner's file."""
        return str(_part(super(), "_get_tuner_fname")())

    def _weights_file(self, trial_id: str) -> str:
        """Return the path of a trial's checkpoint."""
        return str(_part(self, "_get_checkpoint_fname")(trial_id))

    def _build_config_file(self, trial_id: str) -> str:
        """Return the path of what a trial's model is built from."""
        return str(_part(self, "_get_build_config_fname")(trial_id))

    def _copied_callbacks(self, callbacks: list[Any]) -> list[Any]:
        """Return copies for one trial, or refuse what cannot be copied."""
        copies: list[Any] = _part(self, "_deepcopy_callbacks")(callbacks)
        return copies

    def _set_tensorboard_folder(self, callbacks: list[Any], trial: Any, execution: int) -> None:
        """Give a trial's TensorBoard a folder of its own."""
        _part(self, "_configure_tensorboard_dir")(callbacks, trial, execution)

    def _build_hypermodel(self, hp: Any) -> Any:
        return self._finished_model(hp, _part(super(), "_build_hypermodel")(hp))

    def _populate_initial_space(self) -> None:
        if self.has_directory:
            _part(super(), "_populate_initial_space")()

    def _get_tuner_fname(self) -> str:
        # There is none to begin with for a rank that does not have the directory.
        return self.state_file if self._made or self.has_directory else ""
