"""Checkpoint: saves a Keras training, and resumes it after an interruption."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

import nnlo_common
from nnlo_common import ConfigurationError, Layout
from nnlo_common.plugin import (
    CheckpointManager,
    DamagedError,
    Session,
    Vector,
    check_entries,
    check_place_in_data,
    check_weights,
    checked_count,
    is_out_of_memory,
    packed_tree,
    unpacked_tree,
    usable,
    warn,
    whole,
    whole_number,
)
from nnlo_keras._callbacks._rank_callback import Driver, RankCallback
from nnlo_keras._callbacks._report import Report
from nnlo_keras._compat import begin_with, callbacks_of_fit, schedule_of, synchronise
from nnlo_keras._model_optimizers import build_metrics, optimizers_of
from nnlo_keras._sequence_feed import SequenceFeed
from nnlo_keras._shard import described_data
from nnlo_keras._snapshot import (
    Decisions,
    assign,
    check_random,
    load_random,
    random_states,
    untrained,
    values_of,
)
from nnlo_keras._variable_layout import layout_of, memory_of
from nnlo_keras._wrapper import Wrapper, wrapper_of

__all__ = ["Checkpoint", "ModelState"]

# -- state of one rank's Keras model and optimizers for checkpoints, except the session's vector --------


class ModelState:
    """Variables of a model and its optimizers that a checkpoint saves.

    Args:
        model: the model.
        team: this rank's session; None in a process alone.
    """

    def __init__(self, model: Any, team: Session | None) -> None:
        self._model, self._team = model, team

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "variables": values_of(self._variables()),
            "optimizers": [values_of(self._of(one)) for one in self._optimizers()],
            "rates": [_rate(wrapper) for wrapper in self._wrappers()],
        }

    def load(self, state: Mapping[str, Any], *, seeds: bool = True, of_one_process: bool = False) -> None:
        """Load what `state` returned, except learning rates; see `load_rates`.

        Args:
            state: the state of this rank, or of another.
            seeds: also load integers, such as the states of seed generators.
            of_one_process: a process alone has saved it, so that it has the weights and whole optimizers.
        """
        variables = self._model.variables if of_one_process else self._variables()
        values = state["variables"] if seeds else _with_own_integers(variables, state["variables"])
        assign(variables, values, "the model's variables")
        for one, values in zip(self._optimizers(), state["optimizers"], strict=True):
            own = [*_inner(one), *_local(one)] if of_one_process else self._of(one)
            assign(own, _last(values, len(own)) if of_one_process else values, "the optimizer's variables")
        for wrapper, (_, set_rate) in zip(self._wrappers(), state["rates"], strict=True):
            wrapper.rate_set = set_rate

    def alone(self, center: Mapping[str, Any], worker: Mapping[str, Any], vector: Vector) -> dict[str, Any]:
        """Return the state of a process alone that continues a training of several ranks.

        Args:
            center: the state of the rank whose model is the centre.
            worker: that of the first worker.
            vector: the centre.
        """
        wrappers, optimizers = self._wrappers(), self._optimizers()
        trained = [one for wrapper in wrappers for one in wrapper.owned]
        segments = layout_of(trained).segments
        weights = {
            memory_of(one): vector[segment.place].reshape(segment.shape)
            for one, segment in zip(trained, segments, strict=True)
        }
        others = iter(center["variables"])
        variables = [
            weights[memory_of(one)] if memory_of(one) in weights else next(others)
            for one in self._model.variables
        ]
        server = center["team"]["part"].get("server")
        runs = "worker" if server is None else next(one.algorithm.optimizer_runs for one in wrappers)
        on_center = iter(server["rule"]["optimizer"]["keras"] if runs == "center" else [])
        states = []
        for one, saved in zip(optimizers, worker["optimizers"], strict=True):
            inner, local = _inner(one), _local(one)
            own = one.variables[: len(one.variables) - len(inner) - len(local)]
            if wrapper_of(one) is None or runs == "worker":
                values = _last(saved, len(inner))
            elif runs == "center":
                values = [next(on_center) for _ in inner]
            else:  # it steps nowhere, so that a worker has saved only its counts and rates
                counts = iter(_last(saved, sum(not variable.shape for variable in inner)))
                values = [
                    value if variable.shape else next(counts)
                    for variable, value in zip(inner, values_of(inner), strict=True)
                ]
            states.append([*values_of(own), *values, *values_of(local)])
        return {"variables": variables, "optimizers": states, "rates": worker["rates"]}

    def load_rates(self, state: Mapping[str, Any]) -> None:
        """Set the learning rates, on resuming in mid-epoch."""
        for wrapper, (rate, set_rate) in zip(self._wrappers(), state["rates"], strict=True):
            if rate is not None:
                wrapper.inner_optimizer.learning_rate = rate
            wrapper.rate_set = set_rate

    def facts(self) -> dict[str, Any]:
        """Return the facts that identify this training."""
        model, team = self._model, self._team
        wrapper = wrapper_of(model.optimizer) or next(iter(self._wrappers()), None)
        algorithm, optimizer = "none", model.optimizer
        if wrapper is not None:
            algorithm, optimizer = wrapper.describe(), wrapper.inner_optimizer
        return {
            "algorithm": algorithm,
            "optimizer": type(optimizer).__name__,
            "servers": 0 if team is None else team.member.servers,
            "workers": 0 if team is None else team.share[1],
            **({} if team is None or team.member.group_size == 1 else {"group_size": team.member.group_size}),
            "model": _numbered(
                layout_of(model.trainable_variables) if team is None else team.model.parameters.layout
            ),
        }

    def synchronise(self) -> None:
        """On JAX copy the state that `fit` holds during an epoch back into the variables."""
        synchronise(self._model)

    def _optimizers(self) -> list[Any]:
        found = list(optimizers_of(self._model).values())
        if not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)
        return found

    def _wrappers(self) -> list[Wrapper]:
        found = map(wrapper_of, optimizers_of(self._model).values())
        return [wrapper for wrapper in found if wrapper is not None]

    def _variables(self) -> list[Any]:
        """Return all variables that are not in the session's vector."""
        owned = [one for wrapper in self._wrappers() for one in wrapper.owned]
        return untrained(self._model, owned if self._team is not None else [])

    def _of(self, optimizer: Any) -> list[Any]:
        """Return an optimizer's variables; only counts and rates if it does not step on this rank."""
        wrapper = wrapper_of(optimizer)
        steps = self._team is None or wrapper is None or wrapper.steps_workers
        # In a group the wrapper itself has a sum, which every batch begins anew.
        grouped = wrapper is not None and wrapper.ranks.grouped
        variables = wrapper.inner_optimizer.variables if wrapper and grouped else optimizer.variables
        return [one for one in variables if steps or not one.shape]


def _inner(optimizer: Any) -> list[Any]:
    """Return the variables of the user's optimizer; a wrapper's own come before them."""
    wrapper = wrapper_of(optimizer)
    variables: list[Any] = optimizer.variables if wrapper is None else wrapper.inner_optimizer.variables
    return variables


def _local(optimizer: Any) -> list[Any]:
    """Return the variables of a local optimizer; they come last."""
    wrapper = wrapper_of(optimizer)
    return [] if wrapper is None or wrapper.local_optimizer is None else wrapper.local_optimizer.variables


def _last(values: Sequence[Any], count: int) -> Sequence[Any]:
    return values[len(values) - count :]


def _with_own_integers(variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    if len(variables) != len(values):
        return list(values)  # `assign` refuses them
    pairs = zip(variables, values_of(variables), values, strict=True)
    return [value if "float" in variable.dtype else own for variable, own, value in pairs]


def _numbered(layout: Layout) -> str:
    """Return the shapes and types of weights without names: Keras names each copy of a model differently."""
    segments = [
        replace(one, name=f"number {place}", tied_to=None) for place, one in enumerate(layout.segments)
    ]
    return replace(layout, segments=tuple(segments)).to_json()


def _rate(wrapper: Wrapper) -> list[float | None]:
    """Return an optimizer's learning rate, None for a schedule's, and the rate that a callback has set."""
    inner = wrapper.inner_optimizer
    scheduled = schedule_of(inner) is not None
    return [None if scheduled else float(keras.ops.convert_to_numpy(inner.learning_rate)), wrapper.rate_set]


# -- checkpoint: saves a Keras training, and resumes it after an interruption ---------------------------

_ENTRIES = (
    "team",
    "variables",
    "optimizers",
    "rates",
    "metrics",
    "random",
    "callbacks",
    "distribute",
    "data",
    "position",
)


class Checkpoint(RankCallback):
    """Saves the training; rerun the same command to resume from the newest checkpoint.

    A checkpoint holds everything that each rank needs to resume exactly: the centre and its optimizer, each
    worker's weights, optimizer and counts, statistics and seeds, random states, the position of an
    `Batches`, the history, and the state of EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and
    SwapEMAWeights. It also saves what the `state_dict()` of your own callback returns, for its
    `load_state_dict()`. It is written whole or not at all; a damaged one is reported, and the previous one is
    used. With one process, one worker, or `Synchronous`, an interrupted training ends with the same bits as
    an uninterrupted one.

    All ranks must see the folder. It also contains `model.keras`, an ordinary Keras file of the centre at the
    newest saved whole epoch. A training that is complete returns at once. The folder gets the facts of the
    training, too, for `nnlo report FOLDER`, if there is no `Report` among the callbacks.

    On SIGTERM or SIGUSR1 all ranks save together at a batch boundary and exit with status 75; rerun the same
    command to resume. If `fit` trains on anything but `Batches`, the data's position is unknown, and
    they save at the end of the epoch instead.

    Args:
        folder: the run's folder; created if missing.
        every: epochs between two checkpoints; the last epoch is always saved.
        minutes: minutes between two checkpoints; 0: not by time.
        keep: number of newest checkpoints to keep.
        report: write down the facts of the training, unless there is a `Report`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> x = np.ones((4, 1))
        >>> def train(folder, epochs):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model.fit(x, x, epochs=epochs, callbacks=[Checkpoint(folder)], verbose=0)
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     first, second = train(folder, 2), train(folder, 3)
        nnlo: resumes from ...checkpoint-000002, after 2 of 3 epochs
        >>> second.epoch, second.history["loss"][:2] == first.history["loss"]
        ([0, 1, 2], True)
    """

    meets = True

    def __init__(
        self, folder: str | Path, every: int = 1, *, minutes: float = 0, keep: int = 3, report: bool = True
    ) -> None:
        super().__init__()
        self.folder, self.every = Path(folder), whole_number("every", every, 1)
        self.minutes, self.keep, self.report = minutes, whole_number("keep", keep, 1), report
        self._container: Any = None
        # Whether a training with this history would stop now: `nnlo train` lets its rules change on resuming.
        self.still_ends: Callable[[Mapping[str, Any]], object] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpoint:
        return type(self)(self.folder, self.every, minutes=self.minutes, keep=self.keep, report=self.report)

    # -- beginning ------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Move to the front of the list: an epoch is saved before another callback begins the next."""
        super().set_model(model)
        container = self._container = callbacks_of_fit()
        if container is not None:
            others = [one for one in container.callbacks if one is not self]
            if self.report and not any(isinstance(one, Report) for one in others):
                others.append(self._new_report(model))
            container.callbacks = [self, *others]
            Decisions(container)
            if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in container.callbacks):
                raise ConfigurationError(
                    "BackupAndRestore was given together with nnlo_keras.Checkpoint, but each would resume "
                    "from its own checkpoint; leave BackupAndRestore out"
                )

    def _new_report(self, model: Any) -> Report:
        report = Report(self.folder)
        report.set_params(self.params)
        report.set_model(model)
        return report

    def before_start(self, role: str) -> None:
        """Check that the folder is writable."""
        super().before_start(role)
        if self.has_center:
            usable(f"Checkpoint({str(self.folder)!r})", self._model_file)

    def before_part(self, distribute: Driver) -> None:
        """Resume from this rank's part of the newest checkpoint."""
        self.distribute, self.team = distribute, distribute.team
        self._resume()

    def after_start(self, distribute: Driver | None) -> None:
        """In a process alone: resume from the newest checkpoint."""
        super().after_start(distribute)
        if self.team is None:
            self._resume()

    def _resume(self) -> None:
        distribute = self.distribute if self.team else None
        self._feed = SequenceFeed.of_fit() if distribute is None else distribute.feed
        self._epoch = self._batch = self._before = 0  # finished epochs; batches of this one, and before
        self._inside = self._begun = self._over = False
        self._saved: Mapping[str, Any] | None = None  # loaded state, applied once all callbacks have begun
        self._model_state = ModelState(self.model, self.team)
        self._data = described_data() if self._feed is None else self._feed.described()
        self._manager = CheckpointManager(
            self.folder,
            self.team,
            self,
            suffix="npz",
            keep=self.keep,
            minutes=self.minutes,
        )
        facts = self._manager.resume()
        if facts is not None:
            stopped = bool(facts["stopped"]) and (self.params.get("epochs") or 0) <= facts["stopped"]
            self._epoch = self.params["epochs"] if stopped and self._still_ends() else facts["epoch"]
        self._manager.say_resumed(self._epoch, self.params.get("epochs") or 0)
        # `fit` begins its count of epochs with this one.
        begin_with(self.model, self._epoch)
        interrupts = self._manager.interrupts
        interrupts.__enter__()
        if self._container is not None:  # a failing fit calls no callback
            weakref.finalize(self._container, interrupts.__exit__, None, None, None)

    def _still_ends(self) -> bool:
        """Return whether a training that was stopped has no epochs left to do."""
        if self.still_ends is None or self._saved is None:
            return True
        return self.follows_center and bool(self.still_ends(self._saved["callbacks"]["history"]))

    # -- what fit calls -------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Save the previous epochs, if a checkpoint is due."""
        saved, first = self._saved, not self._begun
        if first:
            self._restore_callbacks()
        self._epoch, self._inside, self._batch, self._before = epoch, False, 0, 0
        if not first and epoch % self.every == 0:
            self._save_whole()
        elif self.trains:
            self._manager.look_around(possible=self._has_position)
        inside = first and saved is not None and saved["position"]["inside"]
        if self._feed is not None:
            self._feed.resume_epoch(saved["data"] if inside and saved is not None else None)
        if inside and saved is not None:
            self._before = saved["position"]["batch"]
        elif first:
            self._saved = None
        self._inside = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Save, if a checkpoint is due and the data's position is known."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self._resume_inside_epoch(saved)
        elif self.trains:
            self._manager.look_around(possible=self._has_position)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count the batch."""
        self._batch = batch + 1

    def after_serving(self) -> None:
        """Exit, if the workers ended the epoch for that."""
        self._manager.leave_if_told()

    def begin_to_serve(self) -> None:
        """Count no batch of this epoch: a server has none."""
        self._batch = self._before = 0

    def before_empty_epoch(self, epoch: int) -> None:
        """Pause together with the ranks that still train."""
        if epoch % self.every == 0:
            self._inside, self._epoch = False, max(self._epoch, epoch) if self.trains else self._epoch
            if self.team is not None and self.team.serves:
                self.team.pause(between=True)  # without saving: this server's training has already ended
            else:
                self._manager.save()
            self._manager.leave_if_told()

    def after_epochs(self) -> None:
        """Save the end of the training, for whatever reason it ended."""
        if self._begun:
            self._over, self._inside = True, False
            together = self.team is not None and not self.team.member.servers  # all stop after the same epoch
            self._epoch += together or self.follows_center or not self.model.stop_training
            self._save_whole(last=True)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Save the end in a process alone; reset the first epoch for another `fit`."""
        if not self._begun:
            self._restore_callbacks()
            self._begun = False
        if self.team is None:
            self.after_epochs()
            self._manager.finish()
        begin_with(self.model, None)
        self._manager.interrupts.__exit__(None, None, None)

    # -- saving ---------------------------------------------------------------------------------------

    _pack, _unpack = staticmethod(packed_tree), staticmethod(unpacked_tree)

    @property
    def _has_position(self) -> bool:
        """Whether the position in the data is known."""
        return not self._inside or (self._feed is not None and self._feed.has_position)

    @property
    def _model_file(self) -> Path:
        return self.folder / "model.keras"

    def _save_whole(self, *, last: bool = False) -> None:
        """Save all finished epochs, together with all ranks."""
        self._manager.save(last=last)
        if self.has_center:
            self._save_model()
        self._manager.leave_if_told()

    def _save_model(self) -> None:
        """Write the centre as a Keras file; restore the random states, as Keras draws numbers for it."""
        states = random_states()
        try:
            with whole(self._model_file) as fresh:
                self.model.save(fresh)
        except Exception as error:
            if not isinstance(error, OSError) and not is_out_of_memory(error):
                raise
            problem = error or type(error).__name__
            warn(f"{self._model_file} could not be written: {problem}; the training continues")
        load_random(states)

    def _leave(self) -> None:
        if self.distribute is not None:
            self.distribute.leave()

    def _collect(self) -> dict[str, Any]:
        self._model_state.synchronise()
        distribute, team = self.distribute, self.team
        if self._over and distribute is not None:
            distribute.settle()
        feed, taken = self._feed, self._before + self._batch
        if self._inside:
            build_metrics(self.model)  # a server trains on no batch, which would build them on TensorFlow
        return {
            "team": None if team is None else team.state(),
            **self._model_state.state(),
            "metrics": values_of(self.model.metrics_variables) if self._inside else [],
            "random": random_states(),
            "callbacks": Decisions(self._container).state(),
            "distribute": None if distribute is None else distribute.state(),
            "data": None if feed is None else feed.state(taken if self._inside else None, team),
            "position": {"batch": taken, "inside": self._inside},
        }

    def _facts(self) -> dict[str, Any]:
        total = self.params.get("epochs") or 0
        return {
            **self._model_state.facts(),
            "data": self._data,
            "epoch": self._epoch,
            "batch": self._before + self._batch if self._inside else 0,
            "stopped": total if self._over and self.model.stop_training else 0,
            "versions": {"nnlo": nnlo_common.__version__, "keras": keras.__version__},
        }

    # -- resuming -------------------------------------------------------------------------------------

    def _alone(
        self, center: Mapping[str, Any], worker: Mapping[str, Any], *, vector: Vector
    ) -> dict[str, Any]:
        """Return the state that a process alone loads from a training of several ranks."""
        for tree in (center, worker):
            check_entries(tree, _ENTRIES)
        return {**center, **self._model_state.alone(center, worker, vector)}

    def _load(self, tree: Mapping[str, Any], facts: Mapping[str, Any], *, anew: bool) -> None:
        """Load the state; `anew`: restart the epoch, with another worker's except its weights."""
        self._check(tree, facts, anew=anew)
        Decisions(self._container).check(tree["callbacks"])
        self._model_state.synchronise()
        moved = self.team is not None and tree["team"] is None  # saved by one process
        self._model_state.load(tree, seeds=not (anew and self.trains), of_one_process=moved)
        self._manager.load_team(tree, facts, anew=anew)
        self._saved = tree
        if anew:
            self._saved = {**tree, "position": {"batch": 0, "inside": False}, "random": random_states()}
        elif self._feed is not None and tree["data"] is not None:
            self._feed.load(tree["data"], self.team)

    def _check(self, tree: Mapping[str, Any], facts: Mapping[str, Any], *, anew: bool) -> None:
        """Refuse a state that no training can have, before any of it is loaded."""
        check_entries(tree, _ENTRIES)
        check_entries(tree["position"], ("batch", "inside"))
        check_entries(tree["callbacks"], ("epochs", "history", "seen", "own"))
        checked_count("the last epoch in its facts", facts.get("stopped"))
        check_weights("its weights", tree["variables"])
        batch, inside = checked_count("its batch", tree["position"]["batch"]), tree["position"]["inside"]
        if not isinstance(inside, bool):
            raise DamagedError(f"its position is {tree['position']!r:.100}")
        if self.team is None and not anew and facts.get("batch") != (batch if inside else 0):
            raise DamagedError(f"its position is batch {batch}, but the manifest's is another")
        if tree["data"] is not None:
            check_place_in_data(tree["data"])
        if tree["distribute"] is not None:
            check_entries(tree["distribute"], ("in_epoch", "weight", "gradient"))
            checked_count("a count of its epoch", tree["distribute"]["in_epoch"])
        if not anew:
            check_random(tree["random"])

    def _restore_callbacks(self) -> None:
        """Restore callbacks and random states; call it after all callbacks have begun."""
        self._begun = True
        if self._saved is not None:
            Decisions(self._container).load(self._saved["callbacks"], self._epoch)
            load_random(self._saved["random"])

    def _resume_inside_epoch(self, saved: Mapping[str, Any]) -> None:
        """Restore the state in mid-epoch, which the beginning of the epoch has reset."""
        self._model_state.synchronise()
        build_metrics(self.model)
        assign(self.model.metrics_variables, saved["metrics"], "the metrics")
        for one in self._container.callbacks:
            if isinstance(one, Report):
                one.resume_epoch()
        self._model_state.load_rates(saved)
        if self.distribute is not None and saved["distribute"] is not None:
            self.distribute.load(saved["distribute"])
        load_random(saved["random"])
