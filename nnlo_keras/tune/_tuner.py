"""Tuner of keras-tuner whose trials train on blocks of ranks.

    python          BaseTuner.search: one trial after another in this process
    rank 0          owns the oracle and the directory, hands out trials, and trains none
    other ranks     train rank 0's trials: run_trial, on every rank of a block

Keras-tuner's own classes do the rest, except its gRPC service, which is not used.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import keras
import keras_tuner
import numpy as np
from keras_tuner.engine.hyperparameters import HyperParameters
from keras_tuner.engine.trial import Trial
from optuna.samplers import BaseSampler

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    ALGORITHMS,
    EXIT_CODE,
    LARGEST_JSON,
    DivisibleWorld,
    Interrupts,
    RankWorld,
    TimeLeft,
    end_of,
    hold,
    launched,
    parsed_json,
    quoted_samplers,
    read_whole,
    refuse_spares,
    seed_of,
    warn,
    whole_number,
)
from nnlo_keras import _wrappers
from nnlo_keras._compat import seed_generators
from nnlo_keras._distribute import Distribute
from nnlo_keras._model_optimizers import any_wrapper_in
from nnlo_keras._wrapper import Wrapper
from nnlo_keras.tune import _block_search
from nnlo_keras.tune._block_search import search_over
from nnlo_keras.tune._compat import (
    HookedTuner,
    best_epoch_saver,
    hook_callback,
    judges_failures,
    metrics_of,
    validate_results,
)
from nnlo_keras.tune._data import Folds, held_out, shared
from nnlo_keras.tune._oracle import FATAL, NOT_AGAIN, RESULT, SamplerOracle, averaged

__all__ = ["EarlyEnd", "MPITuner", "OutOfTimeError", "Wrap", "fit_together", "wrap_in", "wrapping"]

# -- early end of a search without blocks: at a signal, or when no time is left ------------------------


class OutOfTimeError(BaseException):
    """Ends the search; a `BaseException`, because keras-tuner takes an `Exception` for a trial's failure."""


class EarlyEnd(keras.callbacks.Callback):
    """Callback that leaves a trial; a rerun of the same command resumes from the directory.

    Args:
        interrupts: the signals.
        time_left: the time limit.
    """

    def __init__(self, interrupts: Interrupts, time_left: TimeLeft) -> None:
        super().__init__()
        self._interrupts, self._time_left = interrupts, time_left

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' signature
        """Leave after a signal or at the time limit; a `Checkpoint` runs first and has saved."""
        if self._interrupts.came:
            raise SystemExit(EXIT_CODE)
        if self._time_left.over(time.time()):
            raise OutOfTimeError


# -- joint `fit` of a trial by several ranks, each on its share, with the same history -----------------


class _Fatal(ConfigurationError, keras_tuner.errors.FatalValueError):
    """Error at which keras-tuner ends a search."""


def fit_together(
    model: Any,
    world: RankWorld,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    block_size: int,
    shard: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for this rank's `fit`, and make `fit` return the first rank's history.

    Args:
        model: the built model.
        world: the ranks that train it.
        args: the positional arguments of `search`.
        options: its keyword arguments, with the callbacks.
        block_size: the ranks per trial that the user asked for.
        shard: whether to deal out the samples.

    Raises:
        ConfigurationError: the model's optimizer is not wrapped; this ends the search.
    """
    wrapper = any_wrapper_in(model)
    if wrapper is None:
        found = type(model.optimizer).__name__
        raise _Fatal(
            f"block_size={block_size} trains each trial on {block_size} ranks, but build() returns a model "
            f"with a plain {found}; wrap it there, e.g. nnlo_keras.Downpour({found}(...)), or give MPITuner "
            'distribute="downpour", or block_size=1'
        )
    callbacks = options["callbacks"]
    if not any(isinstance(one, Distribute) for one in callbacks):
        callbacks = [*callbacks, Distribute()]
    _share_history(model, world)
    options = {**options, "callbacks": callbacks}
    return shared(args, options, wrapper.ranks) if shard else (args, options)


def _share_history(model: Any, world: RankWorld) -> None:
    """Make `fit` return the first rank's history on all ranks; the first rank validates."""
    fit: Callable[..., Any] = model.fit

    def fit_and_share(*args: Any, **options: Any) -> Any:
        history = fit(*args, **options)
        mine = {"epoch": history.epoch, "history": history.history} if world.rank == 0 else {}
        answer = json.loads(world.gather_text(json.dumps(mine, default=_plain))[0])
        history.epoch, history.history = answer["epoch"], answer["history"]
        return history

    model.fit = fit_and_share


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


# -- wrap the optimizer of a model that was compiled with a plain one ----------------------------------

Wrap: TypeAlias = Callable[[Any], Wrapper]

_BY_NAME: dict[str, Wrap] = {name: _wrappers.wrapper(one) for name, one in ALGORITHMS.items()}


def wrapping(asked: str | Wrap | None) -> Wrap | None:
    """Return the function that wraps an optimizer, given as itself or by the algorithm's name.

    Example:
        >>> wrapping("easgd").__name__
        'EASGD'
    """
    if asked is None or (callable(asked) and not isinstance(asked, str)):
        return asked
    if asked not in _BY_NAME:
        raise ConfigurationError(
            f"distribute={asked!r} is not known: use {', '.join(map(repr, sorted(_BY_NAME)))}, or a function "
            "that wraps an optimizer, e.g. lambda optimizer: nnlo_keras.EASGD(optimizer, every=5)"
        )
    return _BY_NAME[asked]


def wrap_in(model: Any, wrap: Wrap) -> None:
    """Wrap the optimizer that a model was compiled with."""
    if (found := any_wrapper_in(model)) is not None:
        raise ConfigurationError(
            f"distribute= was given, but the model's optimizer is already a {type(found).__name__}; "
            "leave one of the two out"
        )
    optimizer = model.optimizer
    if optimizer is None:
        raise ConfigurationError(
            "distribute= was given, but the model is not compiled; compile it in build()"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # Keras's own, under mixed_float16
        config = optimizer.get_config() | {"inner_optimizer": wrap(optimizer.inner_optimizer)}
        model.optimizer = keras.optimizers.LossScaleOptimizer(**config)
    else:
        model.optimizer = wrap(optimizer)


# Arguments of keras-tuner's tuners that are their oracle's.
_ORACLE_OPTIONS = (
    "hyperparameters",
    "tune_new_entries",
    "allow_new_entries",
    "max_retries_per_trial",
    "max_consecutive_failed_trials",
)
_HOOKS = ("on_batch_begin", "on_batch_end", "on_epoch_begin", "on_epoch_end")


class MPITuner(HookedTuner):
    """A keras-tuner tuner over blocks of ranks; started with `python` it is an ordinary one.

    The same script runs on every rank. With `mpiexec -n 7` and `block_size=3` the first rank owns the oracle
    and the directory, and two blocks of three ranks train a trial each. The samples given to `search` are
    dealt out to a block's workers, `Distribute()` is added to the callbacks if missing, and all ranks of a
    block get the history of its first rank, its server. After `search` all ranks have all results.

    Args:
        hypermodel: a function that builds a model, or a `HyperModel`.
        oracle: one of `keras_tuner.oracles`, or a sampler as in `nnlo_keras.optimize`: "bayesian",
            "random" or another name of the page on searches, or any Optuna sampler.
        objective: the objective of a sampler, as for any oracle; an oracle of keras-tuner has its own.
        max_trials: the number of trials of a sampler.
        seed: seeds a sampler.
        block_size: ranks per trial.
        folds: the number of folds, or for each fold its training and validation indices, as scikit-learn's
            splitters give them. Folds train side by side if their number divides the block, else one after
            another; a trial's score is their mean.
        distribute: wraps the optimizer of every built model: "downpour", "easgd", ... or e.g.
            `lambda optimizer: nk.EASGD(optimizer, every=5)`. None: the model's optimizer is wrapped already.
        shard: whether to deal out the samples given to `search`; False: the HyperModel's `fit` does it.
        lockstep: whether the search repeats with as many blocks, at any pace: results reach the oracle in the
            order in which it chose the trials. Needs a seed.
        spares: how many ranks, the last ones, wait to take over from the first if it dies, under `mpiexec
            --with-ft ulfm` of Open MPI 5.
        until: when the search must end: seconds from its start, a time, or "slurm" for the end of its job. No
            trial begins that would take longer, judging by the trials so far.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: other tuner arguments: `directory`, `project_name`, `overwrite`, `executions_per_trial`, ...

    Example:
        >>> import keras, numpy, tempfile
        >>> import nnlo_keras as nk
        >>> x = numpy.linspace(-1, 1, 32).reshape(-1, 1)
        >>> def build(hp):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     rate = hp.Float("rate", 1e-3, 1e-1, sampling="log")
        ...     model.compile(optimizer=nk.Downpour(keras.optimizers.SGD(rate)), loss="mse")
        ...     return model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tuner = nk.MPITuner(build, "random", objective="loss", max_trials=2, directory=folder)
        ...     tuner.search(x, 2 * x, epochs=1, verbose=0)
        ...     len(tuner.get_best_hyperparameters(2))
        2
    """

    def __init__(
        self,
        hypermodel: Any = None,
        oracle: Any = "random",
        *,
        objective: Any = None,
        max_trials: int | None = None,
        seed: int | None = None,
        block_size: int = 1,
        folds: int | Iterable[tuple[Any, Any]] = 1,
        distribute: str | Wrap | None = None,
        shard: bool = True,
        lockstep: bool = False,
        spares: int = 0,
        until: float | str | datetime.datetime | None = None,
        world: DivisibleWorld | None = None,
        **options: Any,
    ) -> None:
        whole_number("block_size", block_size, 1)
        whole_number("spares", spares, 0)
        if isinstance(folds, int):
            whole_number("folds", folds, 1)
        refuse_spares(spares, lockstep=lockstep)
        if lockstep and seed is None and not isinstance(oracle, keras_tuner.Oracle):
            raise ConfigurationError("MPITuner(lockstep=True) without seed= would not repeat; give a seed")
        if hypermodel is None and type(self).run_trial is MPITuner.run_trial:
            raise ConfigurationError(
                "Received `hypermodel=None`: give MPITuner a function that builds a model, or a HyperModel; "
                "only a subclass with a run_trial of its own goes without"
            )
        own = {name: options.pop(name) for name in _ORACLE_OPTIONS if name in options}
        oracle = _made(oracle, {"objective": objective, "max_trials": max_trials, "seed": seed, **own})
        self._spares = spares
        self._lockstep, self._until, self._time_left = lockstep, until, TimeLeft(end_of(until, time.time()))
        self._world = world
        self.has_directory = (ranks := world or launched()) is None or ranks.rank == 0
        self._alone = ranks is None or ranks.size == 1
        if not self._alone and judges_failures(type(self)):
            raise ConfigurationError(
                f"{type(self).__name__} overrides _try_run_and_update_trial, which a search over blocks does "
                "not call: an error on one rank of a block ends the trial on all of them; override run_trial "
                "or _run_and_update_trial instead, and catch there what the trial survives"
            )
        self._interrupts = Interrupts()
        self._block_size, self._folds, self._shard = block_size, Folds(folds), shard
        self._distribute, self._wrap = distribute, wrapping(distribute)
        self._fold: int | None = None  # the fold this rank trains; None: all, one after another
        (_block_search.keep_whole if self.has_directory else _block_search.keep_nothing)(oracle)
        if not self.has_directory:
            options["overwrite"] = False  # only the rank that owns the directory may empty it
        super().__init__(oracle, hypermodel, **options)
        if type(self).save_model is not keras_tuner.Tuner.save_model:
            self.__dict__["save_model"] = self._once_per_trial(self.save_model)

    def search(self, *args: Any, **options: Any) -> None:
        """Search for the best hyper-parameters; all arguments go to `fit` (collective).

        With several ranks `fit` shows no progress, as trials would mix. Keras-tuner's table is printed once.

        Raises:
            ConfigurationError: the ranks cannot be split into blocks, their arguments differ, or another job
                uses the directory.
            SystemExit: with status 75, after SIGTERM or SIGUSR1; rerun the same command to resume.
        """
        world = self._world or launched()
        self._time_left = TimeLeft(end_of(self._until, time.time()), self._time_left.longest_s)
        if self._alone:
            self.claim()
            with Interrupts() as self._interrupts:
                try:
                    super().search(*args, **options)
                except OutOfTimeError:
                    self.on_search_end()
            return
        self.oracle.verbose = options.get("verbose", "auto")
        options["verbose"] = 0
        if self.has_directory:
            self.on_search_begin()
        search_over(
            self,
            cast("DivisibleWorld", world),
            block_size=self._block_size,
            folds=self._folds.count,
            lockstep=self._lockstep,
            spares=self._spares,
            time_left=self._time_left,
            train=lambda run: self._train(run, args, options),
        )
        if self.has_directory:
            self.on_search_end()

    def claim(self) -> None:
        """Lock the directory against other jobs, and write its first state.

        Raises:
            ConfigurationError: another job uses it.
        """
        hold(Path(self.project_dir), "searching")
        self.save()  # else a job killed before its first result would start anew

    @property
    def facts(self) -> dict[str, Any]:
        """Arguments that must be equal on all ranks."""
        return {
            "oracle": type(self.oracle).__name__,
            "objective": str(self.oracle.objective),
            "max_trials": self.oracle.max_trials,
            "folds": self._folds.count,
            "distribute": self._distribute if isinstance(self._distribute, str) else self._wrap is not None,
            "directory": str(self.directory),
            "project_name": self.project_name,
            "executions_per_trial": self.executions_per_trial,
            "lockstep": self._lockstep,
            "spares": self._spares,
            "until": str(self._until),
        }

    # -- a trial, on any rank -------------------------------------------------------------------------

    def run_trial(self, trial: Any, *args: Any, **options: Any) -> Any:
        """Train a trial, or this rank's fold of it, `executions_per_trial` times."""
        values = trial.hyperparameters.values
        if "tuner/epochs" in values:  # Hyperband's
            options |= {name: values[f"tuner/{name}"] for name in ("epochs", "initial_epoch")}
        objective, file = self.oracle.objective, self._weights_file(trial.trial_id)
        saves = best_epoch_saver(objective, file) if self._keeps_files() else None
        own = self._folds
        folds: Sequence[int | None] = [own.only] if own.count == 1 else range(own.count)
        folds = folds if self._fold is None else [self._fold]
        results = [self._executed(trial, fold, saves, args, options) for fold in folds]
        if self._folds.count == 1 or self._fold is not None:
            return results[0]
        found = [metrics_of(result, objective) for result in results]
        return averaged(found, objective.name)

    def _keeps_files(self) -> bool:
        """Whether this rank writes the trial's files: only the first of folds side by side does."""
        return _first_of_block() and not self._fold

    def _once_per_trial(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `write` on the one rank that writes the trial's files."""

        @functools.wraps(write)
        def write_once(*args: Any, **options: Any) -> Any:
            return write(*args, **options) if self._keeps_files() else None

        return write_once

    def _executed(
        self, trial: Any, fold: int | None, checkpoint: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> list[Any]:
        seed = int(self.oracle.seed)
        args, options = held_out(args, options, self._folds, fold, seed)
        original = options.pop("callbacks", None) or []
        results = []
        for execution in range(self.executions_per_trial):
            number = zlib.crc32(f"{trial.trial_id} {fold} {execution}".encode())
            seed_generators(seed_of(seed, number))
            callbacks = self._copied_callbacks(list(original))
            if any(isinstance(one, keras.callbacks.TensorBoard) for one in callbacks):
                self._set_tensorboard_folder(callbacks, trial, execution)  # it imports tensorboard
            if any(getattr(keras_tuner.Tuner, hook) is not _function(getattr(self, hook)) for hook in _HOOKS):
                callbacks.append(hook_callback(self, trial))
            callbacks += [] if checkpoint is None else [checkpoint]
            # Without blocks only: a block's ranks leave together, when the coordinator halts them.
            callbacks += [EarlyEnd(self._interrupts, self._time_left)] if self._alone else []
            results.append(self._fitted(trial, *args, **{**options, "callbacks": callbacks}))
        return results

    def _built_and_fitted(self, trial: Any, *args: Any, **options: Any) -> Any:
        hp, world = trial.hyperparameters, launched()
        model = self._built_model(hp)
        if world is not None:
            args, options = fit_together(
                model, world, args, options, block_size=self._block_size, shard=self._shard
            )
        results = self.hypermodel.fit(hp, model, *args, **options)
        if self._keeps_files():
            _block_search.write(self._build_config_file(trial.trial_id), model.get_build_config())
        validate_results(results, self.oracle.objective, "HyperModel.fit()")
        return results

    def _finished_model(self, hp: Any, model: Any) -> Any:
        """Load an earlier trial's weights, as Hyperband's later rounds require, and wrap the optimizer."""
        if "tuner/trial_id" in hp.values:  # Hyperband resumes a trial of the round before
            before = hp.values["tuner/trial_id"]
            if not model.built:
                model.build_from_config(
                    parsed_json(read_whole(self._build_config_file(before), LARGEST_JSON))
                )
            model.load_weights(self._weights_file(before))
        if self._wrap is not None:
            wrap_in(model, self._wrap)
        return model

    def _train(self, run: Any, args: tuple[Any, ...], options: dict[str, Any]) -> float:
        """Train a trial from rank 0; the team's first rank sends the results."""
        order, objective = run.user_attrs, self.oracle.objective
        self.oracle.seed = run.seed
        self._fold = run.fold if self._folds.count > 1 else None
        trial = Trial(HyperParameters.from_config(order["hyperparameters"]), order["id"])
        self.oracle.trials[trial.trial_id] = trial
        try:
            self._ran_and_reported(trial, *args, **options)
            reports = _reports_of(trial, objective.name, type(self).__name__)
        except keras_tuner.errors.FatalError as error:
            error.add_note(FATAL)
            raise
        except keras_tuner.errors.FailedTrialError as error:
            error.add_note(NOT_AGAIN)
            raise
        if _first_of_block():
            found = {
                "reports": reports,
                "hyperparameters": json.loads(json.dumps(trial.hyperparameters.get_config())),
            }
            run.set_user_attr(RESULT, found)
        return 0.0

    # -- the directory and the oracle, owned by rank 0 ------------------------------------------------

    def pre_create_trial(self) -> None:
        """End a search without blocks if no time is left for another trial; else the coordinator does."""
        super().pre_create_trial()
        if self._alone and not self._time_left.suffices(time.time(), []):
            warn(f"no more trials begin: {self._time_left.told}")
            raise OutOfTimeError
        self._asked_s = time.time()

    def get_state(self) -> dict[str, Any]:
        """Return the state of this tuner to save in the directory."""
        return {**super().get_state(), "longest_s": self._time_left.longest_s}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume from the state saved in the directory."""
        super().set_state(state)
        self._time_left.took(state.get("longest_s", 0.0))

    def on_trial_end(self, trial: Any) -> None:
        """Report a trial's result to the oracle; a score that is not finite makes it invalid."""
        if trial.status == "COMPLETED":
            tracked = self.oracle.get_trial(trial.trial_id).metrics
            score = tracked.get_best_value(self.oracle.objective.name)
            if score is None or not math.isfinite(score):
                trial.status = "INVALID"
                trial.message = f"the objective {self.oracle.objective.name} is {score}"
            elif self._alone:
                self._time_left.took(time.time() - self._asked_s)
        super().on_trial_end(trial)

    def save(self) -> None:
        """Write the state of the search, on the rank that owns the directory."""
        if self.has_directory:
            self.oracle.save()
            _block_search.write(self.state_file, self.get_state())

    def reload(self) -> None:
        """Resume the search in the directory, on the rank that owns it."""
        if self.has_directory:
            _block_search.read(self)

    def results_summary(self, num_trials: int = 10) -> None:
        """Print the best trials, once."""
        if self.has_directory:
            super().results_summary(num_trials)

    def search_space_summary(self, extended: bool = False) -> None:
        """Print the search space, once."""
        if self.has_directory:
            super().search_space_summary(extended)


def _reports_of(trial: Any, objective: str, tuner: str) -> list[tuple[float, dict[str, float]]]:
    """Return what this rank's oracle was told of a trial: the step and the metrics of each report.

    Raises:
        FatalValueError: a subclass has reported no objective.
    """
    found: dict[tuple[float, int], dict[str, float]] = {}
    for name, history in trial.metrics.metrics.items():
        for observed in history.get_history():
            for again, value in enumerate(observed.value):
                found.setdefault((observed.step, again), {})[name] = value
    if not found:
        raise keras_tuner.errors.FatalValueError(
            f"{tuner} has trained trial {trial.trial_id} but reported no {objective}; call "
            "self.oracle.update_trial(trial.trial_id, metrics), or override run_trial instead, which returns "
            "the metrics"
        )
    return [(step, metrics) for (step, _), metrics in sorted(found.items(), key=lambda one: one[0])]


def _function(method: Any) -> Any:
    """Return the function behind a method."""
    return getattr(method, "__func__", method)


def _first_of_block() -> bool:
    """Whether this rank is the first of its block, or alone."""
    world = launched()
    return world is None or world.rank == 0


def _made(oracle: Any, given: dict[str, Any]) -> Any:
    """Return the oracle, or make one from a sampler and the arguments given for it."""
    if isinstance(oracle, keras_tuner.Oracle):
        if named := [name for name, value in given.items() if value is not None]:
            raise ConfigurationError(
                f"MPITuner({', '.join(named)}=...) with an oracle, which has its own; give them to "
                f"{type(oracle).__name__}(...)"
            )
        return oracle
    if isinstance(oracle, str | BaseSampler):
        return SamplerOracle(oracle, **given)
    raise ConfigurationError(
        f"oracle={oracle!r} is not an oracle: give one of keras_tuner.oracles, an Optuna sampler, or a "
        f"sampler's name: {quoted_samplers()}"
    )
