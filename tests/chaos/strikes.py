"""Kills a random rank of a training at a random moment, repeatably, and judges what becomes of it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from launch import launcher, starting

__all__ = ["Strike", "judge", "run", "strikes"]

ALGORITHMS = ("AGN", "DiLoCo", "Downpour", "DynSGD", "EASGD", "GEM", "LocalSGD", "Synchronous")
FRAMEWORKS = ("torch", "keras")
RANKS = 4
# Both small trainings: how often they train on what, in how many batches.
EPOCHS, SAMPLES, BATCH = 3, 1200, 10
_START_S, _END_S = 120.0, 60.0


@dataclass(frozen=True, slots=True)
class Strike:
    """Who is killed in which training, and when.

    Attributes:
        framework: what the training is written with.
        algorithm: how it exchanges.
        servers: how many of its four ranks serve.
        victim: the rank that is killed.
        after_s: how long after all ranks have begun; it may be after the end.
    """

    framework: str
    algorithm: str
    servers: int
    victim: int
    after_s: float


def strikes(seed: int, count: int, frameworks: tuple[str, ...] = FRAMEWORKS) -> list[Strike]:
    """Return strikes over all algorithms and frameworks; the same seed gives the same ones."""
    draw, chosen = random.Random(seed), []
    for turn in range(count):
        framework = frameworks[turn % len(frameworks)]
        algorithm = ALGORITHMS[turn // len(frameworks) % len(ALGORITHMS)]
        servers = 2 if draw.random() < 0.2 and algorithm != "GEM" else 1
        # Servers die, too, but mostly workers do.
        victim = draw.randrange(RANKS) if draw.random() < 0.3 else draw.randrange(servers, RANKS)
        chosen.append(Strike(framework, algorithm, servers, victim, round(draw.uniform(0.0, 2.5), 3)))
    return chosen


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        status: the exit status of mpiexec.
        text: all that it has printed.
        late: the victim had ended before it could be killed.
        seconds: how long it went on after the strike.
    """

    status: int
    text: str
    late: bool
    seconds: float


def run(strike: Strike, folder: Path, *, kill: bool = True) -> Outcome:
    """Run the job, strike, and wait for its end.

    Args:
        strike: what is run, and who is killed when.
        folder: where the ranks note what they do.
        kill: without it the same command runs to its end.

    Raises:
        AssertionError: the job has not ended in time; nothing of it is left then.
    """
    program = Path(__file__).with_name(f"{strike.framework}_job.py")
    job = [sys.executable, program, folder, strike.algorithm, str(strike.servers)]
    command = [launcher(), "--with-ft", "ulfm", "-n", str(RANKS), *job]
    late = False
    with (folder / "text").open("w+") as text, starting(command, text) as process:
        if kill:
            late = _strike(process, strike, folder)
        struck_s = time.monotonic()
        try:
            status = process.wait(_END_S if kill else _START_S)
        except subprocess.TimeoutExpired:
            text.seek(0)
            raise AssertionError(f"{strike} hangs:\n{text.read()}") from None
        seconds = time.monotonic() - struck_s
        text.seek(0)
        return Outcome(status, text.read(), late, seconds)


def judge(strike: Strike, outcome: Outcome, folder: Path) -> str:
    """Return how the job ended: "finished", or "ended" with a line that says why.

    Raises:
        AssertionError: neither is true.
    """
    told = f"{strike}, status {outcome.status}:\n{outcome.text}"
    if outcome.status != 0:
        assert re.search(r"nnlo: rank \d of 4 on \S+", outcome.text), told
        assert f"rank {strike.victim}" in outcome.text, told
        assert strike.victim < strike.servers or "finished" not in outcome.text, told
        return "ended"
    if strike.victim < strike.servers:
        # With the server that speaks for all its last word may have died, after all had left.
        _check_samples(strike, folder, told)
        return "finished"
    assert "finished: " in outcome.text, told
    died = f"rank {strike.victim} on" in outcome.text
    assert died or outcome.late or _all_used(strike, folder, strike.victim), told
    _check_samples(strike, folder, told)
    return "finished"


def _strike(process: subprocess.Popen[str], strike: Strike, folder: Path) -> bool:
    """Kill the victim; say whether it had gone before."""
    limit_s = time.monotonic() + _START_S
    while len(list(folder.glob("pid*"))) < RANKS:
        assert process.poll() is None, f"{strike} ended before it began: {(folder / 'text').read_text()}"
        assert time.monotonic() < limit_s, f"{strike} does not begin: {(folder / 'text').read_text()}"
        time.sleep(0.01)
    time.sleep(strike.after_s)
    try:
        os.kill(int((folder / f"pid{strike.victim}").read_text()), signal.SIGKILL)
    except ProcessLookupError:
        return True
    return False


def _used(folder: Path, rank: int) -> Counter[str]:
    path = folder / f"used{rank}"
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


def _all_used(strike: Strike, folder: Path, rank: int) -> bool:
    """Whether a worker has made all its steps; only known where its share is fixed."""
    share = SAMPLES // (RANKS - strike.servers) // BATCH * EPOCHS
    return strike.framework == "torch" or _used(folder, rank).total() == share


def _check_samples(strike: Strike, folder: Path, told: str) -> None:
    """Check that each sample of each epoch was trained on: by the living once, by the dead once more."""
    living = [rank for rank in range(strike.servers, RANKS) if rank != strike.victim]
    if strike.framework == "keras":  # each has a fixed share
        assert all(_all_used(strike, folder, rank) for rank in living), told
        return
    used = sum((_used(folder, rank) for rank in living), Counter())
    assert max(used.values(), default=0) <= 1, told
    everything = {f"{epoch} {number}" for epoch in range(EPOCHS) for number in range(SAMPLES)}
    assert used.keys() | _used(folder, strike.victim).keys() == everything, told
