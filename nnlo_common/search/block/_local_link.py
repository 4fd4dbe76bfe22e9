"""A search in one process: its trials speak to the coordinator without letters."""

from __future__ import annotations

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._signals import Interrupts
from nnlo_common.search.block._trial import heard
from nnlo_common.search.coordinator._coordinator import Coordinator
from nnlo_common.search.coordinator._coordinator_loop import check_interrupts
from nnlo_common.search.messages._search_messages import (
    Halt,
    ParameterRequest,
    PruneRequest,
    RequestAnswer,
    SearchMessage,
)

__all__ = ["LocalLink"]


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
        for post in check_interrupts(self._coordinator, self._interrupts):
            if isinstance(post.message, Halt):
                self.halted = post.message.reason
        if self.halted:
            raise PeerLostError(0, f"has halted the trial: {self.halted}")
