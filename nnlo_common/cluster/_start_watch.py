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
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

__all__ = ["ALL_RANKS", "LIMIT", "REPORT_AFTER_S", "listed", "sentence", "waiting_for"]

#: The environment variable with the seconds after which ranks that wait for others end.
LIMIT = "NNLO_START_LIMIT_S"
#: A rank that has waited so long names the missing ones.
REPORT_AFTER_S = 10.0
ALL_RANKS = "Start the same script on all ranks, and let each take part: no `if rank == 0:` around a training"
_PROCESSES = Path("/proc")


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


def _siblings(pid: int, variable: str) -> dict[int, bool]:
    """Return the ranks that the same daemon has started on this host, and whether each has begun MPI."""
    found = {}
    parent = _parent(pid)
    for folder in _PROCESSES.glob("[0-9]*"):
        try:
            if _parent(int(folder.name)) != parent:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            rank = int(variables[variable.encode()])
            found[rank] = b"libmpi" in (folder / "maps").read_bytes()
        except (OSError, ValueError, KeyError):  # ended meanwhile, another user's, or no rank
            continue
    return found


def _parent(pid: int) -> int:
    return int((_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


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


def _main(rank: int, size: int, host: str, variable: str, limit_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pid = os.getppid()
    who = f"nnlo: rank {rank} of {size} on {host}"
    report_after_s = min(REPORT_AFTER_S, limit_s)
    if _ended(report_after_s):
        return
    found = _siblings(pid, variable)
    speaks = not any(begun for other, begun in found.items() if other < rank)
    if speaks:
        text = waiting_for(report_after_s, _missing(found, size), limit_s)
        os.write(2, f"{who} {text}\n".encode())
    if _ended(limit_s - report_after_s):
        return
    if speaks:
        os.write(2, f"{who} ends: the other ranks have not come within {limit_s:.0f} s\n".encode())
    os.kill(pid, signal.SIGKILL)  # it hears nothing else in MPI_Init


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
