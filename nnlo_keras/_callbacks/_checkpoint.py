"""A training that can be interrupted and started again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

import nnlo_common
from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    CheckpointManager,
    packed_tree,
    unpacked_tree,
    usable,
    warn,
    whole,
    whole_number,
)
from nnlo_keras._building import build_metrics
from nnlo_keras._callbacks._driver import Driver
from nnlo_keras._callbacks._model_state import ModelState
from nnlo_keras._callbacks._rank_callback import RankCallback
from nnlo_keras._compat import begin_with, callbacks_of_fit
from nnlo_keras._sequence_feed import SequenceFeed
from nnlo_keras._snapshot import Decisions, assign, load_random, random_states, values_of

__all__ = ["Checkpoint"]


class Checkpoint(RankCallback):
    """Saves the training, and goes on where it was when the same command is started again.

    A checkpoint holds what every rank needs to go on exactly: the centre and its optimizer, each worker's
    weights, optimizer and counts, statistics and seeds, the states of random numbers, the position of an
    `H5Sequence`, the history, and what EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and SwapEMAWeights
    have seen; also what the `state_dict()` of a callback of yours returns, for its `load_state_dict()`. It is
    written whole or not at all; one that is damaged is told of, and the one before is used. With one
    process, one worker, or `Synchronous`, a training that was interrupted has the bits of one that was not.

    All ranks have to see the folder. Beside the checkpoints lies `model.keras`, an ordinary Keras file of the
    centre as it was when the newest whole epoch was saved. A training that is complete returns at once.

    On SIGTERM or SIGUSR1 all ranks save together at a batch boundary and leave with exit status 75; the same
    command goes on. Where `fit` trains on anything but an `H5Sequence`, whose position nobody knows, they do
    so at the end of the epoch.

    Args:
        folder: of the run; made if it is not there.
        every: epochs between two; the last is saved in any case.
        minutes: minutes between two; 0: not by time.
        keep: how many of the last to keep.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> x = np.ones((4, 1))
        >>> def train(folder, epochs):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model.fit(x, x, epochs=epochs, callbacks=[Checkpoint(folder)], verbose=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first, second = train(folder, 2), train(folder, 3)
        >>> second.epoch, second.history["loss"][:2] == first.history["loss"]
        ([0, 1, 2], True)
    """

    meets = True

    def __init__(self, folder: str | Path, every: int = 1, *, minutes: float = 0, keep: int = 3) -> None:
        super().__init__()
        self.folder, self.every = Path(folder), whole_number("every", every, 1)
        self.minutes, self.keep = minutes, whole_number("keep", keep, 1)
        self._container: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpoint:
        return type(self)(self.folder, self.every, minutes=self.minutes, keep=self.keep)

    # -- beginning ------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Be the first in the list: an epoch is saved before another callback begins the next."""
        super().set_model(model)
        container = self._container = callbacks_of_fit()
        if container is not None:
            container.callbacks = [self, *(one for one in container.callbacks if one is not self)]
            Decisions(container)
            if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in container.callbacks):
                raise ConfigurationError(
                    "BackupAndRestore was given together with nnlo_keras.Checkpoint, and each would go on "
                    "from what it has saved itself; leave BackupAndRestore out"
                )

    def before_start(self, role: str) -> None:
        """See whether there can be checkpoints."""
        super().before_start(role)
        if self.has_center:
            usable(f"Checkpoint({str(self.folder)!r})", self._model_file)

    def before_part(self, distribute: Driver) -> None:
        """Go on from the newest checkpoint, with what this rank has in it."""
        self.distribute, self.team = distribute, distribute.team
        self._resume()

    def after_start(self, distribute: Driver | None) -> None:
        """Alone: go on from the newest checkpoint."""
        super().after_start(distribute)
        if self.team is None:
            self._resume()

    def _resume(self) -> None:
        distribute = self.distribute if self.team else None
        self._feed = SequenceFeed.of_fit() if distribute is None else distribute.feed
        self._epoch = self._batch = self._before = 0  # epochs ended; batches of this one, and of it before
        self._inside = self._begun = self._over = False
        self._saved: Mapping[str, Any] | None = None  # what is to be gone on from when all have begun
        self._held = ModelState(self.model, self.team)
        self._manager = CheckpointManager(
            self.folder,
            self.team,
            keep=self.keep,
            better="min",
            suffix="npz",
            collect=self._collect,
            pack=packed_tree,
            facts=self._facts,
            leave=self._leave,
            minutes=self.minutes,
        )
        facts = self._manager.resume(self._load, self._load_anew)
        if facts is not None:
            stopped = bool(facts["stopped"]) and (self.params.get("epochs") or 0) <= facts["stopped"]
            self._epoch = self.params["epochs"] if stopped else facts["epoch"]
        # What fit looks at when it begins to count epochs.
        begin_with(self.model, self._epoch)
        interrupts = self._manager.interrupts
        interrupts.__enter__()
        if self._container is not None:  # a fit that fails does not say so
            weakref.finalize(self._container, interrupts.__exit__, None, None, None)

    # -- what fit calls -------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Save the epochs before, if it is time to."""
        saved, first = self._saved, not self._begun
        if first:
            self._go_on()
        self._epoch, self._inside, self._batch, self._before = epoch, False, 0, 0
        if not first and epoch % self.every == 0:
            self._save_whole()
        elif self.trains:
            self._manager.look_around(possible=self._has_position)
        inside = first and saved is not None and saved["position"]["inside"]
        if self._feed is not None:
            self._feed.go_on(saved["data"] if inside and saved is not None else None)
        if inside and saved is not None:
            self._before = saved["position"]["batch"]
        elif first:
            self._saved = None
        self._inside = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Save, if that was asked for and the data has a position."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self._go_on_inside(saved)
        elif self.trains:
            self._manager.look_around(possible=self._has_position)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count the batch."""
        self._batch = batch + 1

    def after_serving(self) -> None:
        """Leave, if that is why the workers have ended the epoch."""
        self._manager.leave_if_told()

    def before_empty_epoch(self, epoch: int) -> None:
        """Pause with those who still train."""
        if epoch % self.every == 0:
            self._inside, self._epoch = False, max(self._epoch, epoch) if self.trains else self._epoch
            if self.team is not None and self.team.serves:
                self.team.pause()  # what the centre is by now does not count
            else:
                self._manager.save()
            self._manager.leave_if_told()

    def after_epochs(self) -> None:
        """Save the end, whatever it was that ended it."""
        if self._begun:
            self._over, self._inside = True, False
            self._epoch += self.has_center or not self.model.stop_training
            self._save_whole(last=True)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Alone: save the end. Let another fit count for itself."""
        if not self._begun:
            self._go_on()
            self._begun = False
        if self.team is None:
            self.after_epochs()
            self._manager.finish()
        begin_with(self.model, None)
        self._manager.interrupts.__exit__(None, None, None)

    # -- saving ---------------------------------------------------------------------------------------

    @property
    def _has_position(self) -> bool:
        """Whether somebody knows where the data are."""
        return not self._inside or (self._feed is not None and self._feed.has_position)

    @property
    def _model_file(self) -> Path:
        return self.folder / "model.keras"

    def _save_whole(self, *, last: bool = False) -> None:
        """Save all epochs before, with all ranks."""
        self._manager.save(last=last)
        if self.has_center:
            self._save_model()
        self._manager.leave_if_told()

    def _save_model(self) -> None:
        """Write the centre as a Keras file, for which Keras draws random numbers that are not ours."""
        states = random_states()
        try:
            with whole(self._model_file) as fresh:
                self.model.save(fresh)
        except OSError as error:
            warn(f"{self._model_file} could not be written: {error}")
        load_random(states)

    def _leave(self) -> None:
        if self.distribute is not None:
            self.distribute.leave()

    def _collect(self) -> dict[str, Any]:
        self._held.synchronise()
        distribute, team = self.distribute, self.team
        if self._over and distribute is not None:
            distribute.settle()
        feed, taken = self._feed, self._before + self._batch
        return {
            "team": None if team is None else team.state(),
            **self._held.state(),
            "metrics": values_of(self.model.metrics_variables) if self._inside else [],
            "random": random_states(),
            "callbacks": Decisions(self._container).state(),
            "distribute": None if distribute is None else distribute.state(),
            "data": None if feed is None else feed.state(taken if self._inside else 0, team),
            "position": {"batch": taken, "inside": self._inside},
        }

    def _facts(self) -> dict[str, Any]:
        total = self.params.get("epochs") or 0
        return {
            **self._held.facts(),
            "epoch": self._epoch,
            "batch": self._before + self._batch if self._inside else 0,
            "stopped": total if self._over and self.model.stop_training else 0,
            "versions": {"nnlo": nnlo_common.__version__, "keras": keras.__version__},
        }

    # -- going on -------------------------------------------------------------------------------------

    def _load(self, data: bytes) -> None:
        tree = self._saved = unpacked_tree(data)
        Decisions(self._container).check(tree["callbacks"])
        self._held.synchronise()
        self._held.load(tree)
        if self.team is not None:
            self.team.load(tree["team"])
        if self._feed is not None and tree["data"] is not None:
            self._feed.load(tree["data"], self.team)

    def _load_anew(self, data: bytes, facts: Mapping[str, Any]) -> None:
        """Begin the epoch anew, at the centre, with what another worker has besides its weights."""
        assert self.team is not None  # alone there is no centre
        tree = unpacked_tree(data)
        Decisions(self._container).check(tree["callbacks"])
        self._held.load(tree, seeds=self.team.serves)
        self.team.load_for_others(tree["team"] if self.team.serves else None, facts["epoch"])
        self._saved = {**tree, "position": {"batch": 0, "inside": False}, "random": random_states()}

    def _go_on(self) -> None:
        """Let callbacks and random numbers be where they were; all callbacks have begun by now."""
        self._begun = True
        if self._saved is not None:
            Decisions(self._container).load(self._saved["callbacks"], self._epoch)
            load_random(self._saved["random"])

    def _go_on_inside(self, saved: Mapping[str, Any]) -> None:
        """Undo what was done for the beginning of an epoch that goes on."""
        self._held.synchronise()
        build_metrics(self.model)
        assign(self.model.metrics_variables, saved["metrics"], "the metrics")
        self._held.load_rates(saved)
        if self.distribute is not None and saved["distribute"] is not None:
            self.distribute.load(saved["distribute"])
        load_random(saved["random"])
