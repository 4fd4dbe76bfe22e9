"""Beginning and end of a command on every rank, around the course of each command.

Whatever goes wrong, each command tells it in the same words and leaves the same status: what all ranks have
found before anything was begun is refused once, what goes wrong on one of them later ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nnlo_common.base._errors import NNLOError
from nnlo_common.commands.train._job import Job, refuse_alike, tell

__all__ = ["conduct"]

_INTERRUPTED = 130


class _Course(Protocol):
    """What a command does on one rank."""

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


def conduct(
    command: str, begin: Callable[[Job], _Course], flags: Mapping[str, Any], unknown: Sequence[str]
) -> int:
    """Do what a command line says, and return the exit status of every rank.

    Args:
        command: in whose name all is told.
        begin: makes the course of a job.
        flags: what was given to flags, by their names.
        unknown: what the parser does not know.
    """
    try:
        job = Job.join(command)
    except NNLOError as error:
        return refuse_alike(str(error), command)
    course = begin(job)
    try:
        return course.run(flags, unknown)
    except NNLOError as error:
        if not error.collective:
            return job.fail(error, course.advice)
        course.undo()
        return job.refuse(error)
    except KeyboardInterrupt:
        if job.world is not None:
            raise  # the guard ends the others
        tell("interrupted" + course.going_on, command)
        return _INTERRUPTED
