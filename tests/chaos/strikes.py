"""Kills a random rank of a training at a random moment, repeatably, and judges what becomes of it."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nnlo_common.training.checkpoint import SavedCheckpoint, Store
from tests.helpers.jobs import launcher, starting

__all__ = ["Outcome", "Strike", "judge", "judge_resumed", "run", "strikes"]

ALGORITHMS = ("AGN", "DiLoCo", "Downpour", "DynSGD", "EASGD", "GEM", "LocalSGD", "Synchronous")
FRAMEWORKS = ("torch", "keras")
RANKS = 4
# Both small trainings: how often they train on what.
EPOCHS, SAMPLES = 3, 1200
#: How long a worker may go without a step when another dies.
LONGEST_STALL_S = 2.0
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
        ulfm: whether the launcher lets the others go on.
    """

    framework: str
    algorithm: str
    servers: int
    victim: int
    after_s: float
    ulfm: bool = True


def strikes(seed: int, count: int, frameworks: tuple[str, ...] = FRAMEWORKS) -> list[Strike]:
    """Return strikes over all algorithms and frameworks; the same seed gives the same ones."""
    draw, chosen = random.Random(seed), []
    for turn in range(count):
        framework = frameworks[turn % len(frameworks)]
        algorithm = ALGORITHMS[turn // len(frameworks) % len(ALGORITHMS)]
        servers = 2 if draw.random() < 0.2 and algorithm != "GEM" else 1
        # Servers die, too, but mostly workers do.
        victim = draw.randrange(RANKS) if draw.random() < 0.3 else draw.randrange(servers, RANKS)
        after_s, ulfm = round(draw.uniform(0.0, 2.5), 3), draw.random() < 0.7
        chosen.append(Strike(framework, algorithm, servers, victim, after_s, ulfm))
    return chosen


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        status: the exit status of mpiexec.
        text: all that it has printed.
        late: the victim had ended before it could be killed.
        struck_s: when it was killed, on the clock that the ranks' notes have, too.
    """

    status: int
    text: str
    late: bool
    struck_s: float


def run(strike: Strike, folder: Path, *, kill: bool = True) -> Outcome:
    """Run the job, strike, and wait for its end.

    Args:
        strike: what is run, and who is killed when.
        folder: where the ranks note what they do, and have their checkpoints.
        kill: without it the same command runs to its end.

    Raises:
        AssertionError: the job has not ended in time; nothing of it is left then.
    """
    for name in ("pid*", "used*", "times*"):
        for path in folder.glob(name):
            path.unlink()
    program = Path(__file__).with_name(f"{strike.framework}_job.py")
    job = [sys.executable, program, folder, strike.algorithm, str(strike.servers)]
    options = ["--with-ft", "ulfm"] if strike.ulfm else []
    command = [launcher(), *options, "-n", str(RANKS), *job]
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
        text.seek(0)
        return Outcome(status, text.read(), late, struck_s)


def judge(strike: Strike, outcome: Outcome, folder: Path) -> str:
    """Return how the job ended: "finished", or "ended" with a line that says why.

    Raises:
        AssertionError: neither is true, or a checkpoint is not what was written.
    """
    told = f"{strike}, status {outcome.status}:\n{outcome.text}"
    _check_checkpoints(folder, told)
    serves = strike.victim < strike.servers
    if outcome.status != 0:
        # Where all are ended at once the launcher may be quicker than any rank.
        assert f"rank {strike.victim}" in outcome.text, told
        assert not strike.ulfm or re.search(r"nnlo: rank \d of 4 on \S+", outcome.text), told
        assert serves or not strike.ulfm or "finished" not in outcome.text, told
        return "ended"
    if outcome.late or (serves and strike.ulfm) or not _died(strike, outcome):
        # Whom nobody misses had done everything; with the first server its last word may have died.
        _check_times(strike, folder, told)
        return "finished"
    assert strike.ulfm, told
    assert "finished: " in outcome.text, told
    _check_used(strike, folder, told)
    return "finished"


def judge_resumed(strike: Strike, outcome: Outcome, folder: Path) -> None:
    """Check that the same command has brought the training to its end, each sample as often as it should.

    Raises:
        AssertionError: it has not.
    """
    told = f"{strike}, resumed, status {outcome.status}:\n{outcome.text}"
    assert outcome.status == 0, told
    assert "finished: ()" in outcome.text, told
    _check_checkpoints(folder, told)
    _check_times(strike, folder, told)


def stall(strike: Strike, outcome: Outcome, folder: Path) -> float:
    """Return for how long, in seconds, a living worker made no step about the time of the strike."""
    longest_s = 0.0
    for rank in range(strike.servers, RANKS):
        if rank != strike.victim:
            at_s = [float(line.split(maxsplit=1)[0]) for line in _lines(folder, rank)]
            gaps = [
                after - before
                for before, after in itertools.pairwise(at_s)
                if before < outcome.struck_s + 1 and after > outcome.struck_s
            ]
            longest_s = max([longest_s, *gaps])
    return longest_s


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


def _died(strike: Strike, outcome: Outcome) -> bool:
    return f"rank {strike.victim} on" in outcome.text


def _lines(folder: Path, rank: int) -> list[str]:
    path = folder / f"used{rank}"
    return path.read_text().splitlines() if path.exists() else []


def _used(folder: Path, rank: int) -> Counter[int]:
    return Counter(int(number) for line in _lines(folder, rank) for number in line.split()[1:])


def _check_used(strike: Strike, folder: Path, told: str) -> None:
    """Check that each sample of each epoch was trained on: by the living, or once more than by the dead."""
    living = [rank for rank in range(strike.servers, RANKS) if rank != strike.victim]
    used = sum((_used(folder, rank) for rank in living), Counter())
    dead = _used(folder, strike.victim)
    assert max(used.values(), default=0) <= EPOCHS, told
    assert all(used[number] + dead[number] >= EPOCHS for number in range(SAMPLES)), told


def _check_times(strike: Strike, folder: Path, told: str) -> None:
    """Check that each sample was trained on once in each epoch, by what the workers' checkpoints kept."""
    paths = [folder / f"times{rank}.npy" for rank in range(strike.servers, RANKS)]
    assert all(path.exists() for path in paths), told
    times = sum(np.load(path) for path in paths)
    assert (times == EPOCHS).all(), f"{dict(Counter(times.tolist()))} instead of {EPOCHS} times; {told}"


def _check_checkpoints(folder: Path, told: str) -> None:
    """Check that every checkpoint that is there is whole, and that the newest would be taken."""
    numbers = [int(path.name[-6:]) for path in (folder / "run").glob("checkpoint-??????")]
    for number in numbers:
        SavedCheckpoint.open(folder / "run" / f"checkpoint-{number:06d}", number).verify()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = Store(folder / "run").newest()
    assert (newest.manifest.number if newest else 0) == max(numbers, default=0), told
