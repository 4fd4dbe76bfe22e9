"""A learning rate that a callback has set where the centre is, on its way to the workers."""

from __future__ import annotations

from typing import Any

from nnlo_common.plugin import Session
from nnlo_keras._wrapper import wrapper_of

__all__ = ["Rates"]


class Rates:
    """Tells workers the learning rate that a callback has set on the server by what it has seen there.

    What is set as an epoch begins, or for a batch, every rank sets for itself. So the server looks what a
    callback has made of the rate between the last batch of an epoch and the next epoch.

    Args:
        model: the model; callbacks set the rate of `model.optimizer`, if that is wrapped.
        team: this rank's place among several.
    """

    def __init__(self, model: Any, team: Session) -> None:
        self._model, self._team = model, team
        self._rate = 0.0  # told by the server, as this rank knows it; 0: none
        self._before: float | None = None  # as it was before an epoch's metrics were seen
        self._decided = False  # whether a callback has set another one since

    def see_batch(self) -> None:
        """On a server: an epoch's metrics are about to be seen."""
        self._before = self._set

    def see_epoch(self) -> None:
        """On a server: they have been seen."""
        self._decided = self._set != self._before

    def tell(self) -> None:
        """On a server: let workers know, if a callback has decided anything."""
        rate = self._set or 0.0
        if rate != self._rate:
            self._rate = rate if self._decided else 0.0
            self._team.tell_rate(self._rate)

    def hear(self) -> None:
        """On a worker: take over the rate that the server has told, once; callbacks here may set another."""
        if self._team.told_rate == self._rate:
            return
        self._rate, wrapper = self._team.told_rate, wrapper_of(self._model.optimizer)
        if self._rate and wrapper is not None:
            # What is set through the wrapper is told to the server: not its own words, unless others have
            # been told meanwhile by a callback here.
            optimizer = wrapper.inner_optimizer if wrapper.rate_set is None else wrapper
            optimizer.learning_rate = self._rate

    @property
    def _set(self) -> float | None:
        """What a callback has set here."""
        wrapper = wrapper_of(self._model.optimizer)
        return None if wrapper is None else wrapper.rate_set
