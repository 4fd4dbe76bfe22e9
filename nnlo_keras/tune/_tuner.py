"""A tuner of keras-tuner whose trials train on blocks of ranks.

    python          BaseTuner.search: trial after trial, here
    rank 0          the oracle and the directory; hands out trials, and trains none
    other ranks     train what rank 0 hands out: run_trial, on every rank of a block

Keras-tuner's own classes do the rest; nothing of its gRPC service is used.
"""

from __future__ import annotations

import datetime
import json
import math
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import keras
import keras_tuner
from keras_tuner.engine.hyperparameters import HyperParameters
from keras_tuner.engine.trial import Trial
from optuna.samplers import BaseSampler

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    DivisibleWorld,
    Interrupts,
    TimeLeft,
    end_of,
    hold,
    launched,
    quoted_samplers,
    seed_of,
    warn,
    whole_number,
)
from nnlo_keras.tune import _directory
from nnlo_keras.tune._block_search import search_over
from nnlo_keras.tune._compat import (
    HookedTuner,
    best_epoch_saver,
    best_step,
    hook_callback,
    metrics_of,
    validate_results,
)
from nnlo_keras.tune._data import Folds, held_out
from nnlo_keras.tune._early_end import EarlyEnd, OutOfTimeError
from nnlo_keras.tune._joint_fit import fit_together
from nnlo_keras.tune._oracle import SamplerOracle
from nnlo_keras.tune._oracle_trials import FATAL, NOT_AGAIN, RESULT, averaged
from nnlo_keras.tune._wrapping import Wrap, wrap_in, wrapping

__all__ = ["MPITuner"]

_HOOKS = ("on_batch_begin", "on_batch_end", "on_epoch_begin", "on_epoch_end")


class MPITuner(HookedTuner):
    """A tuner of keras-tuner over blocks of ranks; with `python` it is an ordinary one.

    The same script runs on every rank. With `mpiexec -n 7` and `block_size=3` the first rank has the oracle
    and the directory, and two blocks of three ranks train a trial each: what `search` is given is dealt out
    to a block's workers, `Distribute()` is added to the callbacks where it is missing, and the history that
    `fit` returns is that of the block's first rank, its server, on all of its ranks. After `search` all ranks
    have all results.

    Args:
        hypermodel: a function that builds a model, or a `HyperModel`.
        oracle: one of `keras_tuner.oracles`, or a sampler as in `nnlo_keras.optimize`: "bayesian",
            "evolutionary", "random", "grid", "qmc", "tpe", "gp", "cmaes", "nsgaii" or any of Optuna's.
        objective: what a sampler is to better, as for any oracle; one of keras-tuner has its own.
        max_trials: how many trials a sampler has.
        seed: of a sampler.
        block_size: how many ranks train one trial.
        folds: into how many folds the samples are split, or for each fold the indices of its training and of
            its validation samples, as scikit-learn's splitters give them. They train side by side where their
            number divides the block, else one after another; a trial's score is their mean.
        distribute: wraps the optimizer of every model that is built: "downpour", "easgd", ... or e.g.
            `lambda optimizer: nk.EASGD(optimizer, every=5)`. None: the model has a wrapped one.
        shard: deal out what `search` is given; False: the HyperModel's `fit` does it.
        lockstep: whether the search is to repeat with as many blocks, whatever their pace: the oracle hears
            of trials in the order in which it has chosen them. It takes a seed.
        until: when a search is to be over: seconds from its beginning, a time, or "slurm" for the end of its
            job. No trial is begun that would take longer, as far as the trials so far can tell.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: what any tuner takes: `directory`, `project_name`, `overwrite`, `executions_per_trial`, ...

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
        folds: int | Sequence[tuple[Any, Any]] = 1,
        distribute: str | Wrap | None = None,
        shard: bool = True,
        lockstep: bool = False,
        until: float | str | datetime.datetime | None = None,
        world: DivisibleWorld | None = None,
        **options: Any,
    ) -> None:
        whole_number("block_size", block_size, 1)
        if isinstance(folds, int):
            whole_number("folds", folds, 1)
        if lockstep and seed is None and not isinstance(oracle, keras_tuner.Oracle):
            raise ConfigurationError("MPITuner(lockstep=True) without seed=, so that nothing would repeat")
        oracle = _made(oracle, objective=objective, max_trials=max_trials, seed=seed)
        self._lockstep, self._until, self._time_left = lockstep, until, TimeLeft(end_of(until, time.time()))
        self._world = world
        self.has_directory = (ranks := world or launched()) is None or ranks.rank == 0
        self._alone = ranks is None or ranks.size == 1
        self._interrupts = Interrupts()
        self._block_size, self._folds, self._shard = block_size, Folds(folds), shard
        self._distribute, self._wrap = distribute, wrapping(distribute)
        self._fold: int | None = None  # the one that this rank trains; None: all, one after another
        (_directory.keep_whole if self.has_directory else _directory.keep_nothing)(oracle)
        if not self.has_directory:
            options["overwrite"] = False  # the directory is another rank's to empty
        super().__init__(oracle, hypermodel, **options)

    def search(self, *args: Any, **options: Any) -> None:
        """Search for the best hyper-parameters; what is given goes to `fit` (collective).

        Where there are several ranks, `fit` shows no progress: trials would mix. Keras-tuner's table is
        printed once.

        Raises:
            ConfigurationError: the ranks cannot be cut into blocks, do not agree on what is asked, or another
                job has the directory.
            SystemExit: with status 75, after SIGTERM or SIGUSR1; the same command goes on.
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
            time_left=self._time_left,
            train=lambda run: self._train(run, args, options),
        )
        if self.has_directory:
            self.on_search_end()

    def claim(self) -> None:
        """Keep other jobs out of the directory, and begin it.

        Raises:
            ConfigurationError: another job has it.
        """
        hold(Path(self.project_dir), "searching")
        self.save()  # or a job that is killed before its first trial has ended begins anew

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
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
            "until": str(self._until),
        }

    # -- a trial, on any rank -------------------------------------------------------------------------

    def run_trial(self, trial: Any, *args: Any, **options: Any) -> Any:
        """Train a trial, or the fold of it that is this rank's, as often as it is to be executed."""
        values = trial.hyperparameters.values
        if "tuner/epochs" in values:  # Hyperband's
            options |= {name: values[f"tuner/{name}"] for name in ("epochs", "initial_epoch")}
        objective, file = self.oracle.objective, self._weights_file(trial.trial_id)
        saves = best_epoch_saver(objective, file) if self._keeps_files() else None
        folds: Sequence[int | None] = [None] if self._folds.count == 1 else range(self._folds.count)
        folds = folds if self._fold is None else [self._fold]
        results = [self._executed(trial, fold, saves, args, options) for fold in folds]
        if self._folds.count == 1 or self._fold is not None:
            return results[0]
        found = [metrics_of(result, objective) for result in results]
        return averaged(found, objective.name)

    def _keeps_files(self) -> bool:
        """Whether this rank writes the trial's files: of folds side by side only the first does."""
        return _first_of_block() and not self._fold

    def _executed(
        self, trial: Any, fold: int | None, checkpoint: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> list[Any]:
        seed = int(self.oracle.seed)
        args, options = held_out(args, options, self._folds, fold, seed)
        original = options.pop("callbacks", None) or []
        results = []
        for execution in range(self.executions_per_trial):
            number = zlib.crc32(f"{trial.trial_id} {fold} {execution}".encode())
            keras.utils.set_random_seed(seed_of(seed, number))
            callbacks = self._copied_callbacks(list(original))
            if any(isinstance(one, keras.callbacks.TensorBoard) for one in callbacks):
                self._set_tensorboard_folder(callbacks, trial, execution)  # it imports tensorboard
            if any(getattr(type(self), hook) is not getattr(keras_tuner.Tuner, hook) for hook in _HOOKS):
                callbacks.append(hook_callback(self, trial))
            callbacks += [] if checkpoint is None else [checkpoint]
            # A block's ranks leave together, when the coordinator says so.
            callbacks += [EarlyEnd(self._interrupts, self._time_left)] if self._alone else []
            results.append(self._build_and_fit(trial, *args, **{**options, "callbacks": callbacks}))
        return results

    def _build_and_fit(self, trial: Any, *args: Any, **options: Any) -> Any:
        hp, world = trial.hyperparameters, launched()
        model = self._built_model(hp)
        if world is not None:
            args, options = fit_together(
                model, world, args, options, block_size=self._block_size, shard=self._shard
            )
        results = self.hypermodel.fit(hp, model, *args, **options)
        if self._keeps_files():
            _directory.write(self._build_config_file(trial.trial_id), model.get_build_config())
        validate_results(results, self.oracle.objective, "HyperModel.fit()")
        return results

    def _finished_model(self, hp: Any, model: Any) -> Any:
        """Go on from a checkpoint, as Hyperband's later rounds do, and wrap the optimizer."""
        if "tuner/trial_id" in hp.values:  # Hyperband goes on with a trial of the round before
            before = hp.values["tuner/trial_id"]
            if not model.built:
                model.build_from_config(json.loads(Path(self._build_config_file(before)).read_text()))
            model.load_weights(self._weights_file(before))
        if self._wrap is not None:
            wrap_in(model, self._wrap)
        return model

    def _train(self, run: Any, args: tuple[Any, ...], options: dict[str, Any]) -> float:
        """Train what rank 0 has handed out; the first rank of a team tells it what was found."""
        order, objective = run.user_attrs, self.oracle.objective
        self.oracle.seed = run.seed
        self._fold = run.fold if self._folds.count > 1 else None
        trial = Trial(HyperParameters.from_config(order["hyperparameters"]), order["id"])
        self.oracle.trials[trial.trial_id] = trial
        try:
            results = self.run_trial(trial, *args, **options)
            validate_results(results, objective, "Tuner.run_trial()")
        except keras_tuner.errors.FatalError as error:
            error.add_note(FATAL)
            raise
        except keras_tuner.errors.FailedTrialError as error:
            error.add_note(NOT_AGAIN)
            raise
        if _first_of_block():
            found = {
                "metrics": metrics_of(results, objective),
                "step": best_step(results, objective),
                "hyperparameters": json.loads(json.dumps(trial.hyperparameters.get_config())),
            }
            run.set_user_attr(RESULT, found)
        return 0.0

    # -- the directory and the oracle, which are rank 0's ---------------------------------------------

    def pre_create_trial(self) -> None:
        """End a search without blocks when there is no time for another trial; blocks are asked elsewhere."""
        super().pre_create_trial()
        if self._alone and not self._time_left.suffices(time.time(), []):
            warn(f"no more trials are begun: {self._time_left.told}")
            raise OutOfTimeError
        self._asked_s = time.time()

    def get_state(self) -> dict[str, Any]:
        """Return what the directory keeps of this tuner."""
        return {**super().get_state(), "longest_s": self._time_left.longest_s}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on with what the directory has kept."""
        super().set_state(state)
        self._time_left.took(state.get("longest_s", 0.0))

    def on_trial_end(self, trial: Any) -> None:
        """Tell the oracle what has become of a trial; a score that is not finite is none."""
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
        """Write the state of the search, on the rank that has the directory."""
        if self.has_directory:
            self.oracle.save()
            _directory.write(self.state_file, self.get_state())

    def reload(self) -> None:
        """Go on with the search that is in the directory, on the rank that has it."""
        if self.has_directory:
            _directory.read(self)

    def results_summary(self, num_trials: int = 10) -> None:
        """Print the best trials, once."""
        if self.has_directory:
            super().results_summary(num_trials)

    def search_space_summary(self, extended: bool = False) -> None:
        """Print the search space, once."""
        if self.has_directory:
            super().search_space_summary(extended)


def _first_of_block() -> bool:
    """Whether this rank speaks for those that it trains with."""
    world = launched()
    return world is None or world.rank == 0


def _made(oracle: Any, *, objective: Any, max_trials: int | None, seed: int | None) -> Any:
    """Return the oracle that was asked for."""
    given = {"objective": objective, "max_trials": max_trials, "seed": seed}
    if isinstance(oracle, keras_tuner.Oracle):
        if named := [name for name, value in given.items() if value is not None]:
            raise ConfigurationError(
                f"MPITuner({', '.join(named)}=...) with an oracle that has its own; give them to "
                f"{type(oracle).__name__}(...)"
            )
        return oracle
    if isinstance(oracle, str | BaseSampler):
        return SamplerOracle(oracle, **given)
    raise ConfigurationError(
        f"oracle={oracle!r} is no oracle: give one of keras_tuner.oracles, a sampler of Optuna, or the name "
        f"of one: {quoted_samplers()}"
    )
