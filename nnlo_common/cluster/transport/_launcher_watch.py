"""Watch over the launcher of this host: when it is killed, its ranks say so before they end.

Open MPI ends a rank whose launcher has gone within about a second, with a message that names no reason. What
the rank prints goes to the launcher, so nobody reads it; see `tell` for where else there may be a reader.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nnlo_common.base._errors import NNLOError
from nnlo_common.base._file_access import append_file

__all__ = ["find_launcher", "tell", "watch_launcher"]

#: What mpiexec of Open MPI runs as, and its daemon on the other hosts.
_NAMES = ("prterun", "prted", "mpiexec", "mpirun", "orterun", "orted")
#: In the folder of a run.
FILE = "why-it-ended.txt"
# Open MPI ends the ranks itself, earlier.
_LIMIT_S = 5.0


def find_launcher(process: int | None = None, folder: Path = Path("/proc")) -> int | None:
    """Return the process id of the launcher among the ancestors of a process; None if it has none.

    Args:
        process: the process; None: this one.
        folder: where the system describes its processes.
    """
    at = os.getpid() if process is None else process
    with contextlib.suppress(OSError, ValueError, IndexError):
        while at > 1:
            # The name is in parentheses, and may have some itself.
            words = (folder / str(at) / "stat").read_text().rpartition(") ")
            if words[0].partition(" (")[2] in _NAMES:
                return at
            at = int(words[2].split()[1])
    return None


def watch_launcher(report: Callable[[], object]) -> bool:
    """Call `report` when the launcher of this host has gone, then end this process; return whether it can.

    Args:
        report: called in a thread.
    """
    launcher = find_launcher() if sys.platform == "linux" else None
    if launcher is None:
        return False
    try:
        descriptor = os.pidfd_open(launcher)
    except OSError:  # an old kernel, or it has just gone
        return False
    threading.Thread(target=_watch, args=(descriptor, report), name="nnlo-launcher", daemon=True).start()
    return True


def tell(line: str, folder: Path | None) -> None:
    """Write a line where somebody may read it.

    That is the standard error, unless it is a pipe to the launcher; else the terminal, if the job has one;
    else a file in the folder of the run.

    Args:
        line: the line.
        folder: of the run, if it has one and this rank is the one that writes there.
    """
    data = line.encode()
    with contextlib.suppress(OSError):
        os.write(2, data)
        return
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            os.write(terminal, data)
        finally:
            os.close(terminal)
        return
    if folder is not None:
        with contextlib.suppress(OSError, NNLOError), append_file(folder / FILE) as file:
            file.write(data)


def _watch(descriptor: int, report: Callable[[], object]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    report()
    time.sleep(_LIMIT_S)
    os._exit(1)
