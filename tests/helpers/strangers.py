"""Processes of somebody else on this host: another user where the tests run as root, else the same one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["NOBODY", "USERS", "stranger"]

NOBODY = 65534
_IMPORTS = "import array, fcntl, os, socket, sys, time"
#: The same user without the job's secrets, and another user, whom only root can become.
USERS = [
    pytest.param(None, id="same user"),
    pytest.param(
        NOBODY,
        id="other user",
        marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
    ),
]


@contextmanager
def stranger(code: str, *words: str, user: int | None) -> Iterator[subprocess.Popen[str]]:
    """Run a piece of Python as a user in a process of its own, whose standard output the test reads.

    These modules are imported: array, fcntl, os, socket, sys, time.
    """
    become = "" if user is None else f"os.setgroups([]); os.setgid({user}); os.setuid({user})"
    code = f"{_IMPORTS}\n{become}\n{code}"  # the other user may not read the folder of this Python
    line = [sys.executable, "-I", "-S", "-c", code, *words]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
