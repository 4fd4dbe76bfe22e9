"""Processes of the ranks on this host: kill one, or watch for the death of one.

When a rank dies the launcher ends the job, which leaves no time to ask MPI which rank it was. A thread that
waits on pidfds learns it at once, mostly before the launcher ends its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nnlo_common.base._json_codec import content_of, malformed, message_of, table_of
from nnlo_common.cluster.transport._datagrams import Datagrams

__all__ = ["HostPeers", "ProcessAddress"]

_RANK_BYTES = 4
# How long a rank that ends waits for a watcher that reads nothing.
_FAREWELL_S = 1.0
# More than the kernel holds, so that nothing sent before a death is left unread.
_ALL = 10_000


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
    def own(cls, host: str, address: str = "", wakeup: str = "") -> Self:
        """Return the address of this process."""
        try:
            space = str(Path("/proc/self/ns/pid").readlink())
        except OSError:  # another operating system
            space = ""
        return cls(host, space, os.getpid(), address, wakeup)

    def to_text(self) -> str:
        """Encode as JSON."""
        return json.dumps(content_of(self))

    @classmethod
    def of_text(cls, text: str, whose: str) -> Self:
        """Decode what `to_text` returned.

        Args:
            text: the JSON.
            whose: names it in errors.

        Raises:
            ProtocolError: it is not an address of a process.
        """
        address = message_of((cls,), table_of(text, (), whose), whose)
        if address.pid <= 0:  # a signal to it would reach many processes
            raise malformed(whose, ValueError(f"{address.pid} is not the id of a process"))
        return address


class HostPeers:
    """The ranks whose processes this one can see: same host, same PID namespace.

    Args:
        rank: the rank of this process.
        addresses: the addresses of all ranks.
        datagrams: this rank's socket for announced ends, whose address is among them.
    """

    def __init__(self, rank: int, addresses: Sequence[ProcessAddress], datagrams: Datagrams) -> None:
        mine = addresses[rank]
        self._rank, self._datagrams = rank, datagrams
        near = {r: one for r, one in enumerate(addresses) if mine.space and one.host == mine.host}
        self._near = {r: one for r, one in near.items() if one.space == mine.space}
        # Two are enough: the second reports the death of the first.
        self._watchers = sorted(self._near)[:2]

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
        args = (self._datagrams, descriptors, report)
        threading.Thread(target=_watch, args=args, name="nnlo-host-peers", daemon=True).start()

    def announce_end(self) -> None:
        """Tell the watchers that this rank ends normally or has reported its own failure."""
        for watcher in self._watchers:
            if self._near[watcher].address:
                rank = self._rank.to_bytes(_RANK_BYTES, "big")
                self._datagrams.send(self._near[watcher].address, rank, patience_s=_FAREWELL_S)


def _watch(datagrams: Datagrams, descriptors: Mapping[int, int], report: Callable[[int], object]) -> None:
    poll = select.poll()
    ended: set[int] = set()
    for descriptor in (datagrams.fileno(), *descriptors):
        poll.register(descriptor, select.POLLIN)
    gone: list[int] = []
    while not gone and not ended.issuperset(descriptors.values()):
        time.sleep(datagrams.deaf_s)
        ready = [descriptor for descriptor, _ in poll.poll()]
        ended |= {int.from_bytes(rank, "big") for rank in datagrams.received(_ALL)}
        for descriptor in set(ready) & descriptors.keys():
            poll.unregister(descriptor)
            if descriptors[descriptor] not in ended:
                gone.append(descriptors[descriptor])
    for descriptor in descriptors:
        os.close(descriptor)
    if gone:
        report(min(gone))
