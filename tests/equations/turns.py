"""A forced order of messages: ranks are threads, and one worker at a time speaks to the centre."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from nnlo_common import PeerLostError
from nnlo_common.algorithms import CenterRule
from nnlo_common.protocol import Kind, Received
from nnlo_common.testing import MemoryWorld

__all__ = ["Turns"]

#: What a worker waits for its turn with.
_ASKED = (Kind.EXCHANGE, Kind.PUSH, Kind.PULL, Kind.LOCK, Kind.EPOCH)
#: After its last epoch it may fetch the centre as it likes.
_FREE = (Kind.PULL,)


class Turns:
    """Lets workers speak in turn, and notes who has said what, and what the centre was after each commit.

    A turn begins with a message to the first server, and the next one when nothing moves any more: every
    worker waits for its turn, or for others, and every server for mail. So the training is the same whatever
    the threads do.

    Attributes:
        order: worker and kind of each message, in the order of their coming.
        commits: what each server's part of the centre was after each commit, by rank.

    Args:
        servers: how many ranks serve, the first ones.
        workers: how many train.
        pattern: whose turn it is, over and over; one that does not ask is left out.
        epochs: after so many a worker fetches the centre when it likes.
    """

    def __init__(self, servers: int, workers: int, pattern: Sequence[int], epochs: int) -> None:
        self.order: list[tuple[int, str]] = []
        self.commits: dict[int, list[Any]] = {rank: [] for rank in range(servers)}
        self._servers, self._pattern, self._place, self._epochs = servers, pattern, 0, epochs
        self._changed = threading.Condition()
        self._moving = set(range(servers + workers))
        self._letters: Counter[int] = Counter()
        self._asking: dict[int, str] = {}
        self._ended: Counter[int] = Counter()
        self._broken = False
        self._ranks: dict[int, int] = {}

    @contextmanager
    def taken(self, world: MemoryWorld) -> Iterator[None]:
        """Take part as a rank."""
        self._ranks[threading.get_ident()] = world.rank
        original = world.open
        world.open = lambda links: _Door(self, world.rank, original(links))  # type: ignore[method-assign]
        try:
            yield
        except BaseException:
            self._broken = True
            raise
        finally:
            with self._changed:
                self._moving.discard(world.rank)
                self._look()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the commits of all servers inside."""
        commit, by_parts = CenterRule.commit, CenterRule.commit_by_parts

        def note(rule: CenterRule) -> None:
            self.commits[self._ranks[threading.get_ident()]].append(rule.center.copy())

        def noted(rule: CenterRule, contributions: Any) -> None:
            commit(rule, contributions)
            note(rule)

        def noted_parts(rule: CenterRule, contribution: Any, **options: Any) -> Any:
            move = by_parts(rule, contribution, **options)

            def noted_part(part: slice) -> None:
                assert move is not None
                move(part)
                if part.stop == rule.center.size:
                    note(rule)

            return None if move is None else noted_part

        with (
            mock.patch.object(CenterRule, "commit", noted),
            mock.patch.object(CenterRule, "commit_by_parts", noted_parts),
        ):
            yield

    def centre(self, layout: Any) -> list[Any]:
        """What the parameters of the whole centre were after each commit, without what lies between them."""
        counts = {len(commits) for commits in self.commits.values()}
        assert len(counts) == 1, f"the servers have made {sorted(counts)} commits"
        whole = [np.concatenate(parts) for parts in zip(*self.commits.values(), strict=True)]
        return [
            np.concatenate([vector[s.offset : s.offset + s.size] for s in layout.segments])
            for vector in whole
        ]

    def send(self, rank: int, peer: int, message: Any) -> None:
        """Wait for this worker's turn if the message is one of those that begin one."""
        if rank >= self._servers and message.shard == 0 and message.kind in _ASKED:
            self._wait(rank, message.kind)
        with self._changed:
            self._letters[peer] += 1

    def _wait(self, rank: int, kind: Kind) -> None:
        worker = rank - self._servers
        if self._ended[worker] == self._epochs and kind in _FREE:
            return
        self._ended[worker] += kind is Kind.EPOCH
        with self._changed:
            self._asking[worker] = kind.name
            self._moving.discard(rank)
            self._look()
            done = self._changed.wait_for(lambda: worker not in self._asking or self._broken, timeout=30)
        if not done or self._broken:
            raise PeerLostError(rank, f"has waited for its turn to send {kind.name} in vain")

    def idle(self, rank: int) -> None:
        """Wait for mail."""
        with self._changed:
            self._moving.discard(rank)
            self._look()

    def busy(self, rank: int, event: object) -> None:
        """Go on."""
        with self._changed:
            self._moving.add(rank)
            self._letters[rank] -= isinstance(event, Received)

    def _look(self) -> None:
        """Give the next turn if nothing moves."""
        if self._broken:
            self._changed.notify_all()
        # A worker that waits for its turn reads the mail it has only later.
        under_way = any(n for rank, n in self._letters.items() if rank - self._servers not in self._asking)
        if self._moving or under_way or not self._asking:
            return
        chosen = min(self._asking)
        for step in range(len(self._pattern)):
            place = (self._place + step) % len(self._pattern)
            if self._pattern[place] in self._asking:
                chosen, self._place = self._pattern[place], place + 1
                break
        self.order.append((chosen, self._asking.pop(chosen)))
        self._moving.add(chosen + self._servers)
        self._changed.notify_all()


class _Door:
    """A rank's endpoint, with turns."""

    def __init__(self, turns: Turns, rank: int, endpoint: Any) -> None:
        self._turns, self._rank, self._endpoint = turns, rank, endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    def send(self, peer: int, message: Any, frame: Any = None, fill: Any = None) -> None:
        self._turns.send(self._rank, peer, message)
        self._endpoint.send(peer, message, frame, fill)

    def receive(self, timeout_s: float | None = None) -> Any:
        self._turns.idle(self._rank)
        event = None
        try:
            event = self._endpoint.receive(timeout_s)
        finally:
            self._turns.busy(self._rank, event)
        return event
