"""Parts that a rank plays: worker, server, or alone; their interface, and the loop over their events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from nnlo_common.algorithms import GainReport
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import FlatVector, PartWork, Vector
from nnlo_common.base._spans import Span, span
from nnlo_common.base._state_tree import State
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.cluster.transport._group_endpoints import MemberEndpoint
from nnlo_common.protocol import (
    Action,
    Activity,
    Event,
    Kind,
    Lost,
    Message,
    Received,
    Release,
    Send,
    Wait,
    check_weight,
)
from nnlo_common.protocol._query_messages import AnswerT, Query
from nnlo_common.training._stall_detector import LOOK_EVERY_S, ServerWatch

__all__ = [
    "Alone",
    "LocalStep",
    "Periodic",
    "RankPart",
    "TeamPart",
    "TrainingReport",
    "has_center",
    "perform",
    "say",
    "serve",
    "serves",
    "speaks",
    "stands_by",
    "work",
]

# -- event loop: performs the actions of the state machines on a real transport -------------------------

#: Messages that move the centre.
_CONTRIBUTIONS = (Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT)


@dataclass(slots=True)
class Periodic:
    """Periodic call while a server waits for messages.

    Attributes:
        call: the function to call.
        every_s: the interval.
    """

    call: Callable[[], object]
    every_s: float
    _next_s: float = field(default=math.inf, init=False)

    def look(self) -> float:
        """Call if it is due; return the seconds until the next call."""
        now_s = time.monotonic()
        if self._next_s == math.inf:
            self._next_s = now_s + self.every_s
        if now_s >= self._next_s:
            self._next_s = now_s + self.every_s
            self.call()
        return max(0.0, self._next_s - now_s)


def perform(endpoint: Endpoint, actions: Iterable[Action]) -> None:
    """Perform the sends and releases in `actions`."""
    for action in actions:
        if isinstance(action, Send):
            with span("send", action.message.kind.name) as sent:
                if sent is not None and not isinstance(endpoint, MemberEndpoint):
                    sent.facts = {"sends": _arrow(action.rank, action.message)}
                endpoint.send(action.rank, action.message, action.frame, _spanned(action.fill))
        elif isinstance(action, Release):
            endpoint.release(action.rank, action.frame)


def _spanned(fill: PartWork | None) -> PartWork | None:
    """Return what does so in a span of its own: a server moves the centre by a contribution in it."""
    if fill is None:
        return None

    def move(part: slice) -> None:
        with span("apply", "part"):
            fill(part)

    return move


def work(
    endpoint: Endpoint,
    deliver: Callable[[Received], Iterable[Action]],
    activity: Activity,
    lost: Callable[[int, PeerLostError | None], object],
    watch: ServerWatch,
    *,
    what: str = "work",
) -> None:
    """Perform an activity of a worker, waiting for replies when it yields `Wait`.

    Args:
        endpoint: of this rank.
        deliver: takes a message.
        activity: the actions.
        lost: called when a rank has died, with the error if that has broken off a message; it raises if the
            training cannot go on.
        watch: of the servers' silence.
        what: names the activity in a trace.

    Raises:
        PeerLostError: raised by `lost`, or a server was silent too long.
    """
    with span("pack", what):
        for action in activity:
            if not isinstance(action, Wait):
                perform(endpoint, (action,))
                continue
            with span("wait", what):
                while (event := endpoint.receive(LOOK_EVERY_S)) is None:
                    watch.look()
            if isinstance(event, Lost):
                lost(event.rank, None)
                continue
            watch.heard()
            try:
                with _handling(endpoint, event):
                    perform(endpoint, deliver(event.watched(watch.look, watch.heard)))
            except PeerLostError as error:
                lost(error.rank, error)
        # The worker may now compute for long: get its messages out first.
        with span("send", "flush"):
            endpoint.flush()


def serve(
    endpoint: Endpoint,
    handle: Callable[[Event], None],
    until: Callable[[], bool],
    watches: Iterable[Periodic] = (),
) -> None:
    """Hand every event to `handle` until `until()` holds; it is checked before each event."""
    watches = tuple(watches)
    while not until():
        wait_s = min((watch.look() for watch in watches), default=None)
        with span("idle", "no message"):
            event = endpoint.receive(wait_s)
        if isinstance(event, Received):
            with _handling(endpoint, event):
                handle(event)
        elif event is not None:
            handle(event)


def _handling(endpoint: Endpoint, event: Received) -> AbstractContextManager[object]:
    """Return the span of a message that has arrived."""
    message = event.message
    found = span("apply" if message.kind in _CONTRIBUTIONS else "receive", message.kind.name)
    if isinstance(found, Span) and not isinstance(endpoint, MemberEndpoint):  # its lead takes the message
        found.facts = {"takes": _arrow(message.sender, message)}
    return found


def _arrow(peer: int, message: Message) -> tuple[int, int, str, int]:
    """Return what names a message at both ends, together with this rank's number."""
    return peer, message.shard, message.kind.name, message.sequence


# -- parts that a rank plays: worker, server, or alone; and their interface -----------------------------

#: Moves the parameters of a worker, as a framework's optimizer does.
LocalStep: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """One rank's report of a training.

    Attributes:
        steps: gradients computed here.
        samples: samples taken: on a server, by all workers as far as it knows; on a worker, by itself.
        exchanges: contributions committed to this rank's shard of the centre.
        dropped: contributions that came too late (synchronous training with backup workers).
        mean_staleness: the mean staleness of contributions, in commits.
        noise_scale: the gradient noise scale of this rank's shard, in the unit of the workers' weights:
            samples, unless they were set; None: there is one worker, or it sends no gradients.
        gain: how much work the workers have done together, if the algorithm measures it (see `Steady`); on
            the rank whose parameters are the centre.
        progress: the samples of one process that the workers' steps were worth, if the algorithm counts them.
        lost: on servers, one line for each dead rank: rank, host, its last message, and the time of death.
            Another says which spare takes a dead worker's place, and from which epoch on.

    Example:
        >>> report = TrainingReport(steps=40, samples=800, exchanges=8)
        >>> report.samples // report.steps  # the mean size of a batch
        20
    """

    steps: int = 0
    samples: int = 0
    exchanges: int = 0
    dropped: int = 0
    mean_staleness: float = 0.0
    noise_scale: float | None = None
    gain: GainReport | None = None
    progress: float | None = None
    lost: tuple[str, ...] = ()


def speaks(role: str) -> bool:
    """Return whether this rank prints for all: the one whose parameters are the centre."""
    return role in ("alone", "server 0", "lead")


def has_center(role: str) -> bool:
    """Return whether this rank's model is the centre: that of the one that prints, or of a spare."""
    return speaks(role) or stands_by(role)


def stands_by(role: str) -> bool:
    """Return whether this rank is a spare that neither serves nor trains yet."""
    return role.startswith("spare")


def serves(role: str) -> bool:
    """Return whether this rank gets no batches."""
    return "server" in role or stands_by(role)


def say(role: str, text: str) -> None:
    """Print `text` if this rank prints for all."""
    if speaks(role):
        print(f"{text}\n", end="", flush=True)  # one write, also where Python does not buffer


class RankPart(Protocol):
    """Interface of all roles: the operations of an ordinary training loop."""

    def start(self) -> None:
        """Join the training."""

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:
        """Make one step with the gradient that is ready; `local_step` moves the parameters, if given."""

    def begin_epoch(self) -> bool:
        """Begin an epoch; return whether that has moved the parameters."""

    def end_epoch(self) -> None:
        """Report the end of an epoch, or wait for it."""

    def point(self) -> Vector:
        """Return the point to take the next gradient at."""

    @property
    def stopped(self) -> bool:
        """Whether training ends now."""

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of all workers as last heard, and of this epoch; (0, 0) where nobody counts it."""

    def stop(self) -> None:
        """End the training; only the rank that holds the centre decides it."""

    def report(self) -> TrainingReport:
        """Return this rank's report so far."""

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Leave normally; call `last` while the others can still be asked."""


class TeamPart(RankPart, Protocol):
    """Interface of the roles in a training with several ranks."""

    def abandon(self) -> None:
        """Leave without having started."""

    def look(self, into: Vector) -> None:
        """Copy the current centre into `into`."""

    def view(self, into: Vector) -> None:
        """Copy the centre into `into` once all have finished the epoch; all ranks get the same."""

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service."""

    def last_round(self) -> None:
        """Contribute the steps since the last round, if the algorithm trains in rounds."""

    @property
    def told_rate(self) -> float:
        """The learning rate that the first server sends to workers; 0: none."""

    def pause(self, *, between: bool = False) -> bool:
        """Wait until all workers are at a batch boundary; False on a worker: the pause was cancelled.

        Args:
            between: all ranks call it, between two epochs.
        """

    def state(self) -> State:
        """Return all that the next step depends on; exact in a pause."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; call it before `start`."""


class Alone:
    """Role of the only rank: trains without exchanges."""

    def __init__(self, parameters: FlatVector, gradient: FlatVector, optimizer: VectorOptimizer) -> None:
        self._parameters, self._gradient, self._optimizer = parameters, gradient, optimizer
        self._steps = 0
        self.stopped, self.progress = False, (0, 0)

    def start(self) -> None:
        """Do nothing: there is no other rank."""

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:  # noqa: ARG002
        """Step the optimizer."""
        check_weight(0, weight)
        self._optimizer.step(self._parameters.vector, self._gradient.vector)
        self._steps += 1

    def begin_epoch(self) -> bool:
        """Do nothing: there is no other rank."""
        return False

    def end_epoch(self) -> None:
        """Do nothing: there is no other rank."""

    def point(self) -> Vector:
        """Return the parameters, or the point ahead of them."""
        ahead: Callable[[Vector], Vector] | None = getattr(self._optimizer, "gradient_point", None)
        return self._parameters.vector if ahead is None else ahead(self._parameters.vector)

    def stop(self) -> None:
        """Make no more steps."""
        self.stopped = True

    def report(self) -> TrainingReport:
        """Return the steps made."""
        return TrainingReport(steps=self._steps)

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Call `last`; there is no other rank."""
        last()
