"""World of a block's ranks for one trial: frees ranks that wait for a partner that failed.

    launched() ─► BlockWorld ─► open() ─► _BlockEndpoint ─► the transport's own endpoint
                     │                      └ checks for alarms, counts messages
                     ├ group() ─► EndpointGroup, on a _BlockEndpoint of its ranks
                     └ gather_text() uses mail, because no alarm can interrupt a collective call of MPI

At the end of a trial all ranks exchange how many messages they sent through each endpoint. Before a rank
closes its endpoints it receives those still under way to it, so that the next trial finds none.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NoReturn

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Apart, Frame, PartWork, Vector
from nnlo_common.cluster.transport._endpoint import Endpoint, Group, Link, PartWorld
from nnlo_common.cluster.transport._group_endpoints import EndpointGroup, group_links
from nnlo_common.protocol import Event, Message, Received
from nnlo_common.search._channels import RankChannel
from nnlo_common.search._search_messages import Text

__all__ = ["BlockWorld"]

# How often an endpoint checks for alarms, waiting or not; each check costs some microseconds.
_LOOK_EVERY_S = 20e-3


class BlockWorld:
    """The ranks of a block, for one trial.

    Attributes:
        gathered: how many gatherings this rank joined.

    Args:
        ranks: the transport's world of the same ranks.
        channel: this rank's channel to its partners.
    """

    of_trial = True
    survives_loss = False

    def __init__(self, ranks: PartWorld, channel: RankChannel) -> None:
        self._ranks, self._channel = ranks, channel
        self.rank, self.size, self.host = ranks.rank, ranks.size, ranks.host
        self.own_process = ranks.own_process
        self.gathered = 0
        self._texts: dict[int, dict[int, str]] = defaultdict(dict)  # by gathering and rank
        self._endpoints: list[_BlockEndpoint] = []
        self._groups: dict[int, tuple[PartWorld, _BlockEndpoint]] = {}  # by the gathering before each
        self._last_calls: list[Callable[[], object]] = []
        self._before_meeting: list[Callable[[], object]] = []
        self._engaged = self._revoked = False

    def gather_text(self, text: str, *, patient: bool = False) -> list[str]:  # noqa: ARG002 - never reports
        """Give every rank the texts of all ranks (collective)."""
        self._channel.check()
        turn, self.gathered = self.gathered, self.gathered + 1
        self._channel.tell_partners(Text(self._channel.run, turn, text))
        texts = self._texts[turn]
        texts[self.rank] = text
        while True:
            self._channel.check(gathering=turn)
            while (found := self._channel.taken(Text)) is not None:
                rank, part = found
                self._texts[part.index][rank] = part.text
            if len(texts) == self.size:
                del self._texts[turn]
                return [texts[rank] for rank in range(self.size)]
            self._channel.take_in(None)

    def gather_from_living(self, text: str) -> list[str | None]:
        """Give every rank the texts of all ranks (collective); a trial ends with a rank of its block."""
        return [*self.gather_text(text)]

    def open(self, links: Sequence[Link]) -> Endpoint:
        """Open this rank's endpoint (collective)."""
        # All ranks pass a gathering or none does, so none is missing when the transport opens an endpoint:
        # no alarm can interrupt that.
        self.gather_text("")
        endpoint = _BlockEndpoint(self._ranks.open(links), self._channel, range(self.size), self.size)
        self._endpoints.append(endpoint)
        return endpoint

    def group(
        self,
        ranks: Sequence[int],
        *,
        naps: bool,  # noqa: ARG002 - as in every world
        lasting: bool = False,  # noqa: ARG002 - a trial ends with any of its ranks
    ) -> Group:
        """Return the group of these ranks, this one among them, lead first (collective over them)."""
        # The ranks of a training have all passed the gathering of its facts, so none is missing here.
        part = self._ranks.part(ranks)
        links = group_links(part.rank, part.size)
        endpoint = _BlockEndpoint(part.open(links), self._channel, ranks, self.size)
        self._groups[self.gathered] = part, endpoint
        return EndpointGroup(endpoint, part.rank, ranks)

    def engage(self) -> Callable[[], None]:
        """Refuse a second training at the same time; the search itself handles this rank's exit."""
        if self._engaged:
            raise ConfigurationError(
                f"rank {self.rank} of this block: another training is open; finish it before the next"
            )
        self._engaged = True

        def disengage() -> None:
            self._engaged = False

        return disengage

    def at_end(
        self,
        call: Callable[[], object],
        in_middle: Callable[[], bool] = lambda: False,  # noqa: ARG002 - a block ends with its objective
    ) -> Callable[[], None]:
        """Register a call for when the objective has returned; return a function that cancels it."""
        self._last_calls.append(call)

        def forget() -> None:
            if call in self._last_calls:
                self._last_calls.remove(call)

        return forget

    def at_meeting(self, call: Callable[[], object]) -> None:
        """Register a call for before this rank waits for the block outside a training."""
        self._before_meeting.append(call)

    @property
    def recalled(self) -> bool:
        """Whether a training must leave after its next checkpoint, so that more ranks can resume it."""
        while self._channel.take_in(0):
            pass
        return self._channel.recalled

    def cast_off(self) -> None:
        """Do nothing: the ranks of a block drop none of them."""

    def drop(self, rank: int) -> bool:  # noqa: ARG002
        """Refuse: a search needs all of its ranks."""
        return False

    def abort(self, code: int) -> NoReturn:
        """End all ranks of the job now."""
        self._ranks.abort(code)

    # -- for the block --------------------------------------------------------------------------------

    def meet(self) -> None:
        """Make the registered calls before this rank waits for the others."""
        for call in self._before_meeting:
            call()

    def end(self) -> None:
        """Make the registered calls at the end of the objective, which close trainings left open."""
        while self._last_calls:
            self._last_calls.pop(0)()

    @property
    def sent(self) -> tuple[tuple[int, ...], ...]:
        """How many messages this rank sent through each endpoint to each rank of the block."""
        return tuple(tuple(endpoint.sent) for endpoint in self._endpoints)

    @property
    def grouped(self) -> tuple[tuple[int, ...], ...]:
        """The same for the endpoints of its groups, each after the number of the gathering before it."""
        return tuple((turn, *endpoint.sent) for turn, (_, endpoint) in self._groups.items())

    def drain(self) -> None:
        """Receive and drop what has arrived at the open endpoints."""
        for endpoint in self._every_endpoint():
            endpoint.drain()

    def revoke(self) -> None:
        """Free the ranks that wait for a dead one while the transport opens an endpoint."""
        if not self._revoked:
            self._revoked = True
            self._ranks.revoke()

    def drained(self, peer: int, sent: Sequence[Sequence[int]], grouped: Sequence[Sequence[int]]) -> bool:
        """Return whether all messages of a rank have arrived; `sent` and `grouped` are what it reports."""
        pairs = [*zip(self._endpoints, sent, strict=False)]
        pairs += [(self._groups[turn][1], counts) for turn, *counts in grouped if turn in self._groups]
        return all(
            endpoint.closed or endpoint.received[peer] >= counts[self.rank] for endpoint, counts in pairs
        )

    def close(self) -> None:
        """Close what is still open; no message may be under way."""
        self._last_calls.clear()
        self._before_meeting.clear()
        for endpoint in self._every_endpoint():
            if not endpoint.closed:
                endpoint.close()
        for part, _ in self._groups.values():
            part.close()

    def _every_endpoint(self) -> list[_BlockEndpoint]:
        return [*self._endpoints, *(endpoint for _, endpoint in self._groups.values())]


class _BlockEndpoint:
    """An endpoint of the transport that checks for alarms in every receive, and while a reply arrives.

    Args:
        endpoint: the transport's own.
        channel: this rank's channel to its partners.
        ranks: the numbers of its ranks in the block.
        size: the number of ranks of the block.
    """

    def __init__(self, endpoint: Endpoint, channel: RankChannel, ranks: Sequence[int], size: int) -> None:
        self._endpoint, self._channel, self._ranks = endpoint, channel, ranks
        self.sent, self.received = [0] * size, [0] * size
        self.closed = False
        self._looked_s = time.monotonic()

    def send(
        self, peer: int, message: Message, frame: Frame | None = None, fill: PartWork | None = None
    ) -> None:
        self.sent[self._ranks[peer]] += 1
        self._endpoint.send(peer, message, frame, fill)

    def send_ahead(self, peer: int, shard: int, vector: Vector, start: int, apart: Apart = ()) -> None:
        self._endpoint.send_ahead(peer, shard, vector, start, apart)

    def withdraw(self, peer: int, shard: int) -> None:
        self._endpoint.withdraw(peer, shard)

    def receive(self, timeout_s: float | None = None) -> Event | None:
        left_s = timeout_s
        while True:
            if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
                self._channel.check()
                self._looked_s = time.monotonic()
            wait_s = _LOOK_EVERY_S if left_s is None else min(left_s, _LOOK_EVERY_S)
            event = self._endpoint.receive(wait_s)
            if event is not None:
                return self._counted(event)
            if left_s is not None:
                left_s -= wait_s
                if left_s <= 0:
                    return None

    def release(self, peer: int, frame: Frame) -> None:
        self._endpoint.release(peer, frame)

    def abandon(self, peer: int) -> None:
        """Never wait for this peer again."""
        self._endpoint.abandon(peer)

    def flush(self) -> None:
        self._endpoint.flush()

    def close(self) -> None:
        self.closed = True
        self._endpoint.close()

    def drain(self) -> None:
        while not self.closed and (event := self._endpoint.receive(0)) is not None:
            self._counted(event)
            if isinstance(event, Received):
                self._endpoint.release(event.message.sender, event.frame)

    def _counted(self, event: Event) -> Event:
        if isinstance(event, Received):
            self.received[self._ranks[event.message.sender]] += 1
            return event.watched(self._channel.check)
        return event
