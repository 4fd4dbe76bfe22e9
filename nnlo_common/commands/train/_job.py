"""Job: the ranks of a command; all agree before each next step, and all exit with the same status."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.base._file_access import append_file, usable
from nnlo_common.cluster._aborting import claim, mistake_of
from nnlo_common.cluster._connecting import find_launch
from nnlo_common.cluster._hosts import Place, describe_here, locate
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.commands.train._run_folder import remove_unused
from nnlo_common.training._joining import launched

__all__ = [
    "Job",
    "LOGGERS",
    "REFUSED",
    "RankCommand",
    "brief",
    "first_of_job",
    "logged_to",
    "refuse_alike",
    "run_in_job",
    "tell",
]

# -- log file of a rank: messages of nnlo's loggers and warnings, with host and rank in name and header -

#: The loggers of the packages.
LOGGERS = ("nnlo_common", "nnlo_keras", "nnlo_torch")
_FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@contextmanager
def logged_to(
    folder: str | Path, rank: int, size: int, host: str, *, asked: str
) -> Iterator[logging.Handler]:
    """Write the messages and warnings of this process to a file of its own, as they come.

    The levels of the loggers stay as they are; a message that a logger drops is not written.

    Args:
        folder: of the files; it is made.
        rank: this rank's number.
        size: how many ranks there are.
        host: this rank's machine.
        asked: the option that named the folder, for the error message.

    Raises:
        ConfigurationError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with logged_to(folder, 1, 3, "node07", asked="--log-dir"):
        ...         logging.getLogger("nnlo_common").warning("a server is late")
        ...     (path,) = Path(folder).iterdir()
        ...     name, (head, line) = path.name, path.read_text().splitlines()
        >>> name, head[:30], line[24:]
        ('rank1.node07.log', '# rank 1 of 3 on node07, proce', 'WARNING nnlo_common: a server is late')
    """
    path = usable(f"{asked} {folder}", Path(folder) / f"rank{rank}.{host}.log")
    with io.TextIOWrapper(append_file(path), "utf-8", errors="backslashreplace", line_buffering=True) as file:
        _begin(file, rank, size, host)
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter(_FORM))
        for name in LOGGERS:
            logging.getLogger(name).addHandler(handler)
        shown: Any = warnings.showwarning

        def show(message: Any, category: Any, filename: str, line: int, *rest: Any) -> None:
            told = f"{filename}:{line}: {category.__name__}: {message}"
            handler.emit(logging.LogRecord("warnings", logging.WARNING, filename, line, told, None, None))
            shown(message, category, filename, line, *rest)

        setattr(warnings, "showwarning", show)  # noqa: B010 - its type is narrower than its use
        try:
            yield handler
        finally:
            if vars(warnings)["showwarning"] is show:
                warnings.showwarning = shown
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(handler)


def _begin(file: TextIO, rank: int, size: int, host: str) -> None:
    """Write the header; a resumed run has one for each start."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    command = shlex.join(sys.argv)
    file.write(f"# rank {rank} of {size} on {host}, process {os.getpid()}, {now}: {command}\n")


# -- job: the ranks of a command; all agree before each next step, and all exit with the same status ----

#: The exit status of a command that is refused before the training.
REFUSED = 2
_INTERRUPTED = 130
# Some launchers kill a job at the first nonzero exit status, so the printing rank exits first.
_SILENT_S = 1.0
_LINES, _CHARACTERS = 16, 1600


def brief(text: str) -> str:
    """Shorten a message of other software to what a screen can show.

    Example:
        >>> brief("x" * 5000).endswith("...")
        True
    """
    plain = re.sub("\x1b\\[[0-9;]*m", "", str(text))  # without colours
    lines = [line.rstrip() for line in plain.strip().splitlines() if line.strip()]
    shown = "\n".join(lines[:_LINES])
    return shown if len(lines) <= _LINES and len(shown) <= _CHARACTERS else shown[:_CHARACTERS] + " ..."


def first_of_job() -> bool:
    """Whether this rank prints for all, as its launcher numbers it; the job need not be joined."""
    launch = find_launch(os.environ)
    return launch is None or not launch.rank


def refuse_alike(problem: str, command: str = "train") -> int:
    """Print a problem that every rank finds before the job is joined, once; return the exit status."""
    if first_of_job():
        tell(problem, command)
    else:
        time.sleep(_SILENT_S)
    return REFUSED


def tell(problem: str, command: str = "train") -> None:
    """Print a problem in one piece."""
    sys.stdout.flush()
    sys.stderr.write(f"{f'nnlo {command}'.rstrip()}: {brief(problem)}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of a job.

    Attributes:
        world: None if this process trains alone.
        command: its name, for messages.
    """

    world: RankWorld | None = None
    command: str = "train"

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
        """Whether this rank has the centre and prints for all."""
        return self.rank == 0

    def share(self, facts: Any, *, patient: bool = False) -> list[Any]:
        """Return the facts of all ranks, on all ranks; `patient`: others may work for long before."""
        if self.world is None:
            return [facts]
        return [json.loads(text) for text in self.world.gather_text(json.dumps(facts), patient=patient)]

    def share_with_living(self, facts: Any) -> list[Any]:
        """Return the facts of all ranks, on all that live; None of those that have died."""
        if self.world is None:
            return [facts]
        texts = self.world.gather_from_living(json.dumps(facts))
        return [None if text is None else json.loads(text) for text in texts]

    def places(self) -> tuple[Place, ...]:
        """Return the hosts of all ranks."""
        return locate(self.share(describe_here()))

    @contextmanager
    def together(self, *, patient: bool = False, late: bool = False) -> Iterator[None]:
        """Run the body on each rank, and continue only if it succeeded on all (collective).

        Args:
            patient: the body may take long on some ranks, e.g. on the one that writes the result.
            late: after the training: some ranks may have died.

        Raises:
            ConfigurationError: on all ranks alike, with the problems of all ranks.
        """
        problem = ""
        try:
            yield
        except NNLOError as error:
            problem = str(error) or type(error).__name__
        host = "" if self.world is None else self.world.host
        mine = [problem, host]
        told = self.share_with_living(mine) if late else self.share(mine, patient=patient)
        told = [one or ["", ""] for one in told]
        if any(text for text, _ in told):
            refusal = ConfigurationError(_joint_problem(told))
            refusal.collective = True
            raise refusal

    def refuse(self, error: Exception) -> int:
        """Print a problem that all ranks know, once, and return the exit status."""
        if self.speaks:
            tell(str(error), self.command)
        self.share("told")  # no rank exits before it is printed
        return REFUSED

    @property
    def name(self) -> str:
        """Prefix of a message: this rank and its host, if there are several ranks."""
        return "" if self.world is None else f"rank {self.rank} of {self.size} on {self.world.host}: "

    def fail(self, error: Exception, advice: str = "") -> int:
        """Print an error of this rank, and abort the job."""
        said = getattr(error, "said", False) or not claim(mistake_of(error), os.environ, os.getppid())
        if not said:
            tell(f"{self.name}{error}{advice}", self.command)
        if self.world is not None:
            time.sleep(2 * _SILENT_S if said else _SILENT_S / 5)  # time for the launcher to print it
            self.world.abort(1)
        return 1


def _joint_problem(told: list[list[str]]) -> str:
    """Return the problems with their ranks; without ranks if all have the same problem."""
    problems: dict[str, list[tuple[int, str]]] = {}
    for rank, (text, host) in enumerate(told):
        if text:
            problems.setdefault(text, []).append((rank, host))
    if len(problems) == 1 and len(next(iter(problems.values()))) == len(told):
        return next(iter(problems))
    return "\n".join(f"rank {ranks[0][0]} on {ranks[0][1]}: {text}" for text, ranks in problems.items())


class RankCommand(ABC):
    """One rank's part of a command.

    Args:
        job: the ranks.

    Attributes:
        folder: of the run or search, once it is claimed.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.folder = job, Path()
        self._fresh = self._started = False  # the folder is new; the training or search has begun
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._logs = ExitStack()

    def keep_logs(self, level: str, folder: str | None) -> None:
        """Print the messages of all loggers of nnlo, with the rank, until `end_logs`.

        Args:
            level: the lowest level to print.
            folder: write them there, too, from level info on, a file for each rank; None: only print.
        """
        lowest = logging.getLevelNamesMapping()[level.upper()]
        handler = logging.StreamHandler()
        handler.setLevel(lowest)
        handler.setFormatter(logging.Formatter(f"%(levelname)s, rank {self._job.rank}: %(message)s"))
        for name in LOGGERS:
            logger = logging.getLogger(name)
            self._logs.callback(logger.setLevel, logger.level)
            self._logs.callback(setattr, logger, "propagate", logger.propagate)
            self._logs.callback(logger.removeHandler, handler)
            logger.setLevel(lowest if folder is None else min(lowest, logging.INFO))
            logger.addHandler(handler)
            logger.propagate = False
        if folder is not None:
            rank, size = self._job.rank, self._job.size
            self._logs.enter_context(logged_to(folder, rank, size, os.uname().nodename, asked="--log-dir"))

    def end_logs(self) -> None:
        """Leave the loggers as they were before the command."""
        self._logs.close()

    @abstractmethod
    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Run the command, and return the exit status."""

    def undo(self) -> None:
        """Remove the folder of a training or search that has not begun."""
        if self._job.speaks and self._fresh:
            remove_unused(self.folder)

    @property
    @abstractmethod
    def advice(self) -> str:
        """Text to print after a failure: what to do next."""

    @property
    def resume_hint(self) -> str:
        """Text to print after an interrupt: how to resume."""
        return ""


def run_in_job(
    command: str, begin: Callable[[Job], RankCommand], flags: Mapping[str, Any], unknown: Sequence[str]
) -> int:
    """Run a command line, and return the exit status of every rank.

    All commands report problems alike: a problem that all ranks know before the start is printed once and
    refused; a later problem of one rank aborts the job.

    Args:
        command: its name, for messages.
        begin: makes this rank's part of the command.
        flags: the values of the flags, by name.
        unknown: words that the parser does not know.
    """
    try:
        job = Job(launched(), command)
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
            raise  # the guard aborts the other ranks
        tell("interrupted" + part.resume_hint, command)
        return _INTERRUPTED
    finally:
        part.end_logs()
