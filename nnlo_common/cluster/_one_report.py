"""One report for each mistake: of the ranks on one host that hit the same one, only the first reports it.

The first holds a name that the kernel forgets when its process ends, so nothing is left behind. Where the
system has no such names, or on several hosts, ranks report in turn, and the first ends the job.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import traceback
from collections.abc import Mapping

__all__ = ["claim", "mistake_of"]


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
    job = f"{os.getuid()} {env.get('PMIX_NAMESPACE') or launcher} {mistake}"
    name = b"\0nnlo-" + hashlib.sha256(job.encode(errors="replace")).hexdigest().encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
            holder.bind(name)
            holder.detach()  # now nobody's, so open until the process ends
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True
