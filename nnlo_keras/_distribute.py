"""The callback that makes `fit` one rank's part in a training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError, Report
from nnlo_common._flat import Vector
from nnlo_common._joining import assigned, launched
from nnlo_common._roles import say
from nnlo_common._team import Team
from nnlo_common.transport._endpoint import RankWorld
from nnlo_keras._building import build
from nnlo_keras._callbacks._companion import Companion, numbers
from nnlo_keras._feeding import Feeding
from nnlo_keras._fitting import container_of, serving
from nnlo_keras._model import CenterOptimizer, RateOption, Statistics, Weights
from nnlo_keras._optimizers import any_wrapper_in, assign_variables, wrappers_in
from nnlo_keras._quiet import (
    last_of,
    own_logs,
    quieten,
    refuse_loading,
    restored_first,
    undisturbed,
    unvalidated,
)
from nnlo_keras._rates import Rates
from nnlo_keras._wrapper import Mode, Wrapper

__all__ = ["Distribute"]

_PLACE = "give Distribute() to fit() in a list of callbacks: callbacks=[nnlo_keras.Distribute(), ...]"


class Distribute(keras.callbacks.Callback):
    """Lets `fit` take part in a training of several ranks; started alone it does nothing.

    On a worker it exchanges at the ends of batches. On a server, where the model is the centre, each epoch of
    `fit` serves until the workers have finished one, and then validates; so the other callbacks see the
    centre there. Callbacks that write files, stop the training or change the learning rate by what they see
    (ModelCheckpoint, BackupAndRestore, CSVLogger, TensorBoard, EarlyStopping, ReduceLROnPlateau) and the
    progress bar are at rest on workers.

    At the end all ranks have the centre's weights.

    A model with a `train_step` of its own may have several optimizers: wrap all alike, and build each with
    the variables that it trains.

    Args:
        stall_timeout_s: a worker that has been silent for so long, though it is its turn, is given up: it is
            ended where the others go on without it, else the job is. None: it is only named.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
    """

    def __init__(self, *, stall_timeout_s: float | None = None, world: RankWorld | None = None) -> None:
        super().__init__()
        self._stall_timeout_s = stall_timeout_s
        self._world = world
        self._team: Team | None = None
        self._weights: Weights | None = None
        self._wrappers: list[Wrapper] = []  # of one kind, with the same options
        self._restore: list[Callable[[], object]] = []
        self._epoch, self._batch = 0, -1  # the last one of this epoch
        self._summed = 0  # batches since the last push
        self._undisturbed = False  # whether nobody else sees the weights between batches
        self._before: Vector | None = None  # the weights as an epoch's first batch begins
        self._in_epoch = self._epochs_left = 0
        self._epoch_open = False
        self._feeding: Feeding | None = None  # where `fit` trains on an H5Sequence
        self._companions: list[Companion] = []
        self._served = False
        self._rates: Rates | None = None
        self._report = Report()
        self._logs: dict[str, float] = {}
        self._settled: Callable[[], object] | None = None
        self.role = "alone"

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribute:
        return type(self)(stall_timeout_s=self._stall_timeout_s, world=self._world)

    @property
    def report(self) -> Report:
        """What this rank has seen of the last training."""
        return self._report if self._team is None else self._team.report()

    @property
    def team(self) -> Team | None:
        """This rank's place among several, while there are any."""
        return self._team

    @property
    def batches_in_epoch(self) -> int:
        """How many batches this worker has trained on in this epoch."""
        return self._in_epoch

    @property
    def feeding(self) -> Feeding | None:
        """What `fit` trains on, where that is an H5Sequence."""
        return self._feeding

    def state(self) -> dict[str, Any]:
        """Return where this worker is in its epoch."""
        weights, gradient = self._weights, None
        if self._summed and weights is not None:
            weights.collect()
            gradient = weights.gradient.vector.copy()
        return {"in_epoch": self._in_epoch, "summed": self._summed, "gradient": gradient}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was returned, once the epoch has begun."""
        self._in_epoch, self._summed = state["in_epoch"], state["summed"]
        if state["gradient"] is not None and self._weights is not None:
            self._weights.resume(state["gradient"])

    def settle(self) -> None:
        """On a server whose training is over: let the centre be what the model was then."""
        if self._settled is not None:
            self._settled()

    def leave(self) -> None:
        """Leave the training in good order, wherever in an epoch this rank is."""
        if self._team is not None:
            self._team.close()
            self._release(self._team)

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose model is the centre."""
        say(self.role, text)

    # -- what fit calls -------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Put callbacks to rest that are not for this rank; none of them has begun yet."""
        super().set_model(model)
        container, wrapper = container_of(sys._getframe(1)), any_wrapper_in(model)
        world = self._world or launched()
        if container is None or wrapper is None or world is None or world.size == 1:
            return  # what is wrong with it will be said when the training begins
        if wrapper.servers > 1:
            refuse_loading(container, wrapper.servers)
        role = assigned(world, wrapper.servers).title
        if role == "server 0":
            restored_first(container)
        elif role.startswith("server"):
            # It also steps its part by its own rate.
            quieten(container, but=keras.callbacks.ReduceLROnPlateau)
        else:
            quieten(container)

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Take up this rank's part."""
        wrappers = wrappers_in(self.model)
        self._wrappers = list(wrappers.values())
        for wrapper in self._wrappers:
            wrapper.mode, wrapper.attached = Mode.ALONE, True
        world = self._world or launched()
        container = container_of(sys._getframe(1))
        callbacks = [] if container is None else container.callbacks
        self._companions = [one for one in callbacks if isinstance(one, Companion)]
        self._feeding, self._epochs_left = Feeding.of(sys._getframe(1)), 0
        if world is None or world.size == 1:
            self._prepare("alone")
        elif container is None:
            raise ConfigurationError(f"Distribute() is called by no list of callbacks; {_PLACE}")
        else:
            build(self.model, sys._getframe(1))
            assign_variables(self.model, wrappers)
            self._undisturbed = undisturbed(callbacks, self)
            self._join(world)
            self._agree_on_first_epoch()
            if self._serving:
                self._become_server(container)
            else:
                self._restore += unvalidated(self.model)  # that is for the rank that has the centre
                if self._feeding is not None and self._team is not None:
                    self._restore += self._feeding.lease(self.model, self._team)
        for one in self._companions:
            one.after_start(self)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Begin an epoch."""
        self._epoch, self._batch, self._summed, self._in_epoch, self._served = epoch, -1, 0, 0, False
        self._epoch_open = True
        self._epochs_left = (self.params.get("epochs") or 0) - epoch - 1
        if self._team is not None and self._rates is not None:
            if self._serving:
                self._rates.tell()
            else:
                self._team.begin_epoch()
                if self._undisturbed and self._wrappers[0].mode is Mode.ACCUMULATE:
                    assert self._weights is not None  # _join has made it
                    self._weights.attach()
        if self._feeding is not None:
            self._feeding.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Note the weights that an epoch begins with, where the training step is not to change them."""
        if self._in_epoch == 0 and self._weights is not None and self._wrappers[0].mode is Mode.ACCUMULATE:
            self._before = self._weights.parameters.vector.copy()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Exchange, if it is time to."""
        if self._team is None or self._rates is None:
            return
        if self._serving:
            self._rates.see_batch()
            if self._team.stopped:  # perhaps by another server
                self.model.stop_training = True
            return
        if threading.current_thread() is not threading.main_thread() and self._world is None:
            raise ConfigurationError(f"Keras calls this callback in threads of its own; {_PLACE}")
        self._refuse_changes()
        done, self._batch = batch - self._batch, batch
        if self._feeding is None or not self._feeding.idle:
            self._in_epoch += done
            if not self._team.stopped:
                self._exchange(done)
                self._rates.hear()
        if self._team.stopped:
            self.model.stop_training = True
        elif self._feeding is not None:
            self._feeding.end_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the epoch: send what is left, and what the metrics are; once, whoever calls it first."""
        if self._team is None or self._rates is None or not self._epoch_open:
            return
        if self._serving:
            self._rates.see_epoch()
            return
        self._epoch_open = False
        if self._summed:
            self._push()
        assert self._weights is not None  # _join has made it
        self._weights.detach()
        values = numbers(logs) if self._in_epoch else {}  # nothing was left for this worker
        note = {"ask": "note", "epoch": epoch, "values": values, "weight": self._in_epoch or 1}
        self._team.ask(note)
        self._team.end_epoch()

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Leave with the centre's weights."""
        team = self._team
        if team is None:
            return
        if self._serving:
            if self.model.stop_training:
                team.stop()
            self._let_end()
            self._settle(team)
        else:
            self._let_end()
            for epoch in self._empty_epochs():
                for one in self._companions:
                    one.before_empty_epoch(epoch)
                team.begin_epoch()
                team.end_epoch()
            for one in self._companions:
                one.after_epochs()
            team.take_over_center()
        team.close()
        self._release(team)

    # -- taking up a part, and leaving it -------------------------------------------------------------

    def _release(self, team: Team) -> None:
        self._report, self._team, self._feeding, self._settled = team.report(), None, None, None
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()

    def _empty_epochs(self) -> range:
        """The epochs that this rank has stopped before."""
        return range(self._epoch + 1, self._epoch + 1 + self._epochs_left)

    @property
    def _serving(self) -> bool:
        return self._team is not None and self._team.serves

    def _join(self, world: RankWorld) -> None:
        if getattr(self.model, "_distribute_strategy", None) is not None:
            raise ConfigurationError(
                "a TensorFlow distribution strategy is around this model; take it away: nnlo distributes the "
                "training, with one replica on each rank"
            )
        wrappers, (first, *_) = self._wrappers, self._wrappers
        local = first.algorithm.optimizer_runs == "worker"
        if not local and any(wrapper.sum is None for wrapper in wrappers):
            raise ConfigurationError(
                "this optimizer was built before the ranks were known; make a new one for this training"
            )
        self._prepare(assigned(world, first.servers).title)
        weights = self._weights = Weights(self.model, wrappers)
        self._team = Team(
            first.algorithm,
            world,
            model=weights,
            buffers=Statistics.of(self.model, weights.variables),
            options=RateOption(wrappers),
            center_optimizer=lambda place: CenterOptimizer(wrappers, weights, place),
            local_step=lambda: None,  # it has been made within the training step
            servers=first.servers,
            optimizer=", ".join(map(_described, wrappers)),
            epochs=self.params.get("epochs") or 0,
            stall_timeout_s=self._stall_timeout_s,
            meetings=[type(one).__name__ for one in self._companions if one.meets],
        )
        self._rates = Rates(self.model, self._team)
        self.role = self._team.member.role
        mode = Mode.SERVE if self._serving else Mode.LOCAL if local else Mode.ACCUMULATE
        for wrapper in wrappers:
            wrapper.mode = mode
        for one in self._companions:
            one.before_part(self)
        self._team.start()

    def _agree_on_first_epoch(self) -> None:
        """Let all begin with the epoch that BackupAndRestore has restored on the first server."""
        assert self._team is not None  # _join has made it
        restored = {"epoch": self.model._initial_epoch or 0}
        first = self._team.mean(restored, weight=1.0 if self.role == "server 0" else 0.0)["epoch"]
        self.model._initial_epoch = int(first) or None

    def _prepare(self, role: str) -> None:
        for one in self._companions:
            one.before_start(role)

    def _let_end(self) -> None:
        for one in self._companions:
            one.before_end()

    def _become_server(self, container: Any) -> None:
        # What other callbacks make of the model at the end, e.g. the best weights again, is what all get.
        self._restore += last_of(container, self)
        model = self.model
        model.train_function = serving(self._serve, model)

        def forget() -> None:
            model.train_function = None  # fit makes a new one

        self._restore.append(forget)
        self._restore += own_logs(model)

    # -- the exchange ---------------------------------------------------------------------------------

    def _exchange(self, done: int) -> None:
        wrapper, team = self._wrappers[0], self._team
        assert team is not None  # on_train_batch_end has seen to it
        team.take(done)
        if wrapper.mode is Mode.ACCUMULATE:
            self._summed += done
            if self._summed >= wrapper.every:
                self._push()
            if wrapper.algorithm.optimizer_runs == "nowhere":
                for one in self._wrappers:
                    # Nothing steps the optimizer; its schedule goes by this worker's batches.
                    one.inner_optimizer.iterations.assign_add(done)
            return
        due = False
        for _ in range(done - 1):
            due |= team.due
            team.pass_step()
        if due or team.due:
            assert self._weights is not None  # _join has made it
            self._weights.absorb()
            team.step(1.0, lambda: None)
        else:
            team.pass_step()

    def _refuse_changes(self) -> None:
        """Refuse a training step that changes weights by itself: the next exchange would undo it, unsaid.

        It is looked for once in each epoch, which costs next to nothing.
        """
        before, self._before = self._before, None
        assert self._weights is not None  # _join has made it
        if before is not None and (changed := self._weights.changed_since(before)):
            raise ConfigurationError(
                f"the weight {changed!r} was changed within the training step or by a callback, but only "
                "the optimizer on the server is to change it here, and the next exchange would undo that; to "
                "clip weights give the layer a kernel_constraint, or take an algorithm whose optimizer runs "
                "on workers, such as LocalSGD"
            )

    def _push(self) -> None:
        assert self._team is not None  # there is one, or nobody would push
        self._summed = 0
        assert self._weights is not None  # _join has made it
        self._team.step(1.0, self._scale_gradient)
        self._weights.clear()

    def _scale_gradient(self) -> None:
        weights = self._weights
        assert weights is not None  # _join has made it
        if self._wrappers[0].follows and self._team is not None:
            self._team.set_local_rate(self._wrappers[0].current_rate)
        for wrapper, place in zip(self._wrappers, weights.places, strict=True):
            if wrapper.algorithm.optimizer_runs == "nowhere":  # the learning rate goes into the gradient
                weights.gradient.vector[place] *= np.float32(wrapper.current_rate)

    def _settle(self, team: Team) -> None:
        """Let all ranks end with what this rank's model is now: perhaps its average, or its best.

        Until they hear that the training is over, workers go on.
        """
        weights = self._weights
        assert weights is not None  # _join has made it
        weights.absorb()
        vector = weights.parameters.vector
        final = vector.copy()

        def settle() -> None:
            np.copyto(vector, final)
            weights.publish()

        self._settled = settle
        for epoch in self._empty_epochs():
            for one in self._companions:
                one.before_empty_epoch(epoch)
            if self._wrappers[0].servers > 1:
                # Servers wait for each other at the end of each epoch, and another may have stopped later.
                team.begin_epoch()
        for one in self._companions:
            one.after_epochs()
        team.settle_center(settle)

    def _serve(self) -> dict[str, float]:
        """Serve an epoch, if that was not done yet; return the workers' metrics."""
        team = self._team
        assert team is not None  # a server has one
        if not self._served:
            self._served = True
            team.begin_epoch()
            for one in self._companions:
                one.after_serving()
            self._logs = dict(team.ask({"ask": "note", "epoch": self._epoch, "values": {}})["means"])
        return self._logs


def _described(wrapper: Wrapper) -> str:
    """What is to be the same on all ranks besides the algorithm."""
    pushed = "" if wrapper.every == 1 else f", pushed to every {wrapper.every} batches,"
    return f"{type(wrapper.inner_optimizer).__name__}{pushed}"
