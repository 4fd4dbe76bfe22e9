"""Job: the ranks of a command; each prepares, all agree before they go on, and all end with one status."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.cluster._hosts import Place, describe_here, locate
from nnlo_common.cluster._launchers import find_launch
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.training._joining import launched

__all__ = ["REFUSED", "Job", "brief", "refuse_alike", "run_in_job", "tell"]

#: The exit status of what is refused before the training.
REFUSED = 2
_INTERRUPTED = 130
# Some launchers end a job at the first exit status that is not zero, so who speaks ends first.
_SILENT_S = 1.0
_LINES, _LETTERS = 16, 1600


def brief(text: str) -> str:
    """Shorten what others say to what a screen can show.

    Example:
        >>> brief("x" * 5000).endswith("...")
        True
    """
    plain = re.sub("\x1b\\[[0-9;]*m", "", str(text))  # without colours
    lines = [line.rstrip() for line in plain.strip().splitlines() if line.strip()]
    shown = "\n".join(lines[:_LINES])
    return shown if len(lines) <= _LINES and len(shown) <= _LETTERS else shown[:_LETTERS] + " ..."


def refuse_alike(problem: str, command: str = "train") -> int:
    """Print what all ranks find by themselves, once, before they know of each other; return the status."""
    launch = find_launch(os.environ)
    if launch is None or not launch.rank:
        tell(problem, command)
    else:
        time.sleep(_SILENT_S)
    return REFUSED


def tell(problem: str, command: str = "train") -> None:
    """Print a problem in one piece."""
    sys.stdout.flush()
    sys.stderr.write(f"nnlo {command}: {brief(problem)}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of a job.

    Attributes:
        world: None where this process trains alone.
        command: in whose name it speaks.
    """

    world: RankWorld | None = None
    command: str = "train"

    @classmethod
    def join(cls, command: str = "train") -> Job:
        """Join the job this process belongs to."""
        return cls(launched(), command)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return 0 if self.world is None else self.world.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self.world is None else self.world.size

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that has the centre and speaks for all."""
        return self.rank == 0

    def share(self, facts: Any) -> list[Any]:
        """Return the facts of all ranks, on all ranks."""
        if self.world is None:
            return [facts]
        return [json.loads(text) for text in self.world.gather_text(json.dumps(facts))]

    def places(self) -> tuple[Place, ...]:
        """Return where all ranks are."""
        return locate(self.share(describe_here()))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do something on each rank, and go on only if it went well on all.

        Raises:
            ConfigurationError: on all ranks alike, with what went wrong on which.
        """
        problem = ""
        try:
            yield
        except NNLOError as error:
            problem = str(error) or type(error).__name__
        host = "" if self.world is None else self.world.host
        told = self.share([problem, host])
        if any(text for text, _ in told):
            refusal = ConfigurationError(_said_together(told))
            refusal.collective = True
            raise refusal

    def refuse(self, error: Exception) -> int:
        """Print once what all ranks have found, and return the exit status."""
        if self.speaks:
            tell(str(error), self.command)
        self.share("told")  # nobody leaves before
        return REFUSED

    @property
    def name(self) -> str:
        """Which rank this is, where there are several, as the beginning of a message."""
        return "" if self.world is None else f"rank {self.rank} of {self.size} on {self.world.host}: "

    def fail(self, error: Exception, advice: str = "") -> int:
        """End the job for what has gone wrong on this rank, perhaps on this one only."""
        said = getattr(error, "said", False)
        if not said:
            tell(f"{self.name}{error}{advice}", self.command)
        if self.world is not None:
            time.sleep(2 * _SILENT_S if said else _SILENT_S / 5)  # for the launcher to carry the text
            self.world.abort(1)
        return 1


def _said_together(told: list[list[str]]) -> str:
    """What is wrong on which ranks; just that, where it is the same on all."""
    problems: dict[str, list[tuple[int, str]]] = {}
    for rank, (text, host) in enumerate(told):
        if text:
            problems.setdefault(text, []).append((rank, host))
    if len(problems) == 1 and len(next(iter(problems.values()))) == len(told):
        return next(iter(problems))
    return "\n".join(f"rank {ranks[0][0]} on {ranks[0][1]}: {text}" for text, ranks in problems.items())


class RankCommand(Protocol):
    """A command as one rank runs it."""

    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Do it all, and return the exit status."""

    def undo(self) -> None:
        """Leave nothing of what has not begun."""

    @property
    def advice(self) -> str:
        """What to do when it has failed."""

    @property
    def going_on(self) -> str:
        """What to do when it was interrupted."""


def run_in_job(
    command: str, begin: Callable[[Job], RankCommand], flags: Mapping[str, Any], unknown: Sequence[str]
) -> int:
    """Do what a command line says, and return the exit status of every rank.

    Whatever goes wrong, each command tells it in the same words: what all ranks have found before anything
    was begun is refused once, what goes wrong on one of them later ends the job.

    Args:
        command: in whose name all is told.
        begin: makes this rank's part of the command in a job.
        flags: what was given to flags, by their names.
        unknown: what the parser does not know.
    """
    try:
        job = Job.join(command)
    except NNLOError as error:
        return refuse_alike(str(error), command)
    part = begin(job)
    try:
        return part.run(flags, unknown)
    except NNLOError as error:
        if not error.collective:
            return job.fail(error, part.advice)
        part.undo()
        return job.refuse(error)
    except KeyboardInterrupt:
        if job.world is not None:
            raise  # the guard ends the others
        tell("interrupted" + part.going_on, command)
        return _INTERRUPTED
