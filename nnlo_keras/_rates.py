"""Learning rates that a callback has set on the server, sent to the workers."""

from __future__ import annotations

from typing import Any

from nnlo_common.plugin import Session
from nnlo_keras._wrapper import wrapper_of

__all__ = ["Rates"]


class Rates:
    """Sends workers the learning rate that a callback on the server has set by its metrics.

    Rates set at the beginning of an epoch or batch are set by every rank itself. So the server sends only
    changes made between the last batch of an epoch and the next epoch.

    Args:
        model: the model; callbacks set the rate of `model.optimizer`, if that is wrapped.
        team: this rank's session.
    """

    def __init__(self, model: Any, team: Session) -> None:
        self._model, self._team = model, team
        self._rate = 0.0  # last rate sent or received; 0: none
        self._before: float | None = None  # the rate before callbacks saw an epoch's metrics
        self._decided = False  # whether a callback has changed it since

    def see_batch(self) -> None:
        """On a server: record the rate before callbacks see an epoch's metrics."""
        self._before = self._set

    def see_epoch(self) -> None:
        """On a server: check whether a callback has changed the rate."""
        self._decided = self._set != self._before

    def send(self) -> None:
        """On a server: send the rate if a callback has changed it."""
        rate = self._set or 0.0
        if rate != self._rate:
            self._rate = rate if self._decided else 0.0
            self._team.tell_rate(self._rate)

    def receive(self) -> None:
        """On a worker: set the rate that the server has sent, once; callbacks here may change it again."""
        if self._team.told_rate == self._rate:
            return
        self._rate, wrapper = self._team.told_rate, wrapper_of(self._model.optimizer)
        if self._rate and wrapper is not None:
            # A rate set through the wrapper is sent to the server. Bypass the wrapper, so as not to send the
            # server's own rate back, unless a callback here has sent another meanwhile.
            optimizer = wrapper.inner_optimizer if wrapper.rate_set is None else wrapper
            optimizer.learning_rate = self._rate

    @property
    def _set(self) -> float | None:
        """The rate that a callback has set on this rank."""
        wrapper = wrapper_of(self._model.optimizer)
        return None if wrapper is None else wrapper.rate_set
