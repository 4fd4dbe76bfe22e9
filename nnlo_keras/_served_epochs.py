"""The epochs of a server's `fit`: each serves until the workers have finished one, and trains on nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnlo_common.plugin import NoteQuery, Session, Vector
from nnlo_keras._callback_lists import last_of, own_logs
from nnlo_keras._callbacks._rank_callback import RankCallback
from nnlo_keras._rates import Rates
from nnlo_keras._serving import serving
from nnlo_keras._weights import Weights

__all__ = ["ServedEpochs"]


class ServedEpochs:
    """Lets `fit` serve in place of its batches.

    Args:
        model: the model, which is the centre.
        team: this rank's place among several.
        weights: the model's.
        rates: what workers are to be told of learning rates.
        callbacks: those of ours.
    """

    def __init__(
        self, model: Any, team: Session, weights: Weights, rates: Rates, callbacks: Sequence[RankCallback]
    ) -> None:
        self._model, self._team, self._weights = model, team, weights
        self._rates, self._callbacks = rates, callbacks
        self._epoch, self._served, self._last = 0, False, False
        self._logs: dict[str, float] = {}
        self._final: Vector | None = None  # what the model was when the training was over

    def take_over(self, container: Any, callback: Any) -> list[Callable[[], object]]:
        """Let `fit` serve, and `callback` be the last of its callbacks; return what undoes it."""
        model = self._model
        # What other callbacks make of the model at the end, e.g. the best weights again, is what all get.
        restore = last_of(container, callback)
        model.train_function = serving(self._serve, model)

        def forget() -> None:
            model.train_function = None  # fit makes a new one

        return [*restore, forget, *own_logs(model)]

    def begin_epoch(self, epoch: int, *, last: bool) -> None:
        """Begin an epoch: what callbacks have made of the rate since the last one is told."""
        self._epoch, self._served, self._last = epoch, False, last
        self._rates.tell()

    def end_batch(self) -> None:
        """Go on, unless the training was stopped, perhaps by another server."""
        self._rates.see_batch()
        if self._team.stopped:
            self._model.stop_training = True

    def end_epoch(self) -> None:
        """See what callbacks have made of the rate by the metrics of the epoch."""
        self._rates.see_epoch()

    def end(self) -> None:
        """Let all ranks end with what the model is now: perhaps its average, or its best.

        Until they hear that the training is over, workers go on.
        """
        self._weights.absorb()
        self._final = self._weights.parameters.vector.copy()

    def settle(self) -> None:
        """Let the centre be what the model was when the training was over, if it is."""
        if self._final is not None:
            np.copyto(self._weights.parameters.vector, self._final)
            self._weights.publish()

    def _serve(self) -> dict[str, float]:
        """Serve an epoch, if that was not done yet; return the workers' metrics."""
        if not self._served:
            self._served = True
            self._team.begin_epoch()
            if self._last:
                self._team.last_round()
            for one in self._callbacks:
                one.after_serving()
            self._logs = dict(self._team.ask(NoteQuery(epoch=self._epoch, values={}, weight=0)).means)
        return self._logs
