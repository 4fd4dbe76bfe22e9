"""Stall detector: records when each worker was heard, warns of stalls, and reports deaths."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from nnlo_common.base._errors import PeerLostError
from nnlo_common.protocol import Kind, Message

__all__ = [
    "LOOK_EVERY_S",
    "PATIENCE",
    "SHORTEST_S",
    "ServerWatch",
    "StallDetector",
    "UNKNOWN_S",
    "date_and_time",
]

_LOG = logging.getLogger(__name__)

#: Interval between checks for stalled workers.
LOOK_EVERY_S = 0.5
#: Warn at twice its longest earlier silence after the same kind of message,
PATIENCE = 2.0
#: but never before this.
SHORTEST_S = 5.0
#: Used without an earlier silence: a first step compiles, a first epoch may end with a validation.
UNKNOWN_S = 60.0


def date_and_time() -> str:
    """Return the time of now, as lines about deaths and stalls have it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


@dataclass(slots=True)
class _LastHeard:
    """Record of one rank."""

    did: Kind | None = None
    step: int = 0
    at_s: float = 0.0  # when it was last heard
    since_s: float = 0.0  # the start of its current silence
    named: bool = False


class StallDetector:
    """Records every message, and compares the silence after it with the sender's longest earlier silence.

    The longest silence is kept for each rank and kind of message, because a worker validates after an epoch
    but not after a step. The silence of a worker that waits for others does not count.

    Args:
        hosts: the host of each watched rank.
        stall_timeout_s: drop a worker silent this long; None: never.
        tells: log warnings; only one rank of a training does.
        clock: returns the time.

    Example:
        >>> now_s = 0.0
        >>> stall_detector = StallDetector({1: "node7"}, tells=False, clock=lambda: now_s)
        >>> stall_detector.heard(Message(Kind.EXCHANGE, sender=1, sequence=1, clock=10))
        >>> now_s = 3.0
        >>> stall_detector.last(1)
        'rank 1 on node7, last heard 3.0 s ago: EXCHANGE after step 10'
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        *,
        stall_timeout_s: float | None = None,
        tells: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts, self._stall_timeout_s, self._clock = dict(hosts), stall_timeout_s, clock
        self._level = logging.WARNING if tells else logging.DEBUG
        now_s = self._looked_s = clock()
        self._seen = {rank: _LastHeard(at_s=now_s, since_s=now_s) for rank in hosts}
        self.stalls: list[str] = []
        self._longest_s: dict[tuple[int, Kind], float] = defaultdict(float)

    def watch(self, rank: int, host: str) -> None:
        """Watch one more worker from now on."""
        now_s = self._clock()
        self._hosts[rank] = host
        self._seen[rank] = _LastHeard(at_s=now_s, since_s=now_s)

    def tell(self, *, tells: bool) -> None:
        """Set whether its lines are warnings."""
        self._level = logging.WARNING if tells else logging.DEBUG

    def heard(self, message: Message) -> None:
        """Record a message."""
        seen = self._seen.get(message.sender)
        if seen is None:
            return
        now_s = self._clock()
        silence_s = now_s - seen.since_s
        if seen.did is not None:
            at = message.sender, seen.did
            self._longest_s[at] = max(self._longest_s[at], silence_s)
        if seen.named:
            seen.named = False
            who = f"rank {message.sender} on {self._hosts[message.sender]}"
            _LOG.log(self._level, "nnlo: %s is back after %.1f s", who, silence_s)
        seen.did, seen.at_s, seen.since_s = message.kind, now_s, now_s
        seen.step = message.steps or seen.step

    def begin(self) -> None:
        """Restart all silences: this rank has not listened for a while."""
        self._looked_s = self._clock()
        for seen in self._seen.values():
            seen.since_s = self._looked_s

    def look(self, is_awaited: Callable[[int], bool]) -> list[int]:
        """Warn of newly stalled ranks; return those past `stall_timeout_s`.

        Args:
            is_awaited: returns whether the next message must come from this rank.
        """
        now_s = self._clock()
        if now_s - self._looked_s > 4 * LOOK_EVERY_S:
            self.begin()  # this rank was busy itself, so messages may be unread
        self._looked_s = now_s
        overdue = []
        for rank, seen in self._seen.items():
            if not is_awaited(rank):
                seen.since_s = now_s
                continue
            silence_s = now_s - seen.since_s
            if not seen.named and silence_s > self._deadline_s(rank, seen):
                seen.named = True
                self.stalls.append(f"{self.last(rank)} at {date_and_time()}")
                _LOG.log(
                    self._level,
                    "nnlo: %s; longer than usual: check whether it hangs, is stopped or is cut off%s",
                    *(self.last(rank), self._consequence()),
                )
            if self._stall_timeout_s is not None and silence_s > self._stall_timeout_s:
                overdue.append(rank)
        return overdue

    def last(self, rank: int) -> str:
        """Describe when a rank was last heard, and its last message."""
        seen = self._seen[rank]
        did = "nothing yet" if seen.did is None else f"{seen.did.name} after step {seen.step}"
        return f"rank {rank} on {self._hosts[rank]}, last heard {self._clock() - seen.at_s:.1f} s ago: {did}"

    def report_death(self, rank: int, others: int) -> str:
        """Warn that a rank has died; return the line for the report.

        Args:
            rank: the dead rank.
            others: the number of workers left.
        """
        line = self.last(rank)
        _LOG.log(self._level, "nnlo: %s; it has died. Workers left: %d", line, others)
        return f"{line}; died at {date_and_time()}"

    def report_drop(self, rank: int, others: int) -> tuple[float, str]:
        """Warn that a silent rank was dropped; return its silence and the line for the report.

        Args:
            rank: the dropped rank.
            others: the number of workers left.
        """
        silence_s = self._clock() - self._seen[rank].since_s
        line = f"{self.last(rank)}; dropped after {silence_s:.0f} s of silence"
        _LOG.log(self._level, "nnlo: %s. Workers left: %d", line, others)
        return silence_s, f"{line} at {date_and_time()}"

    def _deadline_s(self, rank: int, seen: _LastHeard) -> float:
        longest_s = 0.0 if seen.did is None else self._longest_s[rank, seen.did]
        return max(SHORTEST_S, PATIENCE * longest_s) if longest_s else UNKNOWN_S

    def _consequence(self) -> str:
        limit_s = self._stall_timeout_s
        return "" if limit_s is None else f"; it will be dropped after {limit_s:g} s"


# -- server watch: names a server that a worker waits for longer than usual, and gives it up after a
# limit.

# A server may itself wait for a stalled worker, which it drops after one `stall_timeout_s`.
_TIMEOUTS = 2.0


class ServerWatch:
    """Compares how long a worker waits with the longest earlier wait for the same.

    Args:
        hosts: the host of each server.
        awaited: returns the servers that must answer next.
        stall_timeout_s: give up a server that is silent twice as long; None: never.
        tells: log warnings; only one worker of a training does.
        drop: takes a silent server out of the job if another rank can take over; returns whether one can.
        clock: returns the time.

    Example:
        >>> now_s = 0.0
        >>> watch = ServerWatch({0: "node7"}, lambda: [0], stall_timeout_s=10, clock=lambda: now_s)
        >>> watch.begin("a step")
        >>> for now_s in (0.5, 1.0, 1.5):
        ...     watch.look()
        >>> watch.heard()
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        awaited: Callable[[], Collection[int]],
        *,
        stall_timeout_s: float | None = None,
        tells: bool = True,
        drop: Callable[[int], bool] = lambda rank: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts, self._awaited, self._drop, self._clock = dict(hosts), awaited, drop, clock
        self._stall_timeout_s = stall_timeout_s
        self._level = logging.WARNING if tells else logging.DEBUG
        self._what = ""
        self._since_s: float | None = None  # when a wait began that is long enough to look
        self._looked_s = 0.0
        self._named: list[int] = []
        self._longest_s: dict[str, float] = {}

    def begin(self, what: str) -> None:
        """Note what the worker asks for; often it need not wait.

        Args:
            what: words for it; waits for the same are compared.
        """
        self._what, self._since_s = what, None

    def heard(self) -> None:
        """Note that an answer has arrived."""
        known_s = self._longest_s.get(self._what)
        if self._since_s is None:
            if known_s is None:
                self._longest_s[self._what] = 0.0
            return
        silence_s = self._clock() - self._since_s
        self._longest_s[self._what] = max(known_s or 0.0, silence_s)
        self._since_s = None
        for rank in self._named:
            who = f"rank {rank} on {self._hosts[rank]}"
            _LOG.log(self._level, "nnlo: %s is back after %.1f s", who, silence_s)
        self._named.clear()

    def look(self) -> None:
        """Name the servers that are silent longer than usual; call it every `LOOK_EVERY_S` of a wait.

        Raises:
            PeerLostError: one is silent too long.
        """
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s - LOOK_EVERY_S
        elif now_s - self._looked_s > 4 * LOOK_EVERY_S:
            self._since_s = now_s  # this rank was stopped itself
        self._looked_s = now_s
        silence_s, known_s = now_s - self._since_s, self._longest_s.get(self._what)
        usual_s = UNKNOWN_S if known_s is None else max(SHORTEST_S, PATIENCE * known_s)
        for rank in self._awaited():
            if silence_s > usual_s and rank not in self._named:
                self._named.append(rank)
                _LOG.log(
                    self._level,
                    "nnlo: rank %d on %s, a server, has not answered for %.1f s (%s); longer than usual: it "
                    "may validate, save or wait for another worker; else check whether it hangs, is stopped "
                    "or is cut off%s",
                    *(rank, self._hosts[rank], silence_s, self._what, self._consequence()),
                )
            if self._stall_timeout_s is not None and silence_s > _TIMEOUTS * self._stall_timeout_s:
                if self._drop(rank):  # its death is told like any other
                    self._since_s = now_s
                    return
                raise PeerLostError(
                    rank,
                    f"has not answered for {silence_s:.1f} s ({self._what}), longer than twice "
                    f"stall_timeout_s={self._stall_timeout_s:g}, and a training cannot continue without a "
                    "server, so the job aborts. See what that rank waits for; if it validates or saves so "
                    "long, choose a longer stall_timeout_s",
                )

    def _consequence(self) -> str:
        limit_s = self._stall_timeout_s
        return "" if limit_s is None else f"; the job will end after {_TIMEOUTS * limit_s:g} s"
