"""Abort of the whole job after an uncaught exception on one rank, with one readable report.

Without it the other ranks wait for the dead one until the batch system's time limit.

    uncaught in any thread ─► one block to stderr ─► earlier hook, if the program set one ─► MPI_Abort
                                     └── each step has a deadline, so that the process ends even if it hangs
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import functools
import hashlib
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Protocol

from nnlo_common.base._errors import (
    ConfigurationError,
    DivergedError,
    DroppedError,
    MissingExtraError,
    PeerLostError,
    StartupError,
    plural,
)

__all__ = [
    "GuardedWorld",
    "advise",
    "claim",
    "describe_failure",
    "end_after_exit",
    "end_notes_folder",
    "end_notes_in",
    "end_within",
    "engage",
    "explain",
    "guard",
    "mistake_of",
    "remember_exit",
    "reports",
    "silence",
]

# -- one report for each mistake: of the ranks on one host that hit the same one, only the first reports it --
# The first holds a name that the kernel forgets when its process ends, so nothing is left behind. Where
# the system has no such names, or on several hosts, ranks report in turn, and the first ends the job.


def mistake_of(error: BaseException) -> str:
    """Return what ranks with the same mistake have in common: the error's class, and the line of the script.

    Args:
        error: the exception, with its traceback.
    """
    frames = traceback.extract_tb(error.__traceback__, limit=1)
    where = [f"{frame.filename}:{frame.lineno}" for frame in frames]
    return " ".join([type(error).__qualname__, *where])


def claim(mistake: str, env: Mapping[str, str], launcher: int) -> bool:
    """Return whether this process is the first of its job on this host to report the mistake.

    Args:
        mistake: what to report, in words that are equal on all ranks.
        env: the environment variables, in which some launchers name the job.
        launcher: the number of the process that has started this one; all ranks on a host have the same.

    Example:
        >>> claim("no such data", {}, launcher=os.getpid())  # the second to ask hears False
        True
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
            holder.bind(_name(mistake, env, launcher))
            holder.detach()  # now nobody's, so open until the process ends
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _is_claimed(mistake: str, env: Mapping[str, str], launcher: int) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
            asker.connect(_name(mistake, env, launcher))
    except OSError:
        return False
    return True


def _name(mistake: str, env: Mapping[str, str], launcher: int) -> bytes:
    job = f"{os.getuid()} {env.get('PMIX_NAMESPACE') or launcher} {mistake}"
    return b"\0nnlo-" + hashlib.sha256(job.encode(errors="replace")).hexdigest().encode()


def reports(mistake: str, turn_s: float, env: Mapping[str, str], launcher: int) -> bool:
    """Wait for this rank's turn; return whether it is the one of its job on this host to report the mistake.

    It is not where another rank reports during the wait, even if that one's process has ended since: then
    the launcher may be about to end this one.

    Args:
        mistake: what to report, in words that are equal on all ranks.
        turn_s: how long ranks that report before this one may take.
        env: the environment variables, in which some launchers name the job.
        launcher: the number of the process that has started this one; all ranks on a host have the same.
    """
    until = time.monotonic() + turn_s
    while True:
        if _is_claimed(mistake, env, launcher):
            return False
        left_s = until - time.monotonic()
        if left_s <= 0:
            return claim(mistake, env, launcher)
        time.sleep(min(_LOOK_S, left_s))


# Time for the launcher to print the report; MPI_Abort may discard output in transit.
_DELIVERY_S = 0.2
# Limit for flushing and an earlier hook, and for MPI_Abort; afterwards the process ends at once.
_DEADLINE_S = 5.0
# One error often hits all ranks: each waits for lower ranks to report first.
_TURN_S, _LAST_TURN = 0.4, 5
# A report is seen at once, long before the process of the rank that has made it ends.
_LOOK_S = _DELIVERY_S / 10
# Time for another rank on this host to end its report of what this one has hit, too.
_SILENT_S = 1.0
_FAILED, _INTERRUPTED = 1, 130

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class GuardedWorld(Protocol):
    """The job as the guard sees it; `nnlo_common.cluster.transport._mpi4py.World` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def host(self) -> str: ...
    def abort(self, code: int) -> NoReturn: ...


def guard(world: GuardedWorld) -> None:
    """Abort the whole job with a non-zero status on an uncaught exception, in any thread of this rank.

    Installs `sys.excepthook` and `threading.excepthook`; hooks that the program set before are still called.
    Calling it again does nothing. Jobs of one process, and processes forked from a rank such as the workers
    of a data loader, keep Python's own behaviour.

    Args:
        world: the job.
    """
    if world.size > 1 and _Guard.active is None:
        _nowhere()
        _Guard.active = _Guard(world)
        _Guard.active.install()
    elif _Guard.active is not None:
        _Guard.active.world = world
        _Guard.active.install()


def advise(call: Callable[[], str]) -> None:
    """Register a method that returns the advice to print when the job ends because a rank was lost.

    Its object is not kept in memory for that.
    """
    _Guard.advice = weakref.WeakMethod(call)


def end_notes_in(folder: Path) -> None:
    """Name the folder of the run, for notes about its end that nobody could read elsewhere."""
    _Guard.folder = folder


def end_notes_folder() -> Path | None:
    """Return the folder of the run, if it has one."""
    return _Guard.folder


def explain(words: str, advice: str) -> None:
    """Register advice to print when the job ends because of an error whose message has these words."""
    _Guard.explanations[words] = advice


def silence() -> None:
    """Discard what this process still writes to stderr: MPI libraries add words of their own to a report."""
    with contextlib.suppress(OSError):
        os.dup2(_nowhere(), 2)


def end_within(seconds: float = _DEADLINE_S) -> None:
    """End this process with status 1 after `seconds`, even if it hangs.

    A Python thread cannot do that: a hanging MPI_Abort holds the interpreter's lock, and an interpreter at
    exit starts no threads. Another call restarts the time.

    Args:
        seconds: how long the process may still take to end by itself.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_nowhere())


@functools.cache
def _nowhere() -> int:
    """Return the descriptor of /dev/null, opened while there are descriptors left."""
    return os.open(os.devnull, os.O_WRONLY)


def engage(world: GuardedWorld) -> Callable[[], None]:
    """Abort the job if this rank ends before the returned function is called.

    Beyond `guard` this covers an end without an exception in the middle of a training: by `sys.exit`, or at
    the end of the script.

    Args:
        world: the job.
    """
    if _Guard.engaged:
        raise ConfigurationError(
            f"rank {world.rank}: a training is open on this rank already; close it before you begin another "
            "(two at once would wait for each other)"
        )
    guard(world)
    _Guard.engaged = True
    _Guard.at_exit = None
    pid = os.getpid()

    def ended_early() -> None:
        if os.getpid() == pid:
            _report_and_end(world, "ended in the middle of a training that the other ranks continue", _FAILED)

    def disengage() -> None:
        _Guard.engaged = False
        atexit.unregister(ended_early)

    _Guard.at_exit = ended_early
    atexit.register(ended_early)
    return disengage


def remember_exit(in_middle: Callable[[], bool]) -> tuple[Callable[[], object], Callable[[], None]]:
    """Remember the status of a `sys.exit` in the middle of a training; `atexit` functions do not learn it.

    Args:
        in_middle: returns whether the training is under way; called when the program calls `sys.exit`.

    Returns:
        A function that returns the status, None without such an exit; and one that ends this.
    """
    earlier, process = sys.exit, os.getpid()
    found: list[object] = []

    @functools.wraps(earlier)
    def exit_and_remember(status: Any = None, /) -> NoReturn:
        of_program = threading.current_thread() is threading.main_thread() and os.getpid() == process
        if of_program and status not in (None, 0) and in_middle():
            found[:] = [status]
        earlier(status)

    def forget() -> None:
        if sys.exit is exit_and_remember:
            sys.exit = earlier

    sys.exit = exit_and_remember
    return lambda: found[0] if found else None, forget


def end_after_exit(world: GuardedWorld, status: object) -> NoReturn:
    """End the job because this rank's script has called `sys.exit` in the middle of a training.

    Args:
        world: the job.
        status: what was passed to `sys.exit`.
    """
    code = status if isinstance(status, int) and 0 < status < 256 else _FAILED
    what = f"called sys.exit({status!r}) in the middle of an epoch that the other ranks continue"
    _report_and_end(world, what, code)


def _report_and_end(world: GuardedWorld, what: str, code: int) -> NoReturn:
    if claim(what, os.environ, os.getppid()):
        _say(f"nnlo: rank {world.rank} of {world.size} on {world.host} {what}; ending the job\n")
        time.sleep(_DELIVERY_S)
    else:
        time.sleep(_SILENT_S)
    _end(world, code)


def describe_failure(rank: int, size: int, host: str, error: BaseException, thread: str = "") -> str:
    """Describe a failed rank and its error in one block; in one line for a Ctrl-C.

    Args:
        rank: the rank that failed.
        size: how many ranks there are.
        host: the machine it runs on.
        error: the exception, with its traceback.
        thread: the name of the thread; empty for the main one.
    """
    who = f"nnlo: rank {rank} of {size} on {host}"
    if isinstance(error, KeyboardInterrupt):
        return f"{who} was interrupted; ending the job\n"
    if isinstance(error, DroppedError):
        return (
            f"{who} was dropped by the server after {error.after_s:.0f} s of silence, so it ends; the others "
            "continue\n"
        )
    where = f" in thread {thread!r}" if thread else ""
    advice = ""
    advise_now = _Guard.advice()
    if isinstance(error, PeerLostError) and advise_now is not None:
        advice = f"nnlo: {advise_now()}\n"
    for words, text in _Guard.explanations.items():
        advice += f"nnlo: {text}\n" if words in str(error) else ""
    return f"{who} failed{where}; ending the job\n{_traced(error)}{advice}"


#: Set to "all", this environment variable shows the whole traceback of each error.
TRACEBACK = "NNLO_TRACEBACK"
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_OF_USER = (ConfigurationError, DivergedError, MissingExtraError, PeerLostError, StartupError)


def _traced(error: BaseException) -> str:
    """The traceback; where the error is the user's to mend, that of the user's own lines."""
    if not isinstance(error, _OF_USER) or error.__cause__ is not None or os.environ.get(TRACEBACK) == "all":
        return "".join(traceback.format_exception(error))
    lines, hidden = ["Traceback (most recent call last):\n"], 0
    # Our packages, others, and Python's own.
    homes = "<frozen", str(Path(__file__).parents[2] / "nnlo_"), *map(sysconfig.get_path, _LIBRARIES)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(homes):
            hidden += 1
            continue
        lines += [_folded(hidden), *traceback.format_list([frame])]
        hidden = 0
    return "".join([*lines, _folded(hidden), f"{type(error).__name__}: {error}\n"])


def _folded(frames: int) -> str:
    told = f"  ... {plural(frames, 'call')} within libraries; {TRACEBACK}=all shows them\n"
    return told if frames else ""


class _Guard:
    active: ClassVar[_Guard | None] = None
    engaged: ClassVar[bool] = False
    at_exit: ClassVar[Callable[[], None] | None] = None
    advice: ClassVar[Callable[[], Callable[[], str] | None]] = lambda: None
    folder: ClassVar[Path | None] = None
    explanations: ClassVar[dict[str, str]] = {}

    def __init__(self, world: GuardedWorld) -> None:
        self.world = world
        self._pid = os.getpid()
        self._once = threading.Lock()
        self._earlier: _Hook = sys.excepthook
        self._earlier_in_thread = threading.excepthook

    def install(self) -> None:
        """Install the hooks, again if the program has replaced them."""
        if sys.excepthook != self.on_exception:
            self._earlier, sys.excepthook = sys.excepthook, self.on_exception
        if threading.excepthook != self.on_thread_exception:
            self._earlier_in_thread, threading.excepthook = threading.excepthook, self.on_thread_exception

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        own = self._earlier is sys.__excepthook__
        if os.getpid() != self._pid:
            self._earlier(kind, error, trace)
            return
        self._end_job(error, "", None if own else lambda: self._earlier(kind, error, trace))

    def on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        own = self._earlier_in_thread is threading.__excepthook__
        if args.exc_type is SystemExit:
            return  # a thread's normal way to exit
        if os.getpid() != self._pid or args.exc_value is None:
            self._earlier_in_thread(args)
            return
        name = args.thread.name if args.thread is not None else "unknown"
        self._end_job(args.exc_value, name, None if own else lambda: self._earlier_in_thread(args))

    def _end_job(self, error: BaseException, thread: str, earlier: Callable[[], object] | None) -> None:
        if not self._once.acquire(blocking=False):
            return  # another thread's failure is already ending the job
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
        end_within()
        world = self.world
        try:
            if getattr(error, "said", False):
                time.sleep(_TURN_S * _LAST_TURN)  # the rank that reports needs time before this one aborts
                return
            # A rank that reports first has aborted the job; rank 0 reports what every rank hits.
            collective = world.rank and getattr(error, "collective", False)
            turn_s = _TURN_S * (_LAST_TURN if collective else min(world.rank, _LAST_TURN))
            own = isinstance(error, (DroppedError, PeerLostError))  # what this rank alone knows
            if own:
                time.sleep(turn_s)
            if own or reports(mistake_of(error), turn_s, os.environ, os.getppid()):
                _say(describe_failure(world.rank, world.size, world.host, error, thread))
                silent_s = _DELIVERY_S
            else:
                silent_s = _SILENT_S
            if earlier is not None:
                earlier()
            time.sleep(silent_s)
        finally:
            if _Guard.at_exit is not None:
                atexit.unregister(_Guard.at_exit)  # the failure is reported
            _end(world, code)


def _end(world: GuardedWorld, code: int) -> NoReturn:
    """End the job; end this process silently if that returns."""
    try:
        world.abort(code)
    finally:
        os._exit(code)


def _say(block: str) -> None:
    """Write to stderr in one piece, so that reports of several ranks do not mix; never fail."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(block)
        sys.stderr.flush()
