"""Processes of the ranks on this host: kill one, or watch for the death of one.

When a rank dies the launcher ends the job, which leaves no time to ask MPI which rank it was. A thread that
waits on pidfds learns it at once, mostly before the launcher ends its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["ProcessAddress", "HostPeers"]


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """How the ranks of one host reach a process.

    Attributes:
        host: the host name.
        space: the PID namespace; empty where unknown.
        pid: the process id in that namespace.
        address: the socket that receives announced ends; empty where there is none.
        wakeup: the address of its wake-up socket; empty where there is none.
    """

    host: str
    space: str
    pid: int
    address: str
    wakeup: str = ""

    @classmethod
    def own(cls, host: str, wakeup: str = "") -> Self:
        """Return the address of this process."""
        try:
            space = str(Path("/proc/self/ns/pid").readlink())
        except OSError:  # another operating system
            space = ""
        return cls(host, space, os.getpid(), f"nnlo-{secrets.token_hex(16)}" if space else "", wakeup)

    def to_text(self) -> str:
        """Encode as JSON."""
        return json.dumps([self.host, self.space, self.pid, self.address, self.wakeup])

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Decode what `to_text` returned."""
        return cls(*json.loads(text))


class HostPeers:
    """The ranks whose processes this one can see: same host, same PID namespace.

    Args:
        rank: the rank of this process.
        addresses: the addresses of all ranks.
    """

    def __init__(self, rank: int, addresses: Sequence[ProcessAddress]) -> None:
        mine = addresses[rank]
        self._rank, self._mine = rank, mine
        near = {r: one for r, one in enumerate(addresses) if mine.space and one.host == mine.host}
        self._near = {r: one for r, one in near.items() if one.space == mine.space}
        # Two are enough: the second reports the death of the first.
        self._watchers = sorted(self._near)[:2]
        self._receiver: socket.socket | None = None

    def kill(self, rank: int) -> bool:
        """Kill the process of a rank; return False where this process cannot see it."""
        if rank not in self._near or rank == self._rank:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._near[rank].pid, signal.SIGKILL)
        return True

    def watch(self, report: Callable[[int], object]) -> None:
        """On a watcher rank, start a thread that reports the first rank that dies unannounced."""
        if self._rank not in self._watchers or sys.platform != "linux":
            return
        first = self._watchers[0]
        watched = set(self._near) - {self._rank} if self._rank == first else {first}
        descriptors = {}
        for rank in watched:
            with contextlib.suppress(OSError):  # gone already, or an old kernel
                descriptors[os.pidfd_open(self._near[rank].pid)] = rank
        self._receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._receiver.setblocking(False)
        self._receiver.bind(f"\0{self._mine.address}")
        args = (self._receiver, descriptors, report)
        threading.Thread(target=_watch, args=args, name="nnlo-host-peers", daemon=True).start()

    def announce_end(self) -> None:
        """Tell the watchers that this rank ends normally or has reported its own failure."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for watcher in self._watchers:
                if self._near[watcher].address:
                    with contextlib.suppress(OSError):  # the watcher has ended already
                        sender.sendto(str(self._rank).encode(), f"\0{self._near[watcher].address}")


def _watch(receiver: socket.socket, descriptors: Mapping[int, int], report: Callable[[int], object]) -> None:
    poll = select.poll()
    ended: set[int] = set()
    for descriptor in (receiver.fileno(), *descriptors):
        poll.register(descriptor, select.POLLIN)
    gone: list[int] = []
    while not gone and len(ended) < len(descriptors):
        ready = [descriptor for descriptor, _ in poll.poll()]
        with contextlib.suppress(OSError):  # no more to read
            while True:
                ended.add(int(receiver.recv(16)))
        for descriptor in set(ready) & descriptors.keys():
            poll.unregister(descriptor)
            if descriptors[descriptor] not in ended:
                gone.append(descriptors[descriptor])
    for descriptor in descriptors:
        os.close(descriptor)
    receiver.close()
    if gone:
        report(min(gone))
