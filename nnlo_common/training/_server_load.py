"""Load of the server: workers wait for it much of their time, and it works most of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

__all__ = ["BUSY", "WAITED", "Bottleneck", "told"]

_LOG = logging.getLogger(__name__)
#: The share of their time that workers may wait, and that a server may be at work, without a remark.
WAITED, BUSY = 0.25, 0.5
# Shorter trainings say nothing about a server.
_LEAST_S = 10.0


def told(waited: float, busy: float, servers: int) -> str:
    """Return what such a run shows, and what to do about it.

    Example:
        >>> told(0.4, 0.9, servers=1)  # doctest: +ELLIPSIS
        'workers wait 40 % ..., and a server works 90 % of its own: use servers=2, a larger every, or ...'
    """
    return (
        f"workers wait {100 * waited:.0f} % of their time, and a server works {100 * busy:.0f} % of its "
        f"own: use servers={servers + 1}, a larger every, or groups of ranks"
    )


class Bottleneck:
    """Looks at a server's share of work at the end of each epoch; warns once if it keeps its workers waiting.

    Args:
        servers: how many servers there are.
        tells: whether this one warns.
        clock: returns the time in seconds.

    Example:
        >>> now_s = 0.0
        >>> bottleneck = Bottleneck(servers=1, clock=lambda: now_s)
        >>> bottleneck.begin()
        >>> bottleneck.begin_work()
        >>> now_s = 1.0
        >>> bottleneck.end_work()
        >>> bottleneck.end([0.1, 0.2])  # a second is too short to judge
    """

    def __init__(
        self, *, servers: int, tells: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._servers, self._tells, self._clock = servers, tells, clock
        self._epoch_s = self._work_s = 0.0  # when they began
        self._busy_s = self._served_s = 0.0  # sums since the last look
        self._in_epoch = False

    def begin(self) -> None:
        """Note that the server begins to serve an epoch."""
        self._epoch_s, self._in_epoch = self._clock(), True

    def begin_work(self) -> None:
        """Note that it takes a message."""
        self._work_s = self._clock()

    def end_work(self) -> None:
        """Note that it has handled a message."""
        if self._in_epoch:
            self._busy_s += self._clock() - self._work_s

    def end(self, waited: Sequence[float]) -> None:
        """Note the end of the epoch, and look.

        Args:
            waited: for each worker, the share of its time that it has waited.
        """
        self._served_s += self._clock() - self._epoch_s
        self._in_epoch = False
        if self._served_s < _LEAST_S or not waited:
            return
        busy, mean = self._busy_s / self._served_s, sum(waited) / len(waited)
        self._busy_s = self._served_s = 0.0
        if self._tells and busy > BUSY and mean > WAITED:
            self._tells = False
            _LOG.warning("nnlo: %s", told(mean, busy, self._servers))
