"""Roll call: finds which ranks are missing where a collective call takes long.

A collective call does not say for whom it waits. So after a few seconds each waiting rank sends its presence
to the first ranks, and the lowest of these that waits knows the others. The messages use the caller's
communicator and a tag that programs do not use; where all ranks come in time, none is sent.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

__all__ = ["RollCall"]

_AFTER_S = 5.0
# More than one, as the lowest may be missing.
_CALLERS = 3
# Programs count their tags from 0.
_BELOW_LARGEST_TAG = 5021


class RollCall:
    """Collects the ranks that wait in one collective call.

    Args:
        comm: the communicator of the call.
        library: the module `MPI`.
        limit_s: how long the call may take.
    """

    def __init__(self, comm: Any, library: Any, limit_s: float) -> None:
        self._comm, self._library, self._rank = comm, library, comm.Get_rank()
        self._after_s = min(_AFTER_S, limit_s / 2)
        # Equal on all ranks, which make the same calls; so a message of an earlier call is known as such.
        calls = _calls(library)
        self._number = (comm.Get_attr(calls) or 0) + 1
        comm.Set_attr(calls, self._number)
        self._others = set(range(comm.Get_size())) - {self._rank}
        self._absent = set(self._others)
        self._called = False

    def missing(self, waited_s: float) -> set[int]:
        """Return the ranks that do not wait; empty on a rank that leaves the report to another, or too early.

        Args:
            waited_s: how long this rank has waited.
        """
        if waited_s < self._after_s:
            return set()
        MPI = self._library
        tag = int(self._comm.Get_attr(MPI.TAG_UB) or _BELOW_LARGEST_TAG) - _BELOW_LARGEST_TAG
        callers = set(range(_CALLERS)) & self._others
        if not self._called:
            self._called = True
            for caller in callers:
                self._comm.Isend(np.array([self._number]), caller, tag).Free()  # small: it is copied at once
        if self._rank >= _CALLERS:
            return set()
        status, number = MPI.Status(), np.empty(1, np.int64)
        while self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            self._comm.Recv(number, status.Get_source(), tag)
            if number[0] == self._number:
                self._absent.discard(status.Get_source())
        return set() if min(callers - self._absent, default=self._rank) < self._rank else set(self._absent)


@functools.cache
def _calls(library: Any) -> int:
    """Return the key under which a communicator keeps its number of calls."""
    key: int = library.Comm.Create_keyval()
    return key
