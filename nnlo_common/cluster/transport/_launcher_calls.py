"""Calls to the launcher that MPI lacks: kill a rank of another host, see whether the launcher answers.

mpiexec of Open MPI has a daemon on each host, which the ranks reach by PMIx. A daemon that is cut off gets an
order when the network is back.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from nnlo_common.cluster.transport._mpi4py import symbol

__all__ = ["answers_within", "ask_to_kill"]

# Of pmix_common.h, the same in PMIx 3 to 6.
_NAMESPACE_BYTES, _KEY_BYTES = 256, 512
_KILL = b"pmix.jctrl.kill"
_BOOL = 1
_VALUE_BYTES = 4096  # more than any value has

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, *[ctypes.c_void_p] * 5)


class _Process(ctypes.Structure):
    """The pmix_proc_t of a rank."""

    _fields_ = (("namespace", ctypes.c_char * _NAMESPACE_BYTES), ("rank", ctypes.c_uint32))


class _Published(ctypes.Structure):
    """The pmix_pdata_t of a published value."""

    _fields_ = (
        ("process", _Process),
        ("key", ctypes.c_char * _KEY_BYTES),
        ("value", ctypes.c_char * _VALUE_BYTES),
    )


# Takes the launcher's answer, which is not needed: MPI reports the death.
_ignore = _Callback(lambda *_: None)
# What the launcher's library may still read.
_KEPT: list[Any] = []


def ask_to_kill(rank: int) -> None:
    """Ask the launcher to kill a rank; do nothing where it has no PMIx.

    Args:
        rank: its number among all processes of the job.
    """
    order, load = symbol("PMIx_Job_control_nb"), symbol("PMIx_Info_load")
    namespace = os.environ.get("PMIX_NAMESPACE", "").encode()
    if order is None or load is None or not namespace:
        return
    process, directive = _Process(namespace, rank), ctypes.create_string_buffer(_VALUE_BYTES)
    _KEPT.append((process, directive))
    if load(directive, _KILL, None, ctypes.c_uint16(_BOOL)) == 0:
        one = ctypes.c_size_t(1)
        order(ctypes.byref(process), one, directive, one, _ignore, None)


def answers_within(limit_s: float) -> bool:
    """Return whether the launcher answers in time; True where it has no PMIx.

    Its first process has to answer, which this host may be cut off from.

    Args:
        limit_s: how long to wait.
    """
    look_up = symbol("PMIx_Lookup")
    if look_up is None or "PMIX_NAMESPACE" not in os.environ:
        return True
    wanted = _Published(key=b"nnlo.nothing")  # nobody publishes it, which the launcher says at once
    _KEPT.append(wanted)
    one, none = ctypes.c_size_t(1), ctypes.c_size_t(0)
    asking = threading.Thread(target=look_up, args=(ctypes.byref(wanted), one, None, none), daemon=True)
    asking.start()
    asking.join(limit_s)
    return not asking.is_alive()
