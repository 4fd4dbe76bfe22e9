"""Server bar: Keras' own progress bar on a server, which counts the batches of all workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras

from nnlo_common.plugin import Session
from nnlo_keras._sequence_feed import SequenceFeed

__all__ = ["ServerBar", "batches_of_all"]

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


def _done(team: Session) -> float:
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
    """

    def __init__(self, bar: keras.callbacks.ProgbarLogger, team: Session, batches: int | None) -> None:
        self._bar, self._team = bar, team
        self._target = self._known = batches
        self._before = self._epochs = 0

    @classmethod
    def of(cls, container: Any, team: Session, batches: int | None) -> ServerBar | None:
        """Return it for the bar among the callbacks of `fit`; None if there is none."""
        for one in container.callbacks:
            if isinstance(one, keras.callbacks.ProgbarLogger) and one.verbose:
                return cls(one, team, batches)
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
            self._before = math.ceil(_done(self._team))
            self._target = math.ceil(self._before / self._epochs)
        else:
            self._before = self._epochs * self._known
        self._bar.seen = self._target
        self.begin_epoch()

    def _move(self) -> None:
        done = int(_done(self._team)) - self._before
        if self._bar.verbose == 1 and self._bar.progbar is not None and done > 0:
            most = done if self._target is None else min(done, self._target)
            self._bar.progbar.update(most, finalize=False)
