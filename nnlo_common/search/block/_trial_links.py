"""Links from a trial to the coordinator: over the ranks of a block, or within one process."""

from __future__ import annotations

from typing import Protocol

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._signals import Interrupts
from nnlo_common.search.block._block_world import BlockWorld
from nnlo_common.search.coordinator._coordinator import Coordinator
from nnlo_common.search.coordinator._coordinator_loop import check_interrupts
from nnlo_common.search.messages._rank_channel import RankChannel
from nnlo_common.search.messages._search_messages import (
    Halt,
    ParameterRequest,
    ParameterValue,
    PruneRequest,
    PruneVerdict,
    RequestAnswer,
    SearchMessage,
)

__all__ = ["BlockLink", "LocalLink", "TrialLink"]


class TrialLink(Protocol):
    """Link from a trial to the coordinator."""

    @property
    def halted(self) -> str:
        """Why the coordinator halted the trial; empty if it did not."""

    def suggest(self, message: ParameterRequest, call: str) -> float:
        """Return the internal number of a parameter."""

    def verdict(self, message: PruneRequest) -> bool:
        """Return whether to prune."""

    def tell(self, message: SearchMessage) -> None:
        """Let the coordinator know."""


class BlockLink:
    """The link of a block's rank: from the leader to the coordinator, from a partner to the leader.

    Args:
        channel: this rank's channel.
        world: the ranks of the block.
    """

    def __init__(self, channel: RankChannel, world: BlockWorld) -> None:
        self._channel, self._world = channel, world
        self._judged = 0

    @property
    def halted(self) -> str:
        """Why the coordinator halted the trial; empty if it did not."""
        return self._channel.halted

    def suggest(self, message: ParameterRequest, call: str) -> float:
        """Return the internal number of a parameter."""
        channel = self._channel
        if channel.rank:
            said = channel.wait(ParameterValue)
            if said.call != call:
                raise ConfigurationError(
                    f"rank {channel.rank} of the block calls {call}, but its first rank called "
                    f"{said.call}; suggest the same parameters in the same order on all ranks"
                )
            return said.value
        value = float(self._request(message))
        channel.tell_partners(ParameterValue(message.run, call, value))
        return value

    def verdict(self, message: PruneRequest) -> bool:
        """Return whether to prune."""
        self._world.meet()
        if self._channel.rank:
            return self._channel.wait(PruneVerdict).prune
        prune = bool(self._request(message))
        self._channel.tell_partners(PruneVerdict(message.run, self._judged, prune))
        self._judged += 1
        return prune

    def tell(self, message: SearchMessage) -> None:
        """Let the coordinator know."""
        if not self._channel.rank:
            self._channel.check()
            self._channel.tell_coordinator(message)

    def _request(self, message: SearchMessage) -> float | bool:
        self._channel.tell_coordinator(message)
        return _answer_of(self._channel.wait(RequestAnswer))


def _answer_of(answer: RequestAnswer) -> float | bool:
    """Return the coordinator's answer, or raise its problem."""
    if answer.problem:
        raise ConfigurationError(answer.problem)
    return answer.value


class LocalLink:
    """The link of a trial in the coordinator's own process.

    Attributes:
        halted: why the coordinator halted the trial; empty if it did not.
        refused: the sampler's error, which is not a failure of the trial.
    """

    def __init__(self, coordinator: Coordinator, interrupts: Interrupts) -> None:
        self._coordinator, self._interrupts = coordinator, interrupts
        self.halted = ""
        self.refused: ConfigurationError | None = None

    def suggest(self, message: ParameterRequest, call: str) -> float:  # noqa: ARG002
        return float(self._request(message))

    def verdict(self, message: PruneRequest) -> bool:
        return bool(self._request(message))

    def tell(self, message: SearchMessage) -> None:
        self._raise_if_halted()
        self._coordinator.handle(0, message)

    def _request(self, message: SearchMessage) -> float | bool:
        self._raise_if_halted()
        try:
            (answer,) = self._coordinator.handle(0, message)
        except ConfigurationError as error:
            self.refused = error
            raise
        assert isinstance(answer.message, RequestAnswer)
        return _answer_of(answer.message)

    def _raise_if_halted(self) -> None:
        for sent in check_interrupts(self._coordinator, self._interrupts):
            if isinstance(sent.message, Halt):
                self.halted = sent.message.reason
        if self.halted:
            raise PeerLostError(0, f"has halted the trial: {self.halted}")
