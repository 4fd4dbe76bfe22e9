"""How long a job takes to recover from a death, by when its lines come and when its workers make steps."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["TAKEN_OVER", "Lines", "dropped", "next_s", "recoveries", "watched"]

#: The pattern of what a rank says that serves in the place of a dead server.
TAKEN_OVER = r"nnlo: all workers are with rank \d+ now"
# Every so often it is looked whether there are new lines.
_PACE_S = 5e-3


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a job, and when each has come."""

    at: list[tuple[float, str]] = field(default_factory=list)

    def first_s(self, pattern: str, since_s: float) -> float | None:
        """Return when the first line with this pattern has come since then, None if none has."""
        found = (at_s for at_s, line in self.at if at_s >= since_s and re.search(pattern, line))
        return min(found, default=None)


@contextmanager
def watched(path: Path) -> Iterator[Lines]:
    """Note when each line of a file comes that another process writes."""
    lines, over = Lines(), threading.Event()

    def watch() -> None:
        with path.open(errors="replace") as file:
            rest, last = "", False
            while not last:
                last = over.wait(_PACE_S)
                *whole, rest = (rest + file.read()).split("\n")
                lines.at.extend((time.monotonic(), line) for line in whole)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lines
    finally:
        over.set()
        thread.join()


def dropped(rank: int) -> str:
    """Return the pattern of what the server says of a dead worker."""
    return rf"nnlo: rank {rank} on .*; it has died"


def next_s(lines: Lines, pattern: str, struck_s: float, steps_s: Iterable[float]) -> float | None:
    """Return how long after a death the first step was made that follows a line; None: none was.

    Args:
        lines: those of the job.
        pattern: that of the line that says that the others go on without the dead rank.
        struck_s: when it died.
        steps_s: when each step of a living worker was made.
    """
    told_s = lines.first_s(pattern, struck_s)
    if told_s is None:
        return None
    after_s = min((at_s for at_s in steps_s if at_s > told_s), default=None)
    return None if after_s is None else after_s - struck_s


def recoveries(found: Mapping[str, Sequence[float]]) -> str:
    """Return a table of the times to recover, by who has died."""
    lines = ["| who has died | deaths | median | longest |", "|---|---|---|---|"]
    for kind, times_s in sorted(found.items()):
        if times_s:
            middle = statistics.median(times_s)
            lines.append(f"| {kind} | {len(times_s)} | {middle:.2f} s | {max(times_s):.2f} s |")
    return "\n".join(lines)
