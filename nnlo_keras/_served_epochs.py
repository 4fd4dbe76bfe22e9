"""Epochs of a server's `fit`: each serves until the workers have finished one, and trains on nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from nnlo_common.plugin import NoteQuery, Session, Vector
from nnlo_keras._callback_lists import last_of, own_logs
from nnlo_keras._callbacks._rank_callback import RankCallback
from nnlo_keras._compat import give_state, taken_state
from nnlo_keras._exchanges import Rates
from nnlo_keras._sequence_feed import SequenceFeed
from nnlo_keras._snapshot import Decisions
from nnlo_keras._weights import Weights

__all__ = ["ServedEpochs", "ServerBar", "batches_of_all", "done"]

# -- server bar: Keras' own progress bar on a server, which counts the batches of all workers ----------

_EVERY_S = 0.5


def batches_of_all(team: Session, params: Mapping[str, Any], feed: SequenceFeed | None) -> int | None:
    """Return the number of batches in an epoch of all workers; None: one of them does not know (collective).

    Args:
        team: this rank's session; it has joined and not started.
        params: those of the callbacks of `fit`.
        feed: the Batches that `fit` trains on, if it does.
    """
    steps = 0 if team.serves else _steps_of(params, feed)
    told = {"batches": float(steps or 0), "unknown": float(steps is None)}
    found = team.agree(told, weight=0.0 if team.serves else 1.0)
    return None if found["unknown"] else round(found["batches"] * team.share[1])


def _steps_of(params: Mapping[str, Any], feed: SequenceFeed | None) -> int | None:
    """Return a worker's batches in an epoch; the workers deal those of Batches out as they go."""
    return None if feed is not None else params.get("steps")


def done(team: Session) -> float:
    """Return the batches that all workers have trained on, or the progress that they have made."""
    report = team.report()
    return report.samples if report.gain is None else report.gain.progress


class ServerBar:
    """Moves the bar of a server's `fit`, whose own batches are none.

    A bar ends at the number of batches that all workers have in an epoch. If one of them does not know its
    number, Keras shows "Unknown" in the first epoch, and later epochs have the mean of those before; then a
    worker that is ahead by some batches has them counted in the epoch before theirs.

    Args:
        bar: Keras' callback.
        team: this rank's session.
        batches: the number of batches in an epoch of all workers; None: unknown.
        first: the batches, or the progress, before a checkpoint that the training goes on from.
    """

    def __init__(
        self, bar: keras.callbacks.ProgbarLogger, team: Session, batches: int | None, first: float = 0.0
    ) -> None:
        self._bar, self._team, self._first = bar, team, first
        self._target = self._known = batches
        self._before = self._epochs = 0

    @classmethod
    def of(cls, container: Any, team: Session, batches: int | None, first: float) -> ServerBar | None:
        """Return it for the bar among the callbacks of `fit`; None if there is none."""
        for one in container.callbacks:
            if isinstance(one, keras.callbacks.ProgbarLogger) and one.verbose:
                return cls(one, team, batches, first)
        return None

    def take_over(self) -> list[Callable[[], object]]:
        """Let the bar count what all workers train on; return functions that undo it."""
        bar: Any = self._bar
        bar.on_train_batch_end = lambda *_, **__: None  # a batch of a server has no data
        self._team.watch(self._move, _EVERY_S)

        def count_own_batches() -> None:
            del bar.on_train_batch_end

        return [count_own_batches]

    def begin_epoch(self) -> None:
        """Tell Keras how many batches there are; call it after Keras' own callback has begun the epoch."""
        self._bar.target = self._target
        if self._bar.progbar is not None:
            self._bar.progbar.target = self._target

    def end_epoch(self) -> None:
        """End an epoch, before Keras' callback does."""
        self._epochs += 1
        if self._known is None:
            self._before = math.ceil(done(self._team) - self._first)
            self._target = math.ceil(self._before / self._epochs)
        else:
            self._before = self._epochs * self._known
        self._bar.seen = self._target
        self.begin_epoch()

    def _move(self) -> None:
        made = int(done(self._team) - self._first) - self._before
        if self._bar.verbose == 1 and self._bar.progbar is not None and made > 0:
            most = made if self._target is None else min(made, self._target)
            self._bar.progbar.update(most, finalize=False)


class ServedEpochs:
    """Lets `fit` serve instead of training on its batches.

    Args:
        model: the model, which is the centre.
        team: this rank's session.
        weights: the model's weights.
        rates: sends learning rates to the workers.
        callbacks: nnlo's callbacks.
        batches: the number of batches in an epoch of all workers; None: unknown.
        first: see `ServerBar`.

    Attributes:
        inside: this rank, a worker before, serves since an epoch has begun that was not served to its end.
    """

    def __init__(
        self,
        model: Any,
        team: Session,
        weights: Weights,
        rates: Rates,
        callbacks: Sequence[RankCallback],
        *,
        batches: int | None,
        first: float,
    ) -> None:
        self._first = first
        self._model, self._team, self._weights = model, team, weights
        self._rates, self._callbacks, self._batches = rates, callbacks, batches
        self._epoch, self._served, self._last = 0, False, False
        self._logs: dict[str, float] = {}
        self._bar: ServerBar | None = None
        self._final: Vector | None = None  # the model's weights at the end of the training
        self._container: Any = None
        self.inside = False

    def take_over(self, container: Any, callback: Any) -> list[Callable[[], object]]:
        """Let `fit` serve, and move `callback` to the end of the list; return functions that undo it."""
        model, self._container = self._model, container
        # All ranks get the model as other callbacks leave it at the end, e.g. with the best weights.
        restore = last_of(container, callback)
        self._bar = ServerBar.of(container, self._team, self._batches, self._first)
        if self._bar is not None:
            restore += self._bar.take_over()
        model.train_function = _serving(self._serve, model)

        def forget() -> None:
            model.train_function = None  # fit makes a new one

        return [*restore, forget, *own_logs(model)]

    def begin_epoch(self, epoch: int, *, last: bool) -> None:
        """Begin an epoch; send a learning rate that callbacks have set since the previous one."""
        self._epoch, self._served, self._last = epoch, False, last
        if self._bar is not None:
            self._bar.begin_epoch()
        self._rates.send()

    def begin_inside(self, epoch: int, *, last: bool) -> None:
        """Begin to serve within an epoch that this rank has begun as a worker."""
        self._epoch, self._last, self.inside = epoch, last, True

    def end_inside(self) -> dict[str, float]:
        """Serve such an epoch to its end, unless that was done; return the workers' metrics."""
        found = self._serve()
        self._rates.see_batch()
        return found

    def decide(self, call: Callable[[], object]) -> None:
        """Call what looks at an earlier epoch's metrics; send a learning rate that it sets at once."""
        self._rates.see_batch()
        call()
        self._rates.see_epoch()
        self._rates.send()

    def end_batch(self) -> None:
        """Stop `fit` if the training was stopped, perhaps by another server."""
        self._rates.see_batch()
        if self._team.stopped:
            self._model.stop_training = True

    def end_epoch(self) -> None:
        """Check whether callbacks have changed the rate by the epoch's metrics; note what they know."""
        self._rates.see_epoch()
        if self._team.has_heir:
            self._team.leave_to_heir(Decisions(self._container).told())

    def end(self) -> None:
        """Keep the model's weights as they are now (perhaps averaged, or the best) for all ranks.

        Workers keep moving the centre until they learn that the training is over.
        """
        self._weights.absorb()
        self._final = self._weights.parameters.vector.copy()

    def settle(self) -> None:
        """Set the centre to the weights that `end` kept, if the training is over."""
        if self._final is not None:
            np.copyto(self._weights.parameters.vector, self._final)
            self._weights.publish()

    def _serve(self) -> dict[str, float]:
        """Serve the epoch if it was not served yet; return the workers' metrics."""
        if not self._served:
            self._served = True
            if self.inside:
                self.inside = False
                self._team.end_epoch()
            else:
                self._team.begin_epoch(takes_place=False)  # a spare has asked for one when the epoch began
            if self._last:
                self._team.last_round()
            if self._bar is not None:
                self._bar.end_epoch()
            for one in self._callbacks:
                one.after_serving()
            self._logs = dict(self._team.ask(NoteQuery(epoch=self._epoch, values={}, weight=0)).means)
        return self._logs


def _serving(serve: Callable[[], dict[str, float]], model: Any) -> Callable[..., Any]:
    """Return a server's training function, which `fit` calls for each batch; `serve` returns the metrics."""
    if keras.backend.backend() != "jax":
        return lambda iterator: serve()

    def serve_with_state(state: Any, iterator: Any) -> Any:  # noqa: ARG001 - the data is not used
        # JAX's fit takes the values out of the variables for an epoch; serving needs them there.
        give_state(model, state)
        return serve(), taken_state(model)

    return serve_with_state
