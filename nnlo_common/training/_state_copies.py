"""Copies of a server's state in the memory of a spare rank, sent in pieces while the server serves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._spans import span
from nnlo_common.base._state_tree import State
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import Kind, Message, Received, Send
from nnlo_common.training._rank_parts import perform

__all__ = ["LOOK_FOR_COPIES_S", "PIECE", "ReceivedCopies", "StateCopies"]

#: Numbers in a piece: 512 KiB.
PIECE = 1 << 17
#: How often a server looks whether a copy is due.
LOOK_FOR_COPIES_S = 0.1
# Copies take at most this share of the server's time, and do not come more often than this.
_SHARE = 0.01
_SHORTEST_S = 1.0
# One in so many copies goes to the second spare.
_SECOND = 3

_Bytes = npt.NDArray[np.uint8]


# -- a state as bytes: its JSON, then its arrays; floats keep every bit ----------------------------------
# Arrays are copied at once, as the server goes on while they are sent. Those of a framework travel as
# NumPy's: its optimizer takes them so.

_ARRAY, _PAIRS, _ITEMS, _PLAIN = "array", "pairs", "items", "plain"


def _bytes_of(state: State) -> list[_Bytes]:
    """Return a state as bytes, in parts: the size of its JSON, the JSON, and each array."""
    arrays: list[npt.NDArray[Any]] = []
    text = json.dumps([_taken_apart(state, arrays), [[one.dtype.str, one.shape] for one in arrays]]).encode()
    head = np.array([len(text)], np.uint64).view(np.uint8), np.frombuffer(text, np.uint8)
    return [*head, *(one.reshape(-1).view(np.uint8) for one in arrays)]


def _state_of(data: _Bytes) -> Any:
    """Return the state that `_bytes_of` has turned into bytes."""
    at = 8 + int(data[:8].view(np.uint64)[0])
    tree, shapes = json.loads(data[8:at].tobytes())
    arrays = []
    for kind, shape in shapes:
        size = np.dtype(kind).itemsize * math.prod(shape)
        arrays.append(data[at : at + size].copy().view(kind).reshape(shape))
        at += size
    return _put_together(tree, arrays)


def _taken_apart(value: Any, arrays: list[npt.NDArray[Any]]) -> list[Any]:
    """Return a value as JSON can hold it, and add its arrays to `arrays`."""
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        arrays.append(np.array(value.detach().cpu().numpy() if hasattr(value, "detach") else value))
        return [_ARRAY, len(arrays) - 1]
    if isinstance(value, Mapping):
        return [_PAIRS, [[key, _taken_apart(item, arrays)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [_ITEMS, [_taken_apart(item, arrays) for item in value]]
    return [_PLAIN, value.item() if isinstance(value, np.generic) else value]


def _put_together(told: list[Any], arrays: Sequence[npt.NDArray[Any]]) -> Any:
    kind, value = told
    if kind == _ARRAY:
        return arrays[value]
    if kind == _PAIRS:
        return {key: _put_together(item, arrays) for key, item in value}
    return [_put_together(item, arrays) for item in value] if kind == _ITEMS else value


class StateCopies:
    """Sends a spare a copy of a server's state now and then; the server serves between two pieces.

    Args:
        endpoint: the server's.
        rank: the server's.
        spares: the ranks that may take over, in this order; the first that lives gets most copies, and the
            second some, in case that the server and the first die together.
        channel: the number of the channel.
        take: returns the state.
        clock: returns the time.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        rank: int,
        spares: Sequence[int],
        channel: int,
        *,
        take: Callable[[], State],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint, self._rank, self._channel = endpoint, rank, channel
        self._spares = tuple(spares)
        self._take, self._clock = take, clock
        self._due_s = 0.0
        self._pieces: Iterator[tuple[Vector, bool]] | None = None  # of the copy under way
        self._number = 0
        self._to = -1  # the spare that gets it
        self._stopped = False

    @property
    def idle(self) -> bool:
        """Whether no piece is under way."""
        return self._pieces is None

    def look(self) -> None:
        """Begin a copy if one is due."""
        if self._spares and self._pieces is None and not self._stopped and self._clock() >= self._due_s:
            began_s = self._clock()
            with span("checkpoint", "copies"):
                parts = _bytes_of(self._take())
            # To send it costs about as much as to copy it.
            pause_s = max(_SHORTEST_S, 2 * (self._clock() - began_s) / _SHARE)
            self._number += 1
            turn, several = self._number % _SECOND, len(self._spares) > 1
            self._to = self._spares[turn == _SECOND - 1 and several]
            # That to the second comes after one to the first, which waits for its next no longer.
            self._due_s = began_s + (0.0 if turn == _SECOND - 2 and several else pause_s)
            self._pieces = _cut(parts)
            self._send()

    def acknowledged(self, event: Received) -> None:
        """Send the next piece."""
        self._endpoint.release(event.message.sender, event.frame)
        if event.message.pulled_at == self._number and self._pieces is not None:
            self._send()

    def without(self, rank: int) -> None:
        """Go on without a spare that is dead."""
        if rank in self._spares:
            if rank == self._to:
                self._pieces = None
            if rank == self._spares[0]:
                self._due_s = 0.0
            self._spares = tuple(one for one in self._spares if one != rank)

    def stop(self) -> None:
        """Begin no more copies."""
        self._stopped = True

    def end(self) -> None:
        """Tell all spares that no more copies come, so that they may leave; call it once `idle`."""
        for spare in self._spares:
            message = Message(
                Kind.COPY, self._rank, 0, shard=self._channel, stop=True, vector=np.zeros(0, "f4")
            )
            perform(self._endpoint, [Send(spare, message)])

    def _send(self) -> None:
        assert self._pieces is not None  # checked by the callers
        piece = next(self._pieces, None)
        if piece is None:
            self._pieces = None
            return
        vector, last = piece
        message = Message(
            Kind.COPY, self._rank, 0, 0, self._number, shard=self._channel, mark=last, vector=vector
        )
        perform(self._endpoint, [Send(self._to, message)])


def _cut(parts: Iterable[_Bytes]) -> Iterator[tuple[Vector, bool]]:
    """Yield pieces of the parts' bytes, filled with zeros to whole numbers, and whether each is the last."""
    room, filled, full = np.zeros(4 * PIECE, np.uint8), 0, False
    for part in parts:
        at = 0
        while at < part.size:
            if full:
                yield room.view(np.float32), False
                filled, full = 0, False
            size = min(part.size - at, room.size - filled)
            room[filled : filled + size] = part[at : at + size]
            at, filled = at + size, filled + size
            full = filled == room.size
    yield room[: -(-filled // 4) * 4].view(np.float32), True


class ReceivedCopies:
    """The newest whole copy of a server's state, on a spare.

    Attributes:
        came_s: when it came; None: there is none.
        over: no more will come.
    """

    def __init__(self) -> None:
        self.came_s: float | None = None
        self.over = False
        self._newest: _Bytes | None = None
        self._coming: list[_Bytes] = []
        self._number = 0

    def take(self, message: Message) -> None:
        """Take a piece."""
        assert message.vector is not None  # a COPY has one
        if message.last_copy:
            self.over = True
            return
        if message.pulled_at != self._number:
            self._number, self._coming = message.pulled_at, []
        self._coming.append(message.vector.view(np.uint8).copy())
        if message.mark:
            self._newest, self._coming = np.concatenate(self._coming), []
            self.came_s = time.monotonic()

    def state(self) -> Mapping[str, Any]:
        """Return the newest state; call it only once there is one."""
        assert self._newest is not None  # the caller has looked at `came_s`
        state: Mapping[str, Any] = _state_of(self._newest)
        return state
