"""File systems that fail for a while: a file is read again before it counts as damaged."""

from __future__ import annotations

import errno
import time

from nnlo_common.base._errors import warn
from nnlo_common.data.formats._format import error_numbers

__all__ = ["WAITS_S", "may_pass", "wait_for_file_system"]

# Waits before a file is read again where its file system has failed: a server that restarts is back by then.
WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_PASSING = {
    getattr(errno, name)
    for name in (
        "EIO",
        "ESTALE",
        "ETIMEDOUT",
        "ENOTCONN",
        "ECONNRESET",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "EREMOTEIO",
    )
    if hasattr(errno, name)
}


def may_pass(error: Exception) -> bool:
    """Return whether an error is of a file system that may answer again, not of the file.

    Example:
        >>> may_pass(OSError(errno.ESTALE, "Stale file handle")), may_pass(OSError("inflate() failed"))
        (True, False)
    """
    return isinstance(error, OSError) and bool(error_numbers(error) & _PASSING)


def wait_for_file_system(path: str, error: Exception, wait_s: float) -> None:
    """Wait for a file system that does not answer, and tell so the first time."""
    if wait_s == WAITS_S[0]:
        told = " ".join(str(error).split())[:200]
        warn(f"{path} cannot be read now ({told}); trying again for {sum(WAITS_S):.0f} s")
    time.sleep(wait_s)
