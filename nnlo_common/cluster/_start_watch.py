"""Watch over MPI's start: a process beside a rank that names who is missing, and has a limit.

MPI_Init waits for all ranks and holds the interpreter meanwhile, so that no thread of the rank can speak.
This file runs as a program of its own, with the standard library only, until its standard input ends.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["ALL_RANKS", "LIMIT", "REPORT_AFTER_S", "listed", "sentence", "waiting_for"]

#: The environment variable with the seconds after which ranks that wait for others end.
LIMIT = "NNLO_START_LIMIT_S"
#: A rank that has waited so long names the missing ones.
REPORT_AFTER_S = 10.0
ALL_RANKS = "Start the same script on all ranks, and let each take part: no `if rank == 0:` around a training"
_LOOK_EVERY_S = 2.0
_PROCESSES = Path("/proc")
# A daemon of Open MPI may serve several jobs; each has a name.
_JOB = b"PMIX_NAMESPACE"
# Below these are all ranks of a job on this host.
_LAUNCHERS = {"mpiexec", "mpirun", "prterun", "orterun"}
_DAEMONS = _LAUNCHERS | {"prted", "orted", "hydra_pmi_proxy"}
# A line that a rank has written is on its way for so long.
_TOLD_S = 0.3


def listed(ranks: Iterable[int]) -> str:
    """Return e.g. "ranks 1, 2 and 5", shortened where there are many."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        numbers = [*numbers[:6], f"{len(numbers) - 6} more"]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def sentence(ranks: Collection[int], one: str, several: str) -> str:
    """Return a sentence about ranks, e.g. "Ranks 1 and 2 have ended."; nothing about no rank.

    Args:
        ranks: the ranks.
        one: the rest of the sentence about one rank.
        several: the same about several.
    """
    told = f"{listed(ranks)} {one if len(ranks) == 1 else several}." if ranks else ""
    return told.capitalize()


def waiting_for(seconds: float, missing: str, limit_s: float) -> str:
    """Return what a rank says that waits for others to join.

    Args:
        seconds: how long it has waited.
        missing: what is known of the others, in sentences.
        limit_s: when it ends.
    """
    limit = f"This rank ends after {limit_s:.0f} s of waiting; {LIMIT} changes that"
    end = "" if limit_s == math.inf else f". {limit}"
    return f"has waited {seconds:.0f} s for the other ranks. {missing} {ALL_RANKS}{end}"


class _Host:
    """The ranks of this job that are on this host.

    Args:
        pid: of this rank, also an attribute.
        variable: the environment variable in which each has its number.
        started: how many there are; 0: unknown.

    Attributes:
        lost: those that were here and have ended; several looks found that.
        unseen: how many have ended before anybody saw them.
    """

    def __init__(self, pid: int, variable: str, started: int) -> None:
        self.pid, self._variable, self._started = pid, variable.encode(), started
        self._job = _variables_of(pid).get(_JOB)
        self._seen, self._gone = set[int](), set[int]()
        self._daemon = ("", 0)
        self.lost, self.unseen = set[int](), 0

    def look(self) -> None:
        """Take in who is here."""
        here = {rank for _, rank in self._processes()}
        self._seen |= here
        gone = self._seen - here
        self.lost, self._gone = gone & self._gone, gone  # who ends with MPI's start is gone for one look
        self.unseen = max(self._started - len(self._seen), 0) if self._daemon[0] in _DAEMONS else 0

    def ended(self, size: int) -> str:
        """Return who of so many ranks has ended, e.g. "rank 1 of this host has ended"."""
        lost = self.lost | (set(range(size)) - self._seen if self._started == size else set())
        if lost:
            return f"{listed(lost)} of this host {'has' if len(lost) == 1 else 'have'} ended"
        return f"{self.unseen} of the {self._started} ranks of this host have ended"

    def begun(self) -> dict[int, bool]:
        """Return the ranks that are here, and whether each has begun MPI."""
        found: dict[int, bool] = {}
        for pid, rank in self._processes():
            with suppress(OSError):  # ended meanwhile
                maps = (_PROCESSES / str(pid) / "maps").read_bytes()
                found[rank] = found.get(rank, False) or b"libmpi" in maps
        return found

    def speaks(self, rank: int) -> bool:
        """Whether a rank is the first one here that has begun MPI."""
        return not any(begun for other, begun in self.begun().items() if other < rank)

    def end_job(self) -> None:
        """End the launcher, if it is on this host: one that tolerates deaths would end with 0."""
        name, daemon = self._daemon
        if name in _LAUNCHERS:
            time.sleep(_TOLD_S)
            with suppress(OSError):
                os.kill(daemon, signal.SIGTERM)
            time.sleep(_TOLD_S)  # it ends the ranks

    def _processes(self) -> Iterator[tuple[int, int]]:
        """Yield the processes below the launcher's daemon that have a rank, and that."""
        children: dict[int, list[int]] = {}
        parents: dict[int, int] = {}
        for folder in _PROCESSES.glob("[0-9]*"):
            with suppress(OSError):
                pid = int(folder.name)
                parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parents[pid], []).append(pid)
        daemon = parents.get(self.pid, 0)
        # A shell may stand between the daemon and Python; a daemon below another job's rank has that in its
        # environment, too. From within a container none is to be seen.
        while self._rank_of(daemon) is not None and _name_of(daemon) not in _DAEMONS:
            daemon = parents.get(daemon, 0)
        self._daemon = _name_of(daemon), daemon
        below = list(children.get(daemon, ()))
        while below:
            pid = below.pop()
            below += children.get(pid, ())
            rank = self._rank_of(pid)
            if rank is not None:
                yield pid, rank

    def _rank_of(self, pid: int) -> int | None:
        """Return the rank of a process of this job; None: it is no such process."""
        variables = _variables_of(pid)
        number = variables.get(self._variable, b"")
        return int(number) if number.isdigit() and variables.get(_JOB) == self._job else None


def _variables_of(pid: int) -> Mapping[bytes, bytes]:
    try:
        entries = (_PROCESSES / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or another user's
        return {}
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def _name_of(pid: int) -> str:
    try:
        return (_PROCESSES / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _missing(found: Mapping[int, bool], size: int) -> str:
    idle = [rank for rank, begun in found.items() if not begun]
    unseen = set(range(size)) - set(found)
    told = (
        sentence(idle, "of this host has not begun", "of this host have not begun"),
        sentence(unseen, "has ended, or runs on another host", "have ended, or run on other hosts"),
    )
    return " ".join(filter(None, told))


def _ended(seconds: float) -> bool:
    """Wait; return whether the rank has started, or ended, meanwhile."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _main(rank: int, size: int, host: str, here: _Host, limit_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    who, began_s = f"nnlo: rank {rank} of {size} on {host}", time.monotonic()
    report_s, why = min(REPORT_AFTER_S, limit_s), ""
    while not why:
        here.look()
        waited_s = time.monotonic() - began_s
        if waited_s >= limit_s:
            why = f"the other ranks have not come within {limit_s:.0f} s"
        elif here.lost or (waited_s >= REPORT_AFTER_S and here.unseen):
            why = f"{here.ended(size)} before MPI began, which waits for all. {ALL_RANKS}"
            report_s = math.inf  # nothing else is to be said
        if waited_s >= report_s:
            if here.speaks(rank):
                _say(f"{who} {waiting_for(report_s, _missing(here.begun(), size), limit_s)}")
            report_s = math.inf
        if not why and _ended(min(_LOOK_EVERY_S, limit_s - waited_s, max(report_s - waited_s, 0))):
            return
    if here.speaks(rank):
        _say(f"{who} ends: {why}")
        here.end_job()
    os.kill(here.pid, signal.SIGKILL)  # it hears nothing else in MPI_Init


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())


if __name__ == "__main__":
    _rank, _size, _name, _variable, _started, _limit_s = sys.argv[1:]
    _main(int(_rank), int(_size), _name, _Host(os.getppid(), _variable, int(_started)), float(_limit_s))
