"""Server watch: names a server that a worker waits for longer than usual, and gives it up after a limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

from nnlo_common.base._errors import PeerLostError
from nnlo_common.training._stall_detector import LOOK_EVERY_S, PATIENCE, SHORTEST_S, UNKNOWN_S

__all__ = ["ServerWatch"]

_LOG = logging.getLogger(__name__)
# A server may itself wait for a stalled worker, which it drops after one `stall_timeout_s`.
_TIMEOUTS = 2.0


class ServerWatch:
    """Compares how long a worker waits with the longest earlier wait for the same.

    Args:
        hosts: the host of each server.
        awaited: returns the servers that must answer next.
        stall_timeout_s: give up a server that is silent twice as long; None: never.
        tells: log warnings; only one worker of a training does.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts, self._awaited, self._clock = dict(hosts), awaited, clock
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
