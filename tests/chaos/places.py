"""Strikes on trainings whose spares train in the places of dead workers: `strikes.py --places` makes them."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.chaos import places_data
from tests.chaos.dying import POINTS, Death, plan_deaths
from tests.chaos.recovery import TAKEN_OVER, Lines, dropped, next_s, recoveries, watched
from tests.chaos.strikes import (
    LONGEST_STALL_S,
    judged_apart,
    lines_of,
    longest_gap,
    none_left,
    steps_s,
    until_gone,
)
from tests.helpers.jobs import launcher, start_of, starting

__all__ = [
    "LEAST_ACCURACY",
    "PlacesStrike",
    "PlacesVerdict",
    "places_strikes",
    "strike_all_places",
    "strike_places",
]

ALGORITHMS = ("Downpour", "Steady", "EASGD", "LocalSGD", "Synchronous")
FRONTS = ("torch", "torch", "torch", "numpy", "train")
ASSIGNMENTS = ("static", "dynamic")
WORKERS = 3
# Of a worker in an epoch.
BATCHES = places_data.SAMPLES // places_data.BATCH // WORKERS
#: A wrong training ends near a half. Right ones of a front and an algorithm, disturbed or not, differ from
#: their mean by 0.0064 (the standard deviation of 69); the lowest mean is 0.918: six deviations below it.
LEAST_ACCURACY = 0.88
_END_S = 150.0
# Their number has no factor in common with those of the algorithms, the fronts and the assignments.
_STRUCK = (
    *("worker", "two workers", "worker, then server", "worker", "worker, then its spare", "nobody"),
    *("worker", "server, then worker", "two workers", "worker and server", "worker, then server"),
    *("first spare, worker", "worker"),
)
_TAKES = re.compile(r"nnlo: rank (\d) on \S+ takes the place of worker \d \(rank (\d)\) from epoch (\d+) on")
_FINISHED = re.compile(r"finished: (\d\.\d+), |val_accuracy (\d\.\d+)")
# What ends a job whose server dies: the spare knows nothing yet.
_EARLY = ("had a copy of its state", "taking up their parts")


@dataclass(frozen=True, slots=True)
class PlacesStrike:
    """Who dies in which training, and when.

    Attributes:
        kind: who dies, in words.
        front: "torch", "numpy" (a `Participant`) or "train" (`nnlo train`, with PyTorch).
        algorithm: how it exchanges.
        assignment: "static" or "dynamic".
        deaths: the deaths.
        servers: how many there are, each with two spares.
    """

    kind: str
    front: str
    algorithm: str
    assignment: str
    deaths: tuple[Death, ...]
    servers: int = 1

    @property
    def workers(self) -> range:
        """The ranks that train."""
        return range(self.servers, self.servers + WORKERS)

    @property
    def first_spares(self) -> range:
        """The ranks that stay for the servers."""
        return range(self.workers.stop, self.workers.stop + self.servers)

    @property
    def second_spares(self) -> range:
        """The ranks that may train."""
        return range(self.first_spares.stop, self.ranks)

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return WORKERS + 3 * self.servers

    @property
    def where(self) -> str:
        """What is struck, in detail."""
        return "; ".join(map(str, self.deaths)) or "nobody"

    def __str__(self) -> str:
        servers = f", {self.servers} servers" * (self.servers > 1)
        return f"{self.front} {self.algorithm} {self.assignment}{servers}: {self.where}"


@dataclass(frozen=True, slots=True)
class PlacesVerdict:
    """How such a strike ended.

    Attributes:
        end: "place taken", "went on" without, "nobody died", or "ended and resumed".
        accuracy: of the centre at the end.
        stall_s: for how long a survivor made no step.
        twice: how many samples were trained on twice, or more often.
        recovered: for each death, who has died, and how long after it a worker has made a step without.
    """

    end: str
    accuracy: float
    stall_s: float
    twice: int
    recovered: tuple[tuple[str, float], ...] = ()

    def check_times(self) -> None:
        """Check that no survivor was held up for longer than documented.

        Raises:
            AssertionError: one was.
        """
        assert self.stall_s < LONGEST_STALL_S, f"no step for {self.stall_s:.2f} s"


def places_strikes(seed: int, count: int, servers: int = 1) -> list[PlacesStrike]:
    """Return strikes of all kinds; the same arguments give the same ones.

    Args:
        seed: what they are drawn from.
        count: how many.
        servers: how many servers each training has.
    """
    draw, chosen = random.Random(f"places {seed}"), []
    for number in range(count):
        kind, algorithm = _STRUCK[number % len(_STRUCK)], ALGORITHMS[number % len(ALGORITHMS)]
        front = draw.choice(FRONTS)
        assignment = ASSIGNMENTS[number // len(ALGORITHMS) % 2] if front == "torch" else "static"
        strike = PlacesStrike(kind, front, algorithm, assignment, (), servers)
        chosen.append(replace(strike, deaths=_deaths(draw, strike)))
    return chosen


def _deaths(draw: random.Random, strike: PlacesStrike) -> tuple[Death, ...]:
    first, second = draw.sample(strike.workers, 2)
    server = draw.randrange(strike.servers) if strike.servers > 1 else 0
    early = draw.randrange(places_data.EPOCHS - 2)
    late = draw.randint(early + 1, places_data.EPOCHS - 1)
    deaths = {
        "nobody": (),
        "worker": ((first, early),),
        "two workers": ((first, early), (second, draw.choice([early, late]))),
        "worker, then server": ((first, early), (server, late)),
        "server, then worker": ((server, early), (first, late)),
        "worker and server": ((first, early), (server, early)),
        "worker, then its spare": ((first, early), (strike.second_spares[-1], late)),
        "first spare, worker": ((strike.first_spares[0], early), (first, draw.choice([early, late]))),
    }
    return tuple(_death(draw, rank, epoch, strike) for rank, epoch in deaths[strike.kind])


def _death(draw: random.Random, rank: int, epoch: int, strike: PlacesStrike) -> Death:
    # Of `nnlo train` only the steps and files are seen; of a server and a spare no steps.
    front, serves = strike.front, rank < strike.servers
    points = [one for one in POINTS if not (serves and one == "step")]
    points = [one for one in points if one != "manifest" or (rank == 0 and front == "torch")]
    if front != "torch":
        points = [one for one in points if one in ("time", "step")]
    if rank >= strike.workers.stop:
        points = ["step"] if rank in strike.second_spares else ["time"]
    point = draw.choice(points)
    pace_s = 0.45
    number = {
        "step": draw.randint(1, BATCHES - 5),
        "part": draw.randint(1, 4),
        "manifest": draw.randint(1, 4),
    }
    if front == "train":
        number["step"] += epoch * BATCHES if rank in strike.workers else 0
        epoch = 0
    after_s = round((epoch + draw.random()) * pace_s, 3) if point == "time" else 0.0
    return Death(rank, point, epoch, number.get(point, 1), after_s)


def strike_places(strike: PlacesStrike, folder: Path) -> PlacesVerdict:
    """Run such a training with its deaths, and return what has happened.

    Raises:
        AssertionError: anything is not as docs/failures.md promises.
    """
    status, text, lines = _run(strike, folder, strike.deaths)
    told = f"{strike}, status {status}:\n{text}"
    died = _died(folder)
    servers = set(range(strike.servers)) & set(died)
    if status != 0:
        assert servers, told
        alone = set(strike.first_spares) & set(died)
        may_end = (*_EARLY, "a server of the centre has died") if alone else _EARLY
        assert any(words in text for words in may_end), told
        status, text, _ = _run(strike, folder, ())
        assert status == 0, f"{strike}, resumed, status {status}:\n{text}"
        return PlacesVerdict("ended and resumed", _accuracy(text), 0.0, 0)
    accuracy = _accuracy(text)
    assert accuracy > LEAST_ACCURACY, f"accuracy {accuracy}; {told}"
    taken = {int(spare): (int(rank), int(epoch) - 1) for spare, rank, epoch in _TAKES.findall(text)}
    assert set(taken) <= set(strike.second_spares), told  # the first ones stay for the servers
    _check_taken(strike, died, taken, folder, told)
    twice = _check_samples(strike, died, taken, folder, told)
    end = "nobody died" if not died else "place taken" if taken else "went on"
    stall_s, recovered = _stall(strike, died, folder), _recovered(strike, died, lines, folder)
    return PlacesVerdict(end, accuracy, stall_s, twice, recovered)


# -- the job ----------------------------------------------------------------------------------------------


def _run(strike: PlacesStrike, folder: Path, deaths: Sequence[Death]) -> tuple[int, str, Lines]:
    for name in ("pid*", "used*", "died*", "begun"):
        for path in folder.glob(name):
            path.unlink()
    plan_deaths(folder, deaths)
    members: list[psutil.Process] = []
    with (folder / "text").open("w+") as text:
        job = starting(_command(strike, folder), text, {"NNLO_CHAOS_FOLDER": str(folder)})
        with job as process, none_left(members), watched(folder / "text") as lines:
            limit_s = time.monotonic() + _END_S
            while process.poll() is None and len([*folder.glob("pid*")]) < strike.ranks:
                assert time.monotonic() < limit_s, f"{strike} does not begin: {(folder / 'text').read_text()}"
                time.sleep(0.01)
            members += _processes(process, folder)
            try:
                status = process.wait(_END_S)
            except subprocess.TimeoutExpired:
                text.seek(0)
                raise AssertionError(f"{strike} has not ended in {_END_S} s: {text.read()}") from None
            gone_s = until_gone(members, time.monotonic())
        text.seek(0)
        told = text.read()
    assert gone_s is not None, f"{strike} left processes {members}: {told}"
    return status, told, lines


def _command(strike: PlacesStrike, folder: Path) -> list[str | Path]:
    command = [launcher(), "--with-ft", "ulfm", "-n", str(strike.ranks)]
    here, servers = Path(__file__), str(strike.servers)
    if strike.front == "numpy":
        program = start_of(here.with_name("places_numpy_job.py"))
        return [*command, *program, folder, strike.algorithm, servers]
    if strike.front == "torch":
        program = start_of(here.with_name("places_job.py"))
        return [*command, *program, folder, strike.algorithm, strike.assignment, servers]
    for name, size, seed in (("train", places_data.SAMPLES, 0), ("val", 2000, 1)):
        _write(folder / f"{name}.h5", size, seed)
    every = ["--every", "4"] if strike.algorithm in ("EASGD", "LocalSGD") else []
    return [
        *(*command, *start_of("-m", framework="torch"), "nnlo_common", "train"),
        *("--model", here.with_name("places_model.py"), "--train", folder / "train.h5"),
        *("--val", folder / "val.h5", "--mode", strike.algorithm.lower(), *every, "--loss", "cross_entropy"),
        *("--metrics", "accuracy", "--epochs", str(places_data.EPOCHS), "--batch", str(places_data.BATCH)),
        *("--optimizer", "sgd", "--learning-rate", "0.1", "--run", folder / "run", "--checkpoint"),
        *("--servers", servers, "--spares", str(2 * strike.servers)),
    ]


def _write(path: Path, size: int, seed: int) -> None:
    import h5py  # the environment for MPICH has none

    if not path.exists():
        x, y = places_data.samples(size, seed)
        with h5py.File(path, "w") as file:
            numbers = places_data.with_numbers(x)
            file["features"], file["labels"] = numbers, y


def _processes(process: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """Return the processes of a job, also those that were started warm."""
    found = {one.pid: one for one in _children(process.pid)}
    for path in folder.glob("pid*"):
        if (text := path.read_text()) and psutil.pid_exists(int(text)):
            found[int(text)] = psutil.Process(int(text))
    return [*found.values()]


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


# -- the verdict ------------------------------------------------------------------------------------------


def _died(folder: Path) -> dict[int, float]:
    """Return when each dead rank has died."""
    paths = [path for path in folder.glob("died*") if path.suffix != ".fresh"]
    return {int(path.name[4:]): float(path.read_text()) for path in paths}


def _accuracy(text: str) -> float:
    found = _FINISHED.findall(text)
    assert found, text
    return float("".join(found[-1]))


def _steps(strike: PlacesStrike, folder: Path, rank: int, first: int) -> dict[int, Counter[int]]:
    """Return how often a rank has used each sample in each epoch.

    Args:
        strike: of which training.
        folder: has the notes.
        rank: the rank.
        first: its first epoch, for `nnlo train`, whose model does not know the epoch.
    """
    used: dict[int, Counter[int]] = {}
    for step, line in enumerate(lines_of(folder, rank)):
        _, epoch, *numbers = line.split()
        at = first + step // BATCHES if strike.front == "train" else int(epoch)
        used.setdefault(at, Counter()).update(map(int, numbers))
    return used


def _check_taken(
    strike: PlacesStrike,
    died: Mapping[int, float],
    taken: Mapping[int, tuple[int, int]],
    folder: Path,
    told: str,
) -> None:
    """Check that a second spare trains if a worker has died early enough, and only then."""
    for spare in strike.second_spares:
        rank, epoch = taken.get(spare, (None, 0))
        trained = _steps(strike, folder, spare, epoch)
        if rank is None:
            assert not trained, told
            continue
        assert rank in died, told
        assert min(trained, default=epoch) >= epoch, told
        if strike.assignment == "static" and spare not in died:
            assert trained, told
    dead = [rank for rank in died if rank in strike.workers]
    counted = strike.front != "train" or strike.algorithm != "Steady"
    if dead and counted and not {*range(strike.servers), *strike.first_spares} & set(died):
        at = _epoch_at(strike, folder, set(strike.workers) - set(dead), min(died[rank] for rank in dead))
        # The server decides at the end of this epoch or the next one; at that of the last one nobody comes.
        assert taken or at > places_data.EPOCHS - 3, told


def _epoch_at(strike: PlacesStrike, folder: Path, workers: Iterable[int], at_s: float) -> int:
    """Return the latest epoch that a worker had begun by then."""
    begun = [-1]
    for rank in workers:
        for step, line in enumerate(lines_of(folder, rank)):
            time_s, epoch, _ = line.split(maxsplit=2)
            if float(time_s) < at_s:
                begun.append(step // BATCHES if strike.front == "train" else int(epoch))
    return max(begun)


def _check_samples(
    strike: PlacesStrike,
    died: Mapping[int, float],
    taken: Mapping[int, tuple[int, int]],
    folder: Path,
    told: str,
) -> int:
    """Check that each sample of each epoch was trained on as often as it should; return how many were twice.

    Where progress ends an epoch there is no such number.
    """
    first = {spare: epoch for spare, (_, epoch) in taken.items()}
    trains = [*strike.workers, *taken]
    used = {rank: _steps(strike, folder, rank, first.get(rank, 0)) for rank in trains}
    if strike.algorithm == "Steady":
        assert all(used[rank] for rank in trains if rank not in died and rank in strike.workers), told
        return 0
    living = [rank for rank in trains if rank not in died]
    if strike.assignment == "static":
        _check_shares(used, living, first, told)
    every = _sum(epochs for rank in trains for epochs in used[rank].values())
    kept = _sum(epochs for rank in living for epochs in used[rank].values())
    twice = sum(count > places_data.EPOCHS for count in every.values())
    if 0 not in died:  # its ledger has gone back to the copy, if a worker has died, too
        assert max(kept.values()) <= places_data.EPOCHS, told
    if strike.assignment == "dynamic":
        lost = sum(every[number] < places_data.EPOCHS for number in range(places_data.SAMPLES))
        assert not lost, f"{lost} samples lost: {told}"
    return twice


def _check_shares(
    used: Mapping[int, Mapping[int, Counter[int]]], living: Sequence[int], first: Mapping[int, int], told: str
) -> None:
    """Check that each living rank has used its share of each epoch since its first one, and no other."""
    share = places_data.SAMPLES // WORKERS
    for epoch in range(places_data.EPOCHS):
        parts = [used[rank].get(epoch, Counter()) for rank in living]
        for rank, part in zip(living, parts, strict=True):
            expected = share if epoch >= first.get(rank, 0) else 0
            assert part.total() == expected, f"{rank} used {part.total()} in epoch {epoch + 1}: {told}"
        assert max(_sum(parts).values()) == 1, f"epoch {epoch + 1}: {told}"


def _sum(counts: Iterable[Counter[int]]) -> Counter[int]:
    return sum(counts, Counter())


def _stall(strike: PlacesStrike, died: Mapping[int, float], folder: Path) -> float:
    """Return for how long a survivor made no step about the time of a death."""
    survivors = [rank for rank in strike.workers if rank not in died]
    return max([0.0, *(longest_gap(folder, rank, at_s) for rank in survivors for at_s in died.values())])


def _recovered(
    strike: PlacesStrike, died: Mapping[int, float], lines: Lines, folder: Path
) -> tuple[tuple[str, float], ...]:
    """Return for each dead server and worker when a step was made without it."""
    steps = [at_s for rank in strike.workers if rank not in died for at_s in steps_s(folder, rank)]
    told = dict.fromkeys(range(strike.servers), ("server, with a spare", TAKEN_OVER))
    told |= {rank: ("worker", dropped(rank)) for rank in strike.workers}
    found = [
        (told[rank][0], next_s(lines, told[rank][1], died[rank], steps)) for rank in told if rank in died
    ]
    return tuple((kind, after_s) for kind, after_s in found if after_s is not None)


# -- the command ------------------------------------------------------------------------------------------


def strike_all_places(seed: int, count: int, jobs: int, only: int | None, servers: int) -> int:
    """Strike as often as is asked for, print a line for each strike and a table; return how many went wrong.

    Args:
        seed: what the strikes are drawn from.
        count: how many.
        jobs: how many at a time.
        only: the number of one strike to repeat; None: all.
        servers: how many servers each training has.
    """
    chosen = list(enumerate(places_strikes(seed, count, servers), 1))
    chosen = chosen if only is None else [chosen[only - 1]]
    rows: dict[str, list[PlacesVerdict | None]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(_judged, *one) for one in chosen]):
            number, strike, verdict, told = done.result()
            print(f"{number:4}  {strike.kind:21} {strike}: {told}", flush=True)
            rows.setdefault(strike.kind, []).append(verdict)
    ends = ("place taken", "went on", "nobody died", "ended and resumed")
    heads = ("who died", "strikes", *ends, "wrong", "accuracy", "longest stall", "samples used again")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for kind, found in [*sorted(rows.items()), ("all", [one for row in rows.values() for one in row])]:
        whole = [one for one in found if one is not None]
        ended = Counter("wrong" if one is None else one.end for one in found)
        least, most = (choose([one.accuracy for one in whole], default=0) for choose in (min, max))
        stall_s, twice = max([0.0, *(one.stall_s for one in whole)]), sum(one.twice for one in whole)
        cells = [kind, len(found), *(ended[name] for name in (*ends, "wrong")), f"{least:.3f} to {most:.3f}"]
        print(f"| {' | '.join(map(str, [*cells, f'{stall_s:.2f} s', twice]))} |")
    every = [
        one for row in rows.values() for verdict in row if verdict is not None for one in verdict.recovered
    ]
    kinds = {kind for kind, _ in every}
    print("\n" + recoveries({kind: [after_s for of, after_s in every if of == kind] for kind in kinds}))
    return sum(one is None for row in rows.values() for one in row)


def _judged(number: int, strike: PlacesStrike) -> tuple[int, PlacesStrike, PlacesVerdict | None, str]:
    """Strike; return what has happened, and words about it."""
    verdict, _, told = judged_apart(lambda folder: strike_places(strike, folder))
    if verdict is None:
        return number, strike, None, told
    told = f"{verdict.end}, {verdict.accuracy:.4f}, stall {verdict.stall_s:.2f} s"
    recovered = "".join(f", {kind} {after_s:.2f} s" for kind, after_s in verdict.recovered)
    return number, strike, verdict, told + recovered
