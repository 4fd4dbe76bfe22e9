"""The callback that makes `fit` one rank's part in a training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError, Report
from nnlo_common._joining import launched
from nnlo_common._roles import say
from nnlo_common._team import Team
from nnlo_common.transport._endpoint import RankWorld
from nnlo_keras._model import CenterOptimizer, RateOption, Statistics, Weights
from nnlo_keras._wrapper import Mode, Wrapper, wrapper_of

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

    Args:
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
    """

    def __init__(self, *, world: RankWorld | None = None) -> None:
        super().__init__()
        self._world = world
        self._team: Team | None = None
        self._weights: Weights | None = None
        self._restore: list[Callable[[], object]] = []
        self._batch = -1  # the last one of this epoch
        self._summed = 0  # batches since the last push
        self._in_epoch = self._epochs_left = 0
        self._served = False
        self._report = Report()
        self._logs: dict[str, float] = {}
        self.role = "alone"

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribute:
        return type(self)(world=self._world)

    @property
    def report(self) -> Report:
        """What this rank has seen of the last training."""
        return self._report if self._team is None else self._team.report()

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose model is the centre."""
        say(self.role, text)

    # -- what fit calls -------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Take up this rank's part."""
        wrapper = self._wrapper()
        world = self._world or launched()
        if world is None or world.size == 1:
            wrapper.mode, wrapper.attached = Mode.ALONE, True
            return
        self._join(wrapper, world)
        if self._serving:
            self._become_server()
        else:
            self._become_worker()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Begin an epoch."""
        self._batch, self._summed, self._in_epoch, self._served = -1, 0, 0, False
        self._epochs_left = (self.params.get("epochs") or 0) - epoch - 1
        if self._team is not None and not self._serving:
            self._team.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Exchange, if it is time to."""
        if self._team is None or self._serving:
            return
        if threading.current_thread() is not threading.main_thread() and self._world is None:
            raise ConfigurationError(f"Keras calls this callback in threads of its own; {_PLACE}")
        done, self._batch = batch - self._batch, batch
        self._in_epoch += done
        if not self._team.stopped:
            self._exchange(done)
        if self._team.stopped:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """End the epoch: send what is left, and what the metrics are."""
        if self._team is None or self._serving:
            return
        if self._summed:
            self._push()
        values = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        self._team.ask({"ask": "note", "values": values, "weight": self._in_epoch or 1})
        self._team.end_epoch()

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Leave with the centre's weights."""
        team = self._team
        if team is None:
            return
        if self._serving:
            if self.model.stop_training:
                team.stop()
            self._settle(team)
        else:
            for _ in range(self._epochs_left):  # those that this worker has stopped before
                team.begin_epoch()
                team.end_epoch()
            team.take_over_center()
        team.close()
        self._report, self._team = team.report(), None
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()

    # -- taking up a part -----------------------------------------------------------------------------

    @property
    def _serving(self) -> bool:
        return self._team is not None and self._team.serves

    def _wrapper(self) -> Wrapper:
        wrapper = wrapper_of(self.model.optimizer)
        if wrapper is None:
            found = type(self.model.optimizer).__name__
            raise ConfigurationError(
                f"Distribute() found {found} as the model's optimizer; wrap it in the algorithm, e.g. "
                f"model.compile(optimizer=nnlo_keras.Downpour({found}(...)))"
            )
        return wrapper

    def _join(self, wrapper: Wrapper, world: RankWorld) -> None:
        if getattr(self.model, "_distribute_strategy", None) is not None:
            raise ConfigurationError(
                "a TensorFlow distribution strategy is around this model; take it away: nnlo distributes the "
                "training, with one replica on each rank"
            )
        wrapper.attached = True
        if not wrapper.built:
            wrapper.build(self.model.trainable_variables)
        if wrapper.algorithm.optimizer_runs != "worker" and wrapper.accumulator is None:
            raise ConfigurationError(
                "this optimizer was built before the ranks were known; make a new one for this training"
            )
        weights = self._weights = Weights(self.model, wrapper)
        self._team = Team(
            wrapper.algorithm,
            world,
            model=weights,
            buffers=Statistics.of(self.model),
            options=RateOption(wrapper),
            center_optimizer=lambda place: CenterOptimizer(wrapper, weights, place),
            local_step=lambda: None,  # it has been made within the training step
            servers=wrapper.servers,
            optimizer=type(wrapper.inner_optimizer).__name__,
        )
        self.role = self._team.member.role
        wrapper.mode = Mode.LOCAL if wrapper.algorithm.optimizer_runs == "worker" else Mode.ACCUMULATE
        if self._serving:
            wrapper.mode = Mode.SERVE
        self._team.start()

    def _become_worker(self) -> None:
        """Leave files, progress bars and validation to the rank that has the centre."""
        from nnlo_keras._quiet import quieten

        container = _container(sys._getframe(2))
        self._restore += quieten(container, self.model)

    def _become_server(self) -> None:
        from nnlo_keras._quiet import last_of, own_logs

        # What other callbacks make of the model at the end, e.g. the best weights again, is what all get.
        self._restore += last_of(_container(sys._getframe(2)), self)
        model = self.model
        model.train_function = _as_train_function(self._serve, model)

        def forget() -> None:
            model.train_function = None  # fit makes a new one

        self._restore.append(forget)
        self._restore += own_logs(model)

    # -- the exchange ---------------------------------------------------------------------------------

    def _exchange(self, done: int) -> None:
        wrapper, team = self._wrapper(), self._team
        assert team is not None  # on_train_batch_end has seen to it
        team.take(done)
        if wrapper.mode is Mode.ACCUMULATE:
            self._summed += done
            if self._summed >= wrapper.every:
                self._push()
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

    def _push(self) -> None:
        assert self._team is not None  # there is one, or nobody would push
        self._summed = 0
        assert self._weights is not None  # _join has made it
        self._team.step(1.0, self._scale_gradient)
        self._weights.clear()

    def _scale_gradient(self) -> None:
        wrapper, weights = self._wrapper(), self._weights
        assert weights is not None  # _join has made it
        if wrapper.algorithm.optimizer_runs == "nowhere":  # the learning rate goes into the gradient
            rate = float(keras.ops.convert_to_numpy(wrapper.learning_rate))
            weights.gradient.vector *= np.float32(rate)

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

        team.settle_center(settle)

    def _serve(self) -> dict[str, float]:
        """Serve an epoch, if that was not done yet; return the workers' metrics."""
        team = self._team
        assert team is not None  # a server has one
        if not self._served:
            self._served = True
            team.begin_epoch()
            self._logs = dict(team.ask({"ask": "note", "values": {}, "weight": 0})["means"])
        return self._logs


def _as_train_function(serve: Callable[[], dict[str, float]], model: Any) -> Callable[..., Any]:
    """What fit calls for each batch."""
    if keras.backend.backend() != "jax":
        return lambda iterator: serve()
    parts = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")

    def serve_with_state(state: Any, iterator: Any) -> Any:  # noqa: ARG001 - the data is not looked at
        # JAX's fit takes the values out of the variables for an epoch; who serves needs them there.
        model._jax_state = dict(zip(parts, state, strict=True))
        model.jax_state_sync()
        return serve(), model._get_jax_state(**dict.fromkeys(parts, True))

    return serve_with_state


def _container(frame: Any) -> keras.callbacks.CallbackList:
    """The list of callbacks that calls this one."""
    while frame is not None:
        container = frame.f_locals.get("self")
        if isinstance(container, keras.callbacks.CallbackList):
            return container
        frame = frame.f_back
    raise ConfigurationError(f"Distribute() is called by no list of callbacks; {_PLACE}")
