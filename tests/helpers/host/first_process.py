"""First process of a host: it arranges the host's own folders, and runs what others ask it for.

It is number 1 of its process namespace, so when it ends the kernel kills all that runs on the host. It ends
with its standard input, which is a pipe from the tests.

    first_process.py NAME ADDRESS FOLDER [PATH ...]     PATH: stays visible below the host's own /tmp
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

__all__: list[str] = []


def main(name: str, address: str, folder: str, *paths: str) -> None:
    """Begin the host, and serve until the tests end it."""
    socket.sethostname(name)
    own_folders(Path(folder), paths)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(Path(folder, name)))
    server.listen()
    print("made", flush=True)
    sys.stdin.readline()  # the network is there
    for words in (
        "link set lo up",
        f"addr add {address}/24 dev eth0",
        "link set eth0 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    print("ready", flush=True)
    child = os.fork()
    if child:
        while os.wait()[0] != child:  # whoever has lost its parent
            pass
        return
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    sys.stdin.read()


def own_folders(folder: Path, paths: tuple[str, ...]) -> None:
    """Give the host an empty /tmp and /dev/shm of its own, and names for all hosts."""
    new = folder / "own"
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "tmpfs", new)
    for path in paths:
        if path.startswith("/tmp/"):
            below = new / Path(path).relative_to("/tmp")
            below.mkdir(parents=True, exist_ok=True)
            mount("--bind", path, below)
    mount("--bind", folder / "hosts", "/etc/hosts")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    mount("--rbind", new, "/tmp")


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def serve(server: socket.socket) -> None:
    """Run commands that come with the streams that they are to have."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=run, args=(connection,), daemon=True).start()


def run(connection: socket.socket) -> None:
    with connection:
        text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        request = json.loads(text)
        stdin, stdout, stderr = streams
        process = subprocess.Popen(
            request["command"],
            env=os.environ | request["env"],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        for stream in streams:
            os.close(stream)
        status = process.wait()
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            connection.sendall(str(status).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
