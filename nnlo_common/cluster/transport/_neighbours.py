"""The ranks of this host: who they are to the operating system, and who of them is dead.

A launcher that ends the job when a rank dies leaves the others no time to ask MPI. The operating system
tells a thread that waits for it at once, mostly before the launcher has ended that thread's process, too.
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

__all__ = ["Card", "Neighbours"]


@dataclass(frozen=True, slots=True)
class Card:
    """Where a process is found.

    Attributes:
        host: its machine.
        space: within which its number means something.
        pid: its number there.
        address: where it hears farewells; empty where it cannot.
        bell: what wakes it; empty where there is none.
    """

    host: str
    space: str
    pid: int
    address: str
    bell: str = ""

    @classmethod
    def own(cls, host: str, bell: str = "") -> Self:
        """Return this process's."""
        try:
            space = str(Path("/proc/self/ns/pid").readlink())
        except OSError:  # another operating system
            space = ""
        return cls(host, space, os.getpid(), f"nnlo-{secrets.token_hex(16)}" if space else "", bell)

    def to_text(self) -> str:
        """Return it as text."""
        return json.dumps([self.host, self.space, self.pid, self.address, self.bell])

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Read what `to_text` has written."""
        return cls(*json.loads(text))


class Neighbours:
    """The other ranks whose processes this one can see.

    Args:
        rank: this process's.
        cards: of all ranks.
    """

    def __init__(self, rank: int, cards: Sequence[Card]) -> None:
        mine = cards[rank]
        self._rank, self._mine = rank, mine
        near = {r: card for r, card in enumerate(cards) if mine.space and card.host == mine.host}
        self._near = {r: card for r, card in near.items() if card.space == mine.space}
        # Two are enough: the second speaks of the first.
        self._watchers = sorted(self._near)[:2]
        self._ears: socket.socket | None = None

    def kill(self, rank: int) -> bool:
        """End a neighbour's process; say whether it is one."""
        if rank not in self._near or rank == self._rank:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._near[rank].pid, signal.SIGKILL)
        return True

    def watch(self, tell: Callable[[int], object]) -> None:
        """Have a thread tell the first neighbour that dies without a farewell, if this rank is to."""
        if self._rank not in self._watchers or sys.platform != "linux":
            return
        first = self._watchers[0]
        watched = set(self._near) - {self._rank} if self._rank == first else {first}
        descriptors = {}
        for rank in watched:
            with contextlib.suppress(OSError):  # gone already, or an old kernel
                descriptors[os.pidfd_open(self._near[rank].pid)] = rank
        self._ears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ears.setblocking(False)
        self._ears.bind(f"\0{self._mine.address}")
        args = (self._ears, descriptors, tell)
        threading.Thread(target=_watch, args=args, name="nnlo-neighbours", daemon=True).start()

    def farewell(self) -> None:
        """Tell those who watch that this rank ends in good order, or has said itself why not."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            for watcher in self._watchers:
                if self._near[watcher].address:
                    with contextlib.suppress(OSError):  # who has gone before
                        mouth.sendto(str(self._rank).encode(), f"\0{self._near[watcher].address}")


def _watch(ears: socket.socket, descriptors: Mapping[int, int], tell: Callable[[int], object]) -> None:
    poll = select.poll()
    said_farewell: set[int] = set()
    for descriptor in (ears.fileno(), *descriptors):
        poll.register(descriptor, select.POLLIN)
    gone: list[int] = []
    while not gone and len(said_farewell) < len(descriptors):
        ready = [descriptor for descriptor, _ in poll.poll()]
        with contextlib.suppress(OSError):  # all is read
            while True:
                said_farewell.add(int(ears.recv(16)))
        for descriptor in set(ready) & descriptors.keys():
            poll.unregister(descriptor)
            if descriptors[descriptor] not in said_farewell:
                gone.append(descriptors[descriptor])
    for descriptor in descriptors:
        os.close(descriptor)
    ears.close()
    if gone:
        tell(min(gone))
