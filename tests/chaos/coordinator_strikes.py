"""Kills coordinators of searches that have spares, and judges what the other ranks make of it.

python -m tests.chaos.coordinator_strikes SEED COUNT
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.recovery import Lines, next_s, recoveries, watched
from tests.chaos.strikes import judged_apart, none_left, until_gone
from tests.helpers.jobs import launcher, start_of, starting

__all__ = ["CoordinatorStrike", "coordinator_strikes", "strike_coordinator"]

BLOCKS, TRIALS = 2, 60
_KINDS = ("coordinator", "coordinator and spare", "coordinator", "coordinator and block")
_SAMPLERS = ("random", "tpe", "random", "evolutionary")
_END_S, _LATEST_S = 90.0, 2.0
LONGEST_RECOVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class CoordinatorStrike:
    """Who dies in which search, and when.

    Attributes:
        kind: who dies, in words.
        sampler: what chooses the parameters.
        spares: how many ranks may take over.
        deaths: the ranks that are killed, and when, in seconds since the first trial has begun.
    """

    kind: str
    sampler: str
    spares: int
    deaths: Mapping[int, float]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return 1 + 2 * BLOCKS + self.spares

    def __str__(self) -> str:
        return f"{self.sampler}: " + ", ".join(
            f"{one} after {at_s:.2f} s" for one, at_s in self.deaths.items()
        )


@dataclass(frozen=True, slots=True)
class CoordinatorVerdict:
    """How such a strike ended.

    Attributes:
        recovered_s: for each coordinator that has died, how long after it another one has begun a trial.
    """

    recovered_s: tuple[float, ...]

    def check_times(self) -> None:
        """Check that blocks were not held up for long.

        Raises:
            AssertionError: they were.
        """
        assert max(self.recovered_s, default=0.0) < LONGEST_RECOVERY_S, self.recovered_s


def coordinator_strikes(seed: int, count: int) -> list[CoordinatorStrike]:
    """Return strikes of all kinds; the same arguments give the same ones.

    Args:
        seed: what they are drawn from.
        count: how many.
    """
    draw, chosen = random.Random(f"coordinators {seed}"), []
    for number in range(count):
        kind, sampler = _KINDS[number % len(_KINDS)], _SAMPLERS[number // len(_KINDS) % len(_SAMPLERS)]
        spares = 2 if kind == "coordinator and spare" else draw.choice([1, 2])
        first = 2 * BLOCKS + 1  # the spare that takes over
        others = {"coordinator and spare": [first], "coordinator and block": [draw.randrange(1, first)]}
        deaths = {rank: round(draw.uniform(0.0, _LATEST_S), 3) for rank in (0, *others.get(kind, ()))}
        chosen.append(CoordinatorStrike(kind, sampler, spares, deaths))
    return chosen


def strike_coordinator(strike: CoordinatorStrike, folder: Path) -> CoordinatorVerdict:
    """Run such a search with its deaths, then the same command again; return what has happened.

    Raises:
        AssertionError: anything is not as docs/searches.md promises.
    """
    status, text, died, lines = _run(strike, folder, strike.deaths)
    told = f"{strike}, status {status}:\n{text}"
    assert status == 0, told
    begun = _begun(folder)
    living = [rank for rank in range(strike.ranks) if rank not in died]
    _check(strike, folder, begun, living, told)
    again, text, _, _ = _run(strike, folder, {})
    told = f"{strike}, again, status {again}:\n{text}"
    assert again == 0, told
    assert _begun(folder) == begun, f"what had finished was trained again: {told}"
    pattern = {rank: rf"rank {rank} on \S+, which coordinated the search, has died; " for rank in died}
    starts_s = [at_s for at_s, _ in begun]
    found = (next_s(lines, pattern[rank], at_s, starts_s) for rank, at_s in died.items())
    return CoordinatorVerdict(tuple(after_s for after_s in found if after_s is not None))


def _check(
    strike: CoordinatorStrike,
    folder: Path,
    begun: list[tuple[float, int]],
    living: list[int],
    told: str,
) -> None:
    """Check that each trial was trained once, but for those of a dead block, and that all ranks know it."""
    ends = {rank: (folder / f"ended{rank}").read_text().split() for rank in living if _ended(folder, rank)}
    for rank, states in ends.items():
        assert states.count("COMPLETE") == TRIALS, f"rank {rank} has {Counter(states)}: {told}"
        assert len(states) <= TRIALS + (strike.kind == "coordinator and block"), told
    lost = {one for one in strike.deaths if 0 < one <= 2 * BLOCKS}
    silent = {rank for rank in living if rank not in ends}
    partners = {one + 1 if one % 2 else one - 1 for one in lost}
    assert silent <= partners, f"ranks {silent} have no study: {told}"
    times = Counter(number for _, number in begun)  # a retry has a number of its own
    assert max(times.values()) == 1, f"a trial was trained twice: {told}"
    assert TRIALS <= len(times) <= TRIALS + len(lost), f"{len(times)} trials have begun: {told}"
    journal = [json.loads(line) for line in (folder / "search.jsonl").read_text().splitlines()]
    assert sum(line.get("state") == "COMPLETE" for line in journal) == TRIALS, told


def _ended(folder: Path, rank: int) -> bool:
    return (folder / f"ended{rank}").exists()


def _begun(folder: Path) -> list[tuple[float, int]]:
    """When each trial was begun, and its number."""
    lines = [line.split() for path in folder.glob("begun*") for line in path.read_text().splitlines()]
    return sorted((float(at_s), int(number)) for at_s, number in lines)


def _run(
    strike: CoordinatorStrike, folder: Path, deaths: Mapping[int, float]
) -> tuple[int, str, dict[int, float], Lines]:
    """Run the search and kill; return the status, the text, when each rank was killed, and the lines."""
    for path in [*folder.glob("pid*"), *folder.glob("ended*")]:
        path.unlink()
    program = start_of(Path(__file__).with_name("coordinator_job.py"), framework="torch")
    given = [folder, strike.sampler, str(TRIALS), str(strike.spares)]
    command = [launcher(), "--with-ft", "ulfm", "-n", str(strike.ranks), *program, *given]
    members: list[psutil.Process] = []
    died: dict[int, float] = {}
    with (folder / "text").open("w+") as text:
        with (
            starting(command, text) as process,
            none_left(members),
            watched(folder / "text") as lines,
        ):
            limit_s = time.monotonic() + _END_S
            while deaths and not _begun(folder) and process.poll() is None:
                assert time.monotonic() < limit_s, f"{strike} does not begin: {(folder / 'text').read_text()}"
                time.sleep(2e-3)
            pids = {int(path.name[3:]): int(path.read_text()) for path in folder.glob("pid*")}
            members += [psutil.Process(pid) for pid in pids.values() if psutil.pid_exists(pid)]
            began_s = time.monotonic()
            for rank, after_s in sorted(deaths.items(), key=lambda one: one[1]):
                time.sleep(max(0.0, began_s + after_s - time.monotonic()))
                if process.poll() is None and not _ended(folder, rank):
                    died[rank] = time.monotonic()
                    os.kill(pids[rank], signal.SIGKILL)
            status = process.wait(_END_S)
            gone_s = until_gone(members, time.monotonic())
        text.seek(0)
        told = text.read()
    assert gone_s is not None, f"{strike} left processes {members}: {told}"
    return status, told, died, lines


def main(seed: int, count: int) -> int:
    """Strike so often, print a line for each strike and a table; return 1 if any went wrong."""
    found: dict[str, list[float]] = {}
    wrong = 0
    for number, strike in enumerate(coordinator_strikes(seed, count), 1):
        verdict, _, told = judged_apart(lambda folder, strike=strike: strike_coordinator(strike, folder))
        wrong += verdict is None
        if verdict is not None:
            found.setdefault("coordinator of a search", []).extend(verdict.recovered_s)
            told = "went on" + "".join(f", recovered within {one:.2f} s" for one in verdict.recovered_s)
        print(f"{number:4}  {strike.kind:21} {strike}: {told}", flush=True)
    print(f"\n{count} strikes, {wrong} wrong\n\n{recoveries(found)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
