"""Kills a rank of a training, or its launcher, again and again, repeatably, and judges what becomes of it.

    python -m tests.chaos.strikes
    python -m tests.chaos.strikes --count 200 --seed 6
    python -m tests.chaos.strikes --count 200 --seed 6 --only 17
    python -m tests.chaos.strikes --count 40 --heir
    python -m tests.chaos.strikes --count 40 --places

It uses the MPI of the running Python, prints a line for each strike, and sums up. The exit status is 1 if any
went wrong; what is left of those stays in their folders.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
import psutil

from nnlo_common.training.checkpoint import SavedCheckpoint, Store
from tests.chaos import moments
from tests.chaos.recovery import TAKEN_OVER, Lines, dropped, next_s, recoveries, watched
from tests.helpers.jobs import launcher, running_mpi, start_of, starting

__all__ = [
    "FRAMEWORKS",
    "LAUNCHER",
    "LONGEST_STALL_S",
    "Outcome",
    "Strike",
    "Verdict",
    "judge",
    "judge_resumed",
    "judged_apart",
    "lines_of",
    "longest_gap",
    "none_left",
    "run",
    "steps_s",
    "strike_and_judge",
    "strikes",
    "until_gone",
]

ALGORITHMS = ("AGN", "DiLoCo", "Downpour", "DynSGD", "EASGD", "GEM", "LocalSGD", "Synchronous")
FRAMEWORKS = ("torch", "keras")
RANKS = 4
#: The victim that is no rank.
LAUNCHER = -1
# Both small trainings: how often they train on what.
EPOCHS, SAMPLES = 3, 1200
#: How long a worker may go without a step when another dies.
LONGEST_STALL_S = 2.0
#: How long a job may take to end, with all its processes, when a rank or the launcher dies.
LONGEST_END_S = 15.0
_START_S, _END_S = 180.0, 120.0
# One after another; as their number has no factor in common with that of the algorithms, all meet.
_STRUCK = ("worker", "part", "launcher", "worker", "close", "server", "manifest", "worker", "finalize")


@dataclass(frozen=True, slots=True)
class Strike:
    """Who is killed in which training, and when.

    Attributes:
        framework: what the training is written with.
        algorithm: how it exchanges.
        servers: how many of its ranks serve; one more than four if two do, and are replaced.
        victim: the rank that is killed, or `LAUNCHER`.
        after_s: how long after all ranks have begun; it may be after the end. Without a moment only.
        ulfm: whether the launcher lets the others go on.
        moment: where the victim waits to be killed, one of `moments`; empty: nowhere.
        turn: in which of its writes, if the moment is within one.
        spares: how many of the ranks may take over from the server: the last ones.
        heir: the first worker may, or for each server one.
    """

    framework: Literal["torch", "keras"]
    algorithm: str
    servers: int
    victim: int
    after_s: float = 0.0
    ulfm: bool = True
    moment: str = ""
    turn: int = 1
    spares: int = 0
    heir: bool = False

    @property
    def replaced(self) -> bool:
        """Whether a dead server is replaced."""
        return self.spares > 0 or self.heir

    @property
    def heir_of_victim(self) -> set[int]:
        """The worker that serves once the victim is dead, if one does."""
        return {self.servers + self.victim} if self.heir and 0 <= self.victim < self.servers else set()

    @property
    def workers(self) -> range:
        """The ranks that train."""
        return range(self.servers, self.ranks - self.spares)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return RANKS + (self.replaced and self.servers > 1)

    @property
    def kind(self) -> str:
        """What is struck, in one word or two."""
        if self.spares and not self.moment and self.victim not in (LAUNCHER, *self.workers):
            spared = "server with a spare" if self.servers == 1 else "server of two with a spare"
            return spared if self.victim < self.servers else "spare"
        if self.heir and 0 <= self.victim < 2 * self.servers and not self.moment:
            return "server with an heir" if self.victim < self.servers else "worker that is an heir"
        if self.moment:
            return "half-written file" if self.moment in moments.WRITING else "leaving"
        if self.victim == LAUNCHER:
            return "launcher"
        return "server" if self.victim < self.servers else "worker"

    @property
    def role(self) -> str:
        """Who is killed, as the table of the times to recover says it."""
        if self.victim in self.workers:
            return "worker"
        if not 0 <= self.victim < self.servers:
            return "launcher" if self.victim == LAUNCHER else "spare"
        server = "server" if self.servers == 1 else "one of two servers"
        return f"{server}, with {'a spare' if self.spares else 'an heir' if self.heir else 'nobody'}"

    @property
    def where(self) -> str:
        """What is struck, in detail."""
        role = (
            "server" if self.victim < self.servers else "worker" if self.victim in self.workers else "spare"
        )
        rank = f"{role} {self.victim}{', spared' if self.spares else ', with an heir' if self.heir else ''}"
        match self.moment:
            case "part":
                return f"{rank} within its part {self.turn}"
            case "manifest":
                return f"{rank} within manifest {self.turn}"
            case "close":
                return f"{rank} before it leaves"
            case "finalize":
                return f"{rank} in MPI_Finalize"
        return f"{'launcher' if self.victim == LAUNCHER else rank} after {self.after_s:.2f} s"


def strikes(
    seed: int,
    count: int,
    frameworks: Sequence[Literal["torch", "keras"]] = FRAMEWORKS,
    *,
    ulfm: bool = True,
    spared: bool = False,
    heir: bool = False,
) -> list[Strike]:
    """Return strikes over all kinds, algorithms and frameworks; the same arguments give the same ones.

    Args:
        seed: what they are drawn from.
        count: how many.
        frameworks: what the trainings are written with.
        ulfm: half of them are of trainings in which the launcher lets the others go on.
        spared: all of them are, and have a spare, every fifth one for two servers; no launcher is killed.
        heir: the same trainings, but workers take the places of servers.
    """
    if heir:
        return [replace(one, spares=0, heir=True) for one in strikes(seed, count, frameworks, spared=True)]
    draw, draw_spares, draw_servers = (random.Random(seed) for _ in range(3))
    chosen = []
    for number in range(count):
        framework, turn = frameworks[number % len(frameworks)], number // len(frameworks)
        algorithm, struck = ALGORITHMS[turn % len(ALGORITHMS)], _STRUCK[turn % len(_STRUCK)]
        servers = 2 if draw.random() < 0.2 and algorithm != "GEM" else 1
        victim = {
            "worker": draw.randrange(servers, RANKS),
            "server": draw.randrange(servers),
            "launcher": LAUNCHER,
            "manifest": 0,  # the first server writes it
        }.get(struck, draw.randrange(RANKS))
        after_s, lets_go_on = round(draw.uniform(0.0, 2.5), 3), draw.random() < 0.5
        moment = struck if struck in moments.WRITING + moments.LEAVING else ""
        strike = Strike(
            framework,
            algorithm,
            servers,
            victim,
            0.0 if moment else after_s,
            ulfm and lets_go_on,
            moment,
            draw.randrange(1, 4),
            spares=int(ulfm and lets_go_on and servers == 1 and draw_spares.random() < 0.6),
        )
        if spared:
            victim = draw_spares.randrange(RANKS) if victim == LAUNCHER else victim
            victim = draw_spares.choice([0, victim])
            if moment in moments.WRITING and victim == RANKS - 1:
                victim = 0  # a spare writes nothing
            strike = replace(strike, servers=1, victim=victim, ulfm=True, spares=1)
            if turn % 5 == 3 and algorithm != "GEM":  # one server and one rank more
                moved = victim + (victim > 0 or (moment != "manifest" and draw_servers.random() < 0.5))
                strike = replace(strike, servers=2, victim=moved)
        chosen.append(strike)
    return chosen


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        status: the exit status of mpiexec.
        text: all that it has printed.
        late: the victim had ended before it could be killed.
        struck_s: when it was killed, on the clock that the ranks' notes have, too.
        end_s: how long after that the last process of the job has ended.
        lines: what it has printed, with times.
    """

    status: int
    text: str
    late: bool
    struck_s: float
    end_s: float
    lines: Lines


class _Timed(Protocol):
    def check_times(self) -> None: ...


_VerdictT = TypeVar("_VerdictT", bound=_Timed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a strike ended.

    Attributes:
        end: "went on", "ended and resumed", or "had finished" before it was killed, but for its last words.
        stall_s: for how long a survivor made no step.
        end_s: how long the job took to end.
        recovered_s: how long after the death a worker has made a step without the dead rank; None: none has.
    """

    end: str
    stall_s: float = 0.0
    end_s: float = 0.0
    recovered_s: float | None = None

    def check_times(self) -> None:
        """Check that nobody was held up for longer than documented.

        Raises:
            AssertionError: somebody was.
        """
        assert self.stall_s < LONGEST_STALL_S, f"no step for {self.stall_s:.2f} s"
        assert self.end_s < LONGEST_END_S, f"ended after {self.end_s:.2f} s"


class LostSamplesError(AssertionError):
    """Samples were not trained on as often as they should; `count` of them."""

    def __init__(self, count: int, told: str) -> None:
        super().__init__(f"{count} samples lost or counted twice: {told}")
        self.count = count


def strike_and_judge(strike: Strike, folder: Path) -> Verdict:
    """Strike; where the job ends, run the same command to its end; return what has happened.

    Raises:
        AssertionError: anything is not as docs/failures.md promises.
    """
    outcome = run(strike, folder)
    if judge(strike, outcome, folder) == "ended":
        judge_resumed(strike, run(strike, folder, kill=False), folder)
        return Verdict("ended and resumed", end_s=outcome.end_s)
    alone = strike.victim < strike.servers and not strike.replaced
    if alone or outcome.late or not _died(strike, outcome):
        return Verdict("had finished")
    stall_s, recovered_s = stall(strike, outcome, folder), _recovered_s(strike, outcome, folder)
    return Verdict("went on", stall_s, recovered_s=recovered_s)


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
    moments.plan(folder, strike.moment if kill else "", strike.victim, strike.turn)
    if strike.moment in moments.WRITING:
        _plant(folder / "run")
    program = Path(__file__).with_name(f"{strike.framework}_job.py")
    # Ranks that were started warm are no children of the launcher, and might outlive it for that reason.
    start = [sys.executable, program] if strike.victim == LAUNCHER and kill else start_of(program)
    options = ["--with-ft", "ulfm"] if strike.ulfm else []
    command = [launcher(), *options, "-n", str(strike.ranks), *start]
    late, members = False, []
    with (folder / "text").open("w+") as text:
        given = [folder, strike.algorithm, str(strike.servers), str(strike.spares), str(int(strike.heir))]
        job = starting([*command, *given], text)
        with job as process, none_left(members), watched(folder / "text") as lines:
            if kill:
                late = _strike(process, strike, folder, members)
            struck_s = time.monotonic()
            limit_s = _END_S if kill else _START_S + _END_S
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                text.seek(0)
                raise AssertionError(f"{strike} has not ended in {limit_s} s: {text.read()}") from None
            end_s = until_gone(members, struck_s)
        text.seek(0)
        told = text.read()
    assert end_s is not None, f"{strike} left processes {members}: {told}"
    late |= strike.victim == LAUNCHER and kill and status != -signal.SIGKILL
    return Outcome(status, told, late, struck_s, end_s, lines)


def judge(strike: Strike, outcome: Outcome, folder: Path) -> str:
    """Return how the job ended: "finished", or "ended" with a line that says why.

    Raises:
        AssertionError: neither is true, or a checkpoint is not what was written.
    """
    told = f"{strike}, status {outcome.status}:\n{outcome.text}"
    _check_checkpoints(folder, told)
    if strike.victim == LAUNCHER and not outcome.late:
        assert "Traceback" not in outcome.text, told
        return "ended"
    serves = strike.victim < strike.servers and not strike.replaced
    if outcome.status != 0:
        early = "had a copy" in outcome.text or "taking up their parts" in outcome.text
        assert not strike.replaced or early, told
        # Where all are ended at once the launcher may be quicker than any rank; MPICH's names the process.
        assert f"rank {strike.victim}" in outcome.text or "BAD TERMINATION" in outcome.text, told
        assert not strike.ulfm or re.search(rf"nnlo: rank \d of {strike.ranks} on \S+", outcome.text), told
        assert serves or not strike.ulfm or "finished" not in outcome.text, told
        return "ended"
    _check_leftovers(folder, told)
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
    if strike.moment not in moments.LEAVING:  # else there may be nothing left to save
        _check_leftovers(folder, told)


def stall(strike: Strike, outcome: Outcome, folder: Path) -> float:
    """Return for how long, in seconds, a living worker made no step about the time of the strike."""
    longest_s = 0.0
    for rank in strike.workers:
        if rank not in {strike.victim} | strike.heir_of_victim:
            longest_s = max(longest_s, longest_gap(folder, rank, outcome.struck_s))
    return longest_s


def longest_gap(folder: Path, rank: int, struck_s: float) -> float:
    """Return for how long, in seconds, a rank made no step about the time of a strike."""
    pairs = itertools.pairwise(steps_s(folder, rank))
    near = [after - before for before, after in pairs if before < struck_s + 1 and after > struck_s]
    return max(near, default=0.0)


def steps_s(folder: Path, rank: int) -> list[float]:
    """Return when a rank has made each of its steps."""
    return [float(line.split(maxsplit=1)[0]) for line in lines_of(folder, rank)]


def _recovered_s(strike: Strike, outcome: Outcome, folder: Path) -> float | None:
    pattern = TAKEN_OVER if strike.victim < strike.servers else dropped(strike.victim)
    living = set(strike.workers) - {strike.victim} - strike.heir_of_victim
    steps = (at_s for rank in living for at_s in steps_s(folder, rank))
    return next_s(outcome.lines, pattern, outcome.struck_s, steps)


def _strike(
    process: subprocess.Popen[str], strike: Strike, folder: Path, members: list[psutil.Process]
) -> bool:
    """Kill the victim; say whether it had gone before; add all processes of the job to `members`."""
    limit_s = time.monotonic() + _START_S
    while len(_pids(folder)) < strike.ranks:
        assert process.poll() is None, f"{strike} ended before it began: {(folder / 'text').read_text()}"
        assert time.monotonic() < limit_s, f"{strike} does not begin: {(folder / 'text').read_text()}"
        time.sleep(0.01)
    with contextlib.suppress(psutil.NoSuchProcess):
        members += psutil.Process(process.pid).children(recursive=True)
    pids = _pids(folder)
    for pid in {*pids.values()} - {one.pid for one in members}:  # those that were started warm
        with contextlib.suppress(psutil.NoSuchProcess):
            members.append(psutil.Process(pid))
    if strike.moment:
        while not moments.reached(folder):
            if process.poll() is not None:
                return True
            assert time.monotonic() < limit_s, f"{strike} never comes: {(folder / 'text').read_text()}"
            time.sleep(1e-3)
    else:
        time.sleep(strike.after_s)
    try:
        os.kill(pids.get(strike.victim, process.pid), signal.SIGKILL)
    except ProcessLookupError:
        return True
    return False


def _pids(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks that have written them, by rank."""
    texts = {int(path.name[3:]): path.read_text() for path in folder.glob("pid*")}
    return {rank: int(text) for rank, text in texts.items() if text}


@contextlib.contextmanager
def none_left(members: list[psutil.Process]) -> Iterator[None]:
    """End what is left of a job, also where its launcher is gone."""
    try:
        yield
    finally:
        for one in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def until_gone(members: list[psutil.Process], since_s: float) -> float | None:
    """Wait for the end of the processes; return when the last one had ended, None if any has not."""
    while time.monotonic() < since_s + _END_S:
        if not any(map(_runs, members)):
            return time.monotonic() - since_s
        time.sleep(0.01)
    return None


def _runs(process: psutil.Process) -> bool:
    try:
        # Nobody may wait for a process whose launcher is gone.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _plant(folder: Path) -> None:
    """Leave what a writer leaves that is killed: half of a file in a folder, half of a file."""
    (folder / "checkpoint-000007.part").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint-000007.part" / "rank1.pt").write_bytes(b"PK\3\4 half")
    (folder / "checkpoint-000007.part" / "manifest.json").write_text('{"number": 7, "files": {"rank1.pt"')
    (folder / "checkpoint-000008.part").write_bytes(b"half")


def _died(strike: Strike, outcome: Outcome) -> bool:
    return f"rank {strike.victim} on" in outcome.text


def lines_of(folder: Path, rank: int) -> list[str]:
    """Return the notes of a rank's steps; a killed one may have begun another."""
    path = folder / f"used{rank}"
    return path.read_text().splitlines() if path.exists() else []


def _used(folder: Path, rank: int) -> Counter[int]:
    return Counter(int(number) for line in lines_of(folder, rank) for number in line.split()[1:])


def _check_used(strike: Strike, folder: Path, told: str) -> None:
    """Check that each sample of each epoch was trained on: by the living, or once more than by the dead.

    A worker that serves since the server's death counts as dead: it trains no more.
    """
    gone = {strike.victim} | strike.heir_of_victim
    used = sum((_used(folder, rank) for rank in strike.workers if rank not in gone), Counter())
    dead = sum((_used(folder, rank) for rank in gone), Counter())
    assert max(used.values(), default=0) <= EPOCHS, told
    lost = sum(used[number] + dead[number] < EPOCHS for number in range(SAMPLES))
    if lost:
        raise LostSamplesError(lost, told)


def _check_times(strike: Strike, folder: Path, told: str) -> None:
    """Check that each sample was trained on once in each epoch, by what the workers' checkpoints kept."""
    paths = [folder / f"times{rank}.npy" for rank in strike.workers]
    assert all(path.exists() for path in paths), told
    times = sum(np.load(path) for path in paths)
    if (times != EPOCHS).any():
        counts = f"{dict(Counter(times.tolist()))} instead of {EPOCHS} times"
        raise LostSamplesError(int((times != EPOCHS).sum()), f"{counts}; {told}")


def _check_checkpoints(folder: Path, told: str) -> None:
    """Check that every checkpoint that is there is whole, and that the newest would be taken."""
    numbers = [int(path.name[-6:]) for path in (folder / "run").glob("checkpoint-??????")]
    for number in numbers:
        SavedCheckpoint.open(folder / "run" / f"checkpoint-{number:06d}", number).verify()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = Store(folder / "run").newest()
    assert (newest.manifest.number if newest else 0) == max(numbers, default=0), told


def _check_leftovers(folder: Path, told: str) -> None:
    """Check that what killed writers have left is gone."""
    left = [path.name for path in (folder / "run").glob("checkpoint-*.*")]
    assert not left, f"{left} in {told}"


# -- the command ------------------------------------------------------------------------------------------


def main() -> int:
    """Strike as often as was asked for, and say what became of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--seed", type=int, default=6)
    options.add_argument("--jobs", type=int, default=1, help="how many at a time; stalls get longer")
    options.add_argument("--spared", action="store_true", help="only trainings with a spare")
    options.add_argument("--heir", action="store_true", help="only trainings in which workers are heirs")
    options.add_argument("--servers", type=int, help="only trainings of so many servers")
    options.add_argument("--only", type=int, help="the number of one strike to repeat")
    options.add_argument("--places", action="store_true", help="only trainings whose second spare may train")
    given = options.parse_args()
    if given.places:
        from tests.chaos.places import strike_all_places  # which uses this module

        servers = given.servers or 1
        return int(strike_all_places(given.seed, given.count, given.jobs, given.only, servers) > 0)
    mpi, table = running_mpi(), _Table()
    kinds = {"ulfm": mpi == "Open MPI", "spared": given.spared, "heir": given.heir}
    chosen = list(enumerate(strikes(given.seed, given.count, **kinds), 1))
    if given.only is not None:
        chosen = [chosen[given.only - 1]]
    chosen = [one for one in chosen if given.servers in (None, one[1].servers)]
    with ThreadPoolExecutor(given.jobs) as jobs:
        for done in as_completed([jobs.submit(_judged, *one) for one in chosen]):
            number, strike, verdict, lost, told = done.result()
            name = f"{mpi}, ulfm" if strike.ulfm else mpi
            what = f"{number:4}  {name:14} {strike.framework:5} {strike.algorithm:11} {strike.where:32}"
            print(f"{what} {told}", flush=True)
            table.add(name, strike, verdict, lost)
    print(table.text())
    return int(table.wrong > 0)


def judged_apart(judge: Callable[[Path], _VerdictT]) -> tuple[_VerdictT | None, Exception | None, str]:
    """Judge a strike in a folder of its own; return the verdict, or the error and words about it.

    The folder of a strike that went wrong is kept, with the error in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="nnlo-strike-"))
    try:
        verdict = judge(folder)
        verdict.check_times()
    except Exception as error:  # the other strikes go on
        (folder / "wrong").write_text("".join(traceback.format_exception(error)))
        return None, error, f"WRONG: see {folder}/wrong"
    shutil.rmtree(folder)
    return verdict, None, ""


def _judged(number: int, strike: Strike) -> tuple[int, Strike, Verdict | None, int, str]:
    """Strike; return what has happened, how many samples were lost, and words about it."""
    verdict, error, told = judged_apart(lambda folder: strike_and_judge(strike, folder))
    if verdict is None:
        return number, strike, None, getattr(error, "count", 0), told
    times = {
        "went on": f", longest stall {verdict.stall_s:.2f} s{_recovered(verdict.recovered_s)}",
        "ended and resumed": f", ended within {verdict.end_s:.2f} s",
    }
    return number, strike, verdict, 0, f"{verdict.end}{times.get(verdict.end, '')}"


def _recovered(after_s: float | None) -> str:
    return "" if after_s is None else f", recovered within {after_s:.2f} s"


class _Table:
    """Sums of the strikes, by MPI, framework and kind."""

    def __init__(self) -> None:
        self.wrong = 0
        self._rows: dict[tuple[str, str, str], list[tuple[Verdict | None, int]]] = {}
        self._recovered: dict[str, list[float]] = {}

    def add(self, mpi: str, strike: Strike, verdict: Verdict | None, lost: int) -> None:
        """Add a strike; without a verdict something went wrong."""
        self.wrong += verdict is None
        self._rows.setdefault((mpi, strike.framework, strike.kind), []).append((verdict, lost))
        if verdict is not None and verdict.recovered_s is not None:
            self._recovered.setdefault(strike.role, []).append(verdict.recovered_s)

    def text(self) -> str:
        """Return the table, with a line for all of them."""
        heads = (
            *("MPI", "framework", "struck", "strikes", "went on", "ended and resumed", "had finished"),
            *("wrong", "samples lost", "longest stall", "longest end"),
        )
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for key, row in sorted(self._rows.items()):
            lines.append(self._line(" | ".join(key), row))
        everything = [one for row in self._rows.values() for one in row]
        return "\n".join([*lines, self._line("all | |", everything), "", recoveries(self._recovered)])

    @staticmethod
    def _line(name: str, row: Sequence[tuple[Verdict | None, int]]) -> str:
        ends = Counter("wrong" if verdict is None else verdict.end for verdict, _ in row)
        verdicts = [verdict for verdict, _ in row if verdict is not None]
        stall_s = max((one.stall_s for one in verdicts if one.end == "went on"), default=None)
        end_s = max((one.end_s for one in verdicts if one.end == "ended and resumed"), default=None)
        parts = [
            *(
                name,
                len(row),
                ends["went on"],
                ends["ended and resumed"],
                ends["had finished"],
                ends["wrong"],
            ),
            sum(lost for _, lost in row),
            *("" if one is None else f"{one:.2f} s" for one in (stall_s, end_s)),
        ]
        return f"| {' | '.join(map(str, parts))} |"


if __name__ == "__main__":
    sys.exit(main())
