"""What a rank of a strike on places does: it notes its steps, and kills itself where that is planned."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mpi4py import MPI

from tests.chaos import moments

__all__ = ["POINTS", "Death", "Notes", "die_when_saved", "plan_deaths"]

#: After so many seconds; within an epoch, after so many batches; at its begin or end, or in its evaluation;
#: in the middle of a file of a checkpoint.
POINTS = ("time", "step", "begin", "end", "evaluation", *moments.WRITING)


@dataclass(frozen=True, slots=True)
class Death:
    """The planned death of a rank; it may never come there.

    Attributes:
        rank: who.
        point: one of `POINTS`.
        epoch: of the points within an epoch, from 0.
        number: batches of this epoch, or writes.
        after_s: since the first step of any worker.
    """

    rank: int
    point: str
    epoch: int = 0
    number: int = 1
    after_s: float = 0.0

    def __str__(self) -> str:
        when = {
            "time": f"after {self.after_s:.2f} s",
            "step": f"after batch {self.number} of epoch {self.epoch + 1}",
            "part": f"in its write {self.number}",
            "manifest": f"in manifest {self.number}",
        }
        return f"{self.rank} {when.get(self.point, f'at {self.point} of epoch {self.epoch + 1}')}"


def plan_deaths(folder: Path, deaths: Sequence[Death]) -> None:
    """Let ranks of the next job die.

    Args:
        folder: where the ranks note what they do.
        deaths: who, and when.
    """
    (folder / "deaths.json").write_text(json.dumps([asdict(one) for one in deaths]))


def die_when_saved(rank: int, folder: str) -> None:
    """Kill this process once the first checkpoint of a run of `nnlo train` is there, if it is that rank.

    Args:
        rank: the rank.
        folder: of the run.
    """

    def wait_and_die() -> None:
        while not [*Path(folder).glob("checkpoint/checkpoint-??????")]:
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGKILL)

    if MPI.COMM_WORLD.Get_rank() == rank:
        threading.Thread(target=wait_and_die, daemon=True).start()


class Notes:
    """What this rank notes of its steps; make it before the training begins.

    Args:
        folder: of all notes.
        rank: this rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        plan = [Death(**one) for one in json.loads((folder / "deaths.json").read_text())]
        self._deaths = [one for one in plan if one.rank == rank]
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        self._used = (folder / f"used{rank}").open("a")
        self._taken: dict[int, int] = {}
        self._trains = threading.Lock()  # free as long as this rank may die
        moments.write_where_it_hangs(folder, rank)
        for one in self._deaths:
            if one.point == "time":
                threading.Thread(target=self._die_later, args=(one,), daemon=True).start()
            elif one.point in moments.WRITING:
                moments.within_a_write(one.point, one.number, self._die)

    def trained(self, epoch: int, numbers: Iterable[int]) -> None:
        """Note a step with these samples."""
        self._used.write(f"{time.monotonic()} {epoch} {' '.join(map(str, numbers))}\n")
        self._used.flush()
        (self._folder / "begun").touch()
        taken = self._taken[epoch] = self._taken.get(epoch, 0) + 1
        self._die_if("step", epoch, taken)

    def at(self, point: str, epoch: int) -> None:
        """Note that this rank has come to a point of an epoch."""
        self._die_if(point, epoch, 1)

    def over(self) -> None:
        """Live on: what a script does after its training no other rank does in its place."""
        self._trains.acquire()

    def _die_if(self, point: str, epoch: int, number: int) -> None:
        if any((one.point, one.epoch, one.number) == (point, epoch, number) for one in self._deaths):
            self._die()

    def _die_later(self, death: Death) -> None:
        while not (self._folder / "begun").exists():
            time.sleep(1e-3)
        time.sleep(death.after_s)
        self._die()

    def _die(self) -> None:
        self._trains.acquire()  # for ever, once the training is over
        fresh = self._folder / f"died{self._rank}.fresh"
        fresh.write_text(str(time.monotonic()))
        fresh.rename(self._folder / f"died{self._rank}")
        os.kill(os.getpid(), signal.SIGKILL)
