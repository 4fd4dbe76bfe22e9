"""Private parts of keras-tuner, all in one place, each in a function named by what it returns.

A part missing in another version of keras-tuner raises a `ConfigurationError` that names the part and the
version; `test_tuner_compat.py` finds it before users do.
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
    "file_of_oracle",
    "hook_callback",
    "is_duplicate",
    "judges_failures",
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
    """Return a private part."""
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
    """Return a function or class of keras-tuner's shared utilities."""
    try:
        module = importlib.import_module("keras_tuner.src.engine.tuner_utils")
    except ImportError:
        module = keras_tuner
    return _part(module, name)


# -- results of a trial --------------------------------------------------------------------------------


def validate_results(results: Any, objective: Any, caller: str) -> None:
    """Check the return value of a `fit` or a `run_trial`."""
    _utility("validate_trial_results")(results, objective, caller)


def metrics_of(results: Any, objective: Any) -> dict[str, float]:
    """Return the metrics in the results of a `run_trial`."""
    found = _utility("convert_to_metrics_dict")(results, objective)
    return {name: float(value) for name, value in found.items()}


def mean_metrics(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric."""
    return {name: float(value) for name, value in _utility("average_metrics_dicts")(found).items()}


def best_epoch_saver(objective: Any, file: str) -> Any:
    """Return a callback that saves the weights of the best epoch."""
    return _utility("SaveBestEpoch")(objective, file)


def hook_callback(tuner: Any, trial: Any) -> Any:
    """Return a callback that calls the tuner's `on_epoch_end` and similar hooks."""
    return _utility("TunerCallback")(tuner, trial)


# -- oracles -------------------------------------------------------------------------------------------


def file_of_oracle(oracle: Any) -> str:
    """Return the path of an oracle's file."""
    return str(_part(oracle, "_get_oracle_fname")())


def trial_file(oracle: Any, trial_id: str) -> str:
    """Return the path of a trial's file."""
    return f"{_part(oracle, '_get_trial_dir')(trial_id)}/trial.json"


def redirect_saves(oracle: Any, save: Callable[[], None], save_trial: Callable[[Any], None]) -> None:
    """Make an oracle call these instead of writing its file and those of trials."""
    _part(oracle, "_save_trial")
    oracle.save, oracle._save_trial = save, save_trial


def waiting_retries(oracle: Any) -> list[str]:
    """Return the trials queued for a retry."""
    return list(_part(oracle, "_retry_queue"))


def replace_retries(oracle: Any, trial_ids: Iterable[str]) -> None:
    """Queue these trials for a retry, and no others."""
    _part(oracle, "_retry_queue")
    oracle._retry_queue = list(trial_ids)


def refill_grid(oracle: Any) -> None:
    """Restore which points a grid has tried; keras-tuner does not save them."""
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
    """Set an oracle's seed, also to 0, which keras-tuner would replace by a random one."""
    _part(oracle, "_seed_state")
    oracle.seed = oracle._seed_state = seed


def most_collisions(oracle: Any) -> int:
    """Return how many already tried choices in a row mark the space as used up."""
    return int(_part(oracle, "_max_collisions"))


def is_duplicate(oracle: Any, values: dict[str, Any]) -> bool:
    """Return whether a trial had these values."""
    return bool(_part(oracle, "_duplicate")(values))


def random_values(oracle: Any) -> dict[str, Any] | None:
    """Return random values that no trial had; None: there seem to be none."""
    found: dict[str, Any] | None = _part(oracle, "_random_values")()
    return found


# -- tuners --------------------------------------------------------------------------------------------


def judges_failures(tuner: type) -> bool:
    """Return whether a tuner has a way of its own to catch the errors of trials."""
    step = "_try_run_and_update_trial"
    return _part(tuner, step) is not _part(keras_tuner.Tuner, step)


class HookedTuner(keras_tuner.Tuner):
    """A keras-tuner tuner whose private steps `MPITuner` calls and overrides under nnlo's names.

    Attributes:
        has_directory: whether this rank owns the directory; set it before `__init__`.
    """

    has_directory = True
    _made = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._made = True

    def _finished_model(self, hp: Any, model: Any) -> Any:  # noqa: ARG002
        """Change a built model; return it."""
        return model

    def _built_model(self, hp: Any) -> Any:
        """Build a model; refuse one that is not a model or too large."""
        return _part(self, "_try_build")(hp)

    def _built_and_fitted(self, trial: Any, *args: Any, **options: Any) -> Any:
        """Build and fit a trial's model; return the results."""
        return _part(super(), "_build_and_fit_model")(trial, *args, **options)

    def _fitted(self, trial: Any, *args: Any, **options: Any) -> Any:
        """Return the results of `_built_and_fitted`, or of what a subclass puts around it or in its place."""
        return _part(self, "_build_and_fit_model")(trial, *args, **options)

    def _ran_and_reported(self, trial: Any, *args: Any, **options: Any) -> None:
        """Run a trial and report its results to this rank's oracle, as keras-tuner or a subclass does."""
        _part(self, "_run_and_update_trial")(trial, *args, **options)

    @property
    def state_file(self) -> str:
        """The path of the tuner's file."""
        return str(_part(super(), "_get_tuner_fname")())

    def _weights_file(self, trial_id: str) -> str:
        """Return the path of a trial's checkpoint."""
        return str(_part(self, "_get_checkpoint_fname")(trial_id))

    def _build_config_file(self, trial_id: str) -> str:
        """Return the path of a trial's build configuration."""
        return str(_part(self, "_get_build_config_fname")(trial_id))

    def _copied_callbacks(self, callbacks: list[Any]) -> list[Any]:
        """Return copies for one trial; refuse callbacks that cannot be copied."""
        copies: list[Any] = _part(self, "_deepcopy_callbacks")(callbacks)
        return copies

    def _set_tensorboard_folder(self, callbacks: list[Any], trial: Any, execution: int) -> None:
        """Give a trial's TensorBoard a folder of its own."""
        _part(self, "_configure_tensorboard_dir")(callbacks, trial, execution)

    def _build_and_fit_model(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        return self._built_and_fitted(trial, *args, **kwargs)

    def _build_hypermodel(self, hp: Any) -> Any:
        return self._finished_model(hp, _part(super(), "_build_hypermodel")(hp))

    def _populate_initial_space(self) -> None:
        if self.has_directory:
            _part(super(), "_populate_initial_space")()

    def _get_tuner_fname(self) -> str:
        # A rank without the directory must not find a file there while it is constructed.
        return self.state_file if self._made or self.has_directory else ""
