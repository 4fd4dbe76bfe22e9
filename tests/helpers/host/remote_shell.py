"""Remote shell between the hosts of `tests.helpers.hosts`, for launchers that expect ssh.

remote_shell.py FOLDER HOST WORD ...     the words make one line for a shell, as ssh has it
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence

__all__ = ["run_on"]


def run_on(
    folder: str, host: str, command: Sequence[str], streams: Sequence[int], env: Mapping[str, str]
) -> socket.socket:
    """Start a command on a host; what is read from the returned socket at its end is the exit status.

    Args:
        folder: of the hosts.
        host: the name of one.
        command: the program and its arguments.
        streams: the descriptors of its standard input, output and error.
        env: variables to add to those of the host.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"{folder}/{host}")
    text = json.dumps({"command": list(command), "env": dict(env)}).encode()
    socket.send_fds(connection, [text], streams)
    return connection


if __name__ == "__main__":
    folder, host, *words = sys.argv[1:]
    with run_on(folder, host, ["sh", "-c", " ".join(words)], (0, 1, 2), {}) as asked:
        answer = asked.recv(100)
    os._exit(int(answer or 255) & 255)  # as of ssh, where the host has gone
