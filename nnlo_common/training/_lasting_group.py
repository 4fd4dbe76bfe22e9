"""A group that goes on without its dead: what a death has broken off is made again by those that live.

All ranks make the same operations in the same order, and none completes one before every other has begun it.
So when one dies, the others are at one operation, or some are at the next: these have the result of the one
before, and give it to the others. A result is the same on all that live, whether the dead one has brought its
part or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nnlo_common.cluster.transport._endpoint import Group, MemberLostError, Numbers

__all__ = ["LastingGroup"]

_ResultT = TypeVar("_ResultT")


class LastingGroup:
    """The ranks of a group that live; it is used as a `Group` is.

    Attributes:
        ranks: the numbers of the living ranks in the training, as of the last operation.
        index: this rank's place among them; 0 is the lead.
        on_renewal: called with the group of the living ranks before any of them uses it (collective).
        on_loss: called with the ranks that are gone, between two operations, the same two on all ranks.

    Args:
        group: the ranks; made `lasting`.
        any_leads: any rank may be the lead; else all end when the first one has died.
    """

    def __init__(self, group: Group, *, any_leads: bool) -> None:
        self._group = group
        self._needed: Sequence[int] = () if any_leads else group.ranks[:1]
        self.ranks, self.index = group.ranks, group.index
        self.on_renewal: Callable[[Group], object] = lambda group: None
        self.on_loss: list[Callable[[Sequence[int]], object]] = []
        self._turn = 0  # operations begun
        self._last: Callable[[], bytes] = bytes  # packs the result of the last one

    def run(
        self,
        attempt: Callable[[Group], _ResultT],
        pack: Callable[[_ResultT], bytes],
        unpack: Callable[[bytes], _ResultT],
    ) -> _ResultT:
        """Return the result of an operation, which all living ranks get alike.

        Args:
            attempt: makes it with the ranks that it is given; it may be called again, with fewer.
            pack: turns the result into bytes; called during the next operation at the latest.
            unpack: turns the bytes of another rank into the result.
        """
        self._turn += 1
        self._take_note()
        result = self._made(attempt, unpack)
        self._last = lambda: pack(result)
        return result

    def gather(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks, a row for each."""
        return self.run(
            lambda group: group.gather(numbers),
            lambda rows: rows.tobytes(),
            lambda data: np.array(np.frombuffer(data, np.float64).reshape(-1, numbers.size)),
        )

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by index."""
        return self.run(lambda group: group.gather_bytes(data), _joined, _parted)

    def broadcast(self, data: npt.NDArray[np.uint8]) -> _CompleteBroadcast:
        """Copy the lead's bytes into those of the others."""

        def attempt(group: Group) -> bytes:
            group.broadcast(data).wait()
            group.barrier()  # a lead that has only sent could be further ahead than one operation
            return data.tobytes()

        self.run(attempt, bytes, lambda told: _copied(told, data))
        return _CompleteBroadcast()

    def need_all(self) -> None:
        """End with the next rank that dies; all ranks call it between the same two operations."""
        self._needed = self.ranks

    def close(self) -> None:
        """Release its resources."""
        self._group.close()

    def _made(self, attempt: Callable[[Group], _ResultT], unpack: Callable[[bytes], _ResultT]) -> _ResultT:
        while True:
            try:
                return attempt(self._group)
            except MemberLostError:
                told = self._told_by_others()
                if told is not None:
                    return unpack(told)
                self._take_note()

    def _take_note(self) -> None:
        """Tell of the ranks that are gone since the last operation."""
        gone = [rank for rank in self.ranks if rank not in self._group.ranks]
        if gone:
            self.ranks, self.index = self._group.ranks, self._group.index
            for call in self.on_loss:
                call(gone)

    def _told_by_others(self) -> bytes | None:
        """Go on with the living ranks; return the result of this operation, if one of them has it."""
        while True:
            try:
                group = self._group = self._group.without_dead()
                for rank in self._needed:
                    if rank not in group.ranks:
                        group.end(rank)
                self.on_renewal(group)
                turns = group.gather(np.array([self._turn], np.float64))[:, 0]
                ahead = int(turns.argmax())
                if turns.min() == turns.max():
                    return None
                told = group.gather_bytes(self._last() if group.index == ahead else b"")[ahead]
            except MemberLostError:
                continue
            return told if self._turn < turns.max() else None


class _CompleteBroadcast:
    """A broadcast that is complete."""

    def wait(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002 - nothing is left to wait for
        """Return True."""
        return True


def _copied(told: bytes, data: npt.NDArray[np.uint8]) -> bytes:
    np.copyto(data, np.frombuffer(told, np.uint8))
    return told


def _joined(parts: Sequence[bytes]) -> bytes:
    """Return byte strings as one: their number, their sizes, and themselves."""
    return b"".join([np.array([len(parts), *map(len, parts)], np.uint64).tobytes(), *parts])


def _parted(data: bytes) -> list[bytes]:
    """Return the byte strings that `_joined` has joined."""
    count = int(np.frombuffer(data, np.uint64, 1)[0])
    sizes = np.frombuffer(data, np.uint64, count, 8).astype(np.int64)
    ends = 8 * (1 + count) + np.cumsum(sizes)
    return [data[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
