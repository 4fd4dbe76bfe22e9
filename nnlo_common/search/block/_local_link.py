"""A search in one process: its trials speak to the coordinator without letters."""

from __future__ import annotations

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._signals import Interrupts
from nnlo_common.search.block._trial import heard
from nnlo_common.search.coordinator._coordinator import SIGNAL, Coordinator
from nnlo_common.search.coordinator._parameter_choice import TeamMessage
from nnlo_common.search.messages._search_messages import (
    Halt,
    ParameterRequest,
    PruneRequest,
    RequestAnswer,
    SearchMessage,
)

__all__ = ["LocalLink", "noticed"]


def noticed(coordinator: Coordinator, interrupts: Interrupts) -> list[TeamMessage]:
    """Break off what is running if a signal has come, or the time is up."""
    return coordinator.interrupt(SIGNAL) if interrupts.came else coordinator.look()


class LocalLink:
    """The line of a trial in the coordinator's own process.

    Attributes:
        halted: why the trial has been broken off; empty where it has not.
        refused: what the sampler has refused, which is no failure of the trial.
    """

    def __init__(self, coordinator: Coordinator, interrupts: Interrupts) -> None:
        self._coordinator, self._interrupts = coordinator, interrupts
        self.halted = ""
        self.refused: ConfigurationError | None = None

    def suggest(self, message: ParameterRequest, call: str) -> float:  # noqa: ARG002
        return float(self._asked(message))

    def verdict(self, message: PruneRequest) -> bool:
        return bool(self._asked(message))

    def tell(self, message: SearchMessage) -> None:
        self._heed()
        self._coordinator.handle(0, message)

    def _asked(self, message: SearchMessage) -> float | bool:
        self._heed()
        try:
            (post,) = self._coordinator.handle(0, message)
        except ConfigurationError as error:
            self.refused = error
            raise
        assert isinstance(post.message, RequestAnswer)
        return heard(post.message)

    def _heed(self) -> None:
        for post in noticed(self._coordinator, self._interrupts):
            if isinstance(post.message, Halt):
                self.halted = post.message.reason
        if self.halted:
            raise PeerLostError(0, f"has halted the trial: {self.halted}")
