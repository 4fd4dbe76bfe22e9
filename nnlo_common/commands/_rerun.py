"""`nnlo rerun`: run a job, say what ended it, and run it again where that may help.

    nnlo rerun ─► mpiexec ─► ranks          it is one process, outside of MPI
        └──────── reads their stderr, passes it on, and remembers which rank was named

Requirements that shaped this module:

* A job that is refused, or whose training diverges, would end alike again: it is not run again.
* A signal to this command goes to the job, which then has its own way to end; nothing is run again.
* With ULFM mpiexec may end with status 0 though all ranks have died: `--until` names what a complete job has.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from nnlo_common.base._errors import plural
from nnlo_common.base._signals import EXIT_CODE
from nnlo_common.cluster._connecting import find_launch
from nnlo_common.commands.train._job import REFUSED, tell

__all__ = ["Watched", "add_rerun", "run_rerun"]

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST_PAUSE_S = 60.0
_OF_SIGNAL = 128  # a shell adds the number of the signal
#: Errors that the same command meets again. Reports of ranks end with a line that begins so.
_ALIKE_AGAIN = ("ConfigurationError:", "DivergedError:", "MissingExtraError:", "StartupError:")
_LONGEST_LINE = 300


def add_rerun(commands: Any) -> None:
    """Add the command to the parser's commands."""
    one = commands.add_parser(
        "rerun",
        help="run a job, and run it again from its newest checkpoint when a rank has died",
        usage="nnlo rerun [--times N] [--until FILE] -- COMMAND ...",
        description="Run a job, and run the same command again, within the same allocation, when a rank, the "
        "server or the coordinator of a search has died: nnlo rerun -- mpiexec -n 4 python train.py. The job "
        "goes on from its newest checkpoint (--checkpoint of nnlo train; nt.Checkpoint, nk.Checkpoint), a "
        "search from its journal. What is refused, diverges, or is ended by a signal is not run again.",
    )
    one.add_argument(
        "--times", type=int, default=3, metavar="N", help="run it again so many times at most (3)"
    )
    one.add_argument(
        "--until",
        metavar="FILE",
        help="what a complete job has written, e.g. RUN/history.json: the job is run until it is there, "
        "whatever the exit status; mpiexec --with-ft ulfm may end with 0 though all ranks have died",
    )
    one.add_argument("line", nargs="+", metavar="COMMAND", help="the command of the job, after --")


def run_rerun(
    line: Sequence[str],
    *,
    times: int = 3,
    until: str | None = None,
    wait: Callable[[float], object] | None = None,
) -> int:
    """Run a job, again where that may help; return the exit status of its last run.

    Args:
        line: its command.
        times: how often to run it again.
        until: the file of a complete job; None: exit status 0 says so.
        wait: waits so many seconds; None: until then or a signal.
    """
    words = [*line[1:]] if line[:1] == ["--"] else [*line]
    if problem := _problem(words, times, until):
        tell(problem, "rerun")
        return REFUSED
    with _Signals() as signals:
        pause_s, again = 1.0, 0
        while True:
            began_s = time.monotonic()
            status, said = _run(words, signals)
            complete = status == 0 if until is None else Path(until).exists()
            if complete or signals.have_come():
                return status
            ended = f"{Path(words[0]).name} {_ended(status)} after {time.monotonic() - began_s:.0f} s"
            if until is not None and status == 0:
                ended += f", and there is no {until}"
            if said.last:
                ended += f" ({said.last})"
            if said.alike or status == REFUSED:
                tell(f"{ended}; the same command would end alike, so it is not run again", "rerun")
                return status
            if again == times:
                tell(f"{ended}; it was run {plural(times + 1, 'time')}, and is not run again", "rerun")
                return status or 1
            tell(f"{ended}; run {again + 2} of {times + 1} in {pause_s:.0f} s: {shlex.join(words)}", "rerun")
            (wait or signals.wait)(pause_s)
            if signals.have_come():
                return _OF_SIGNAL + signals.came
            pause_s, again = min(2 * pause_s, _LONGEST_PAUSE_S), again + 1


def _problem(words: Sequence[str], times: int, until: str | None) -> str:
    """Return why this cannot be run; empty if it can."""
    launch = find_launch(os.environ)
    if launch is not None and (launch.size or 0) > 1:
        return (
            f"a launcher has started this as one of {launch.size} ranks; start it once, before the launcher: "
            f"nnlo rerun -- mpiexec -n {launch.size} {shlex.join(words)}"
        )
    if times < 0:
        return f"--times {times}: give a whole number of at least 0"
    if shutil.which(words[0]) is None:
        return f"there is no program {words[0]!r}; name the job's own, e.g. nnlo rerun -- mpiexec -n 4 ..."
    if until is not None and Path(until).exists():
        return (
            f"{until} exists before the job has begun; name a file that a complete job writes, or remove it"
        )
    return ""


@dataclass(slots=True)
class Watched:
    """What a job's ranks have written to stderr, as far as it tells how the job ended.

    Attributes:
        last: the last line that names a failed or dead rank.
        alike: the same command would end alike.

    Example:
        >>> watched = Watched()
        >>> watched.take("nnlo: rank 2 of 4 on node7 has died (killed, ...), so the job ends")
        >>> watched.last, watched.alike
        ('rank 2 of 4 on node7 has died (killed, ...), so the job ends', False)
    """

    last: str = ""
    alike: bool = False
    _named: bool = field(default=False, repr=False)

    def take(self, line: str) -> None:
        """Take note of a line."""
        if line.startswith("nnlo: rank ") and any(
            word in line for word in (" failed", " has died", " ended in")
        ):
            self.last, self._named = line.removeprefix("nnlo: ").strip()[:_LONGEST_LINE], True
        self.alike |= line.startswith(_ALIKE_AGAIN)
        if self._named and "Error: " in line and not line.startswith((" ", "nnlo:")):
            self.last = f"{self.last}: {line.strip()}"[:_LONGEST_LINE]
            self._named = False


def _run(words: Sequence[str], signals: _Signals) -> tuple[int, Watched]:
    """Run the job once; return its exit status, and what its ranks have said."""
    said = Watched()
    # A session of its own, so that Ctrl-C reaches it once: from here.
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as job:
        assert job.stderr is not None
        signals.job = job
        passing = threading.Thread(target=_pass_on, args=(job.stderr, said), name="nnlo rerun", daemon=True)
        passing.start()
        try:
            status = job.wait()
        finally:
            signals.job = None
        passing.join(5.0)  # a process that the job has left behind may hold the pipe
    return (status if status >= 0 else _OF_SIGNAL - status), said


def _pass_on(stream: IO[bytes], said: Watched) -> None:
    with contextlib.suppress(OSError, ValueError):  # the pipe was closed
        for line in iter(stream.readline, b""):
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()
            said.take(line.decode(errors="replace"))


def _ended(status: int) -> str:
    if status > _OF_SIGNAL:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(status - _OF_SIGNAL).name}"
    if status == EXIT_CODE:
        return "has saved a checkpoint and left"
    return f"ended with status {status}"


class _Signals:
    """Passes signals on to the job.

    Attributes:
        came: the number of the last one; 0: none.
        job: that runs now.
    """

    def __init__(self) -> None:
        self.came = 0
        self.job: subprocess.Popen[bytes] | None = None
        self._came = threading.Event()
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED:
                self._earlier[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)

    def have_come(self) -> bool:
        """Whether one has come."""
        return self.came != 0

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than until a signal comes."""
        self._came.wait(seconds)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.came = number
        self._came.set()
        if self.job is not None:
            with contextlib.suppress(ProcessLookupError):
                self.job.send_signal(number)
