"""Wire formats: vectors travel in 16 bits, in 8 bits, or as their largest numbers; nothing is lost for good.

What a message does not say of a vector, the side that sends keeps (Seide et al. 2014; Karimireddy et al.
2019, arXiv:1901.09847). With Q the rounding of a format, each message carries Q(y), where

    steps (gradients, displacements):   y = v + e;      e <- y - Q(y)     the receiver gets Q(y)
    weights, and the centre:            y = v - r;      r <- r + Q(y)     the receiver gets r
    weights that the reply replaces:    y = v - r + e;  e <- y - Q(y)     the receiver gets c + Q(y)

e is the residual, and r is what the receiver has, which both sides compute from the same message. In the last
case r is the centre as this worker has it, and c the centre as it was when that was sent. So the sum of all
steps that a receiver gets is the sum of all that were sent, up to the last e, and a receiver's weights are
the sender's up to the error of the last difference.

| format | a number is | bytes a number |
|---|---|---|
| bfloat16, float16 | rounded; float16 is limited to 65504 | 2 |
| int8 | a whole number from -127 to 127 times the scale of its row of 256 | 1.02 |
| topk | sent if it is among the largest; at first each fourth, later each hundredth | 2, later 0.08 |

With topk the momentum of SGD is on the workers: see `_MomentumStream`.

The first hundreds of contributions by topk send more (warm-up, Lin et al. 2018, arXiv:1712.01887), because
early gradients change fastest. Replies to topk are differences in int8: a centre that moves in all numbers
cannot be told by a few. A copy of the centre that a worker only looks at travels in float32.

A packed vector is: the format and the vector's length, each in 4 bytes; a bit for each mark (see `PRESENT`),
which no format may round; the numbers, with int8 each row behind its scale. So a long vector can leave while
it is packed, and be unpacked while it arrives.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms import Algorithm
from nnlo_common.base._block_threads import InOrder, Scratch, on_threads, work_through
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import PRESENT, Frame, Layout, PartWork, Vector, blocks, without_absent
from nnlo_common.base._state_tree import State, Stateful, require
from nnlo_common.protocol._events import Part, Received, Story

__all__ = ["PLAIN", "Wire", "WireEnd", "WireEnds", "from_bfloat16", "to_bfloat16"]

Bytes = npt.NDArray[np.uint8]

# Numbers that are packed at a time: with their copies they stay in a second-level cache. Full rows of int8.
_BLOCK = 1 << 15
# Numbers that have room for what a packed vector has besides.
_ROOM = 64
_HEAD = 8
_UPPER = int(sys.byteorder == "little")  # the place of a float32's upper half


def to_bfloat16(y: Vector, out: npt.NDArray[np.uint16], spare: Vector) -> None:
    """Write the upper halves of float32's bits, rounded to the nearest; leave what that loses in `y`."""
    bits = spare.view(np.uint32)
    np.add(y.view(np.uint32), np.uint32(0x8000), out=bits)  # half of the last place; infinity and NaN stay
    np.copyto(out, bits.view(np.uint16)[_UPPER::2])
    np.bitwise_and(bits, np.uint32(0xFFFF0000), out=bits)
    np.subtract(y, spare, out=y)


def from_bfloat16(halves: npt.NDArray[np.uint16], out: Vector) -> None:
    """Widen what `to_bfloat16` wrote, which is exact."""
    bits = out.view(np.uint32)
    np.copyto(bits, halves)
    np.left_shift(bits, np.uint32(16), out=bits)


class _WireFormat(ABC):
    """A way to write numbers down.

    Attributes:
        code: names it in messages; never changes.
    """

    code: ClassVar[int]

    @abstractmethod
    def most(self, size: int) -> int:
        """Return the most bytes that `size` numbers need."""


class _InBlocks(_WireFormat):
    """Writes each number down in turn; so the work is done block by block, in the cache.

    `spare` is memory for a block.
    """

    @abstractmethod
    def pack(self, y: Vector, body: Bytes, block: slice, size: int, spare: Vector) -> None:
        """Write one block `y`, of a vector of `size` numbers, where it belongs, and leave y - Q(y) in it."""

    @abstractmethod
    def add(self, body: Bytes, block: slice, out: Vector, spare: Vector) -> None:
        """Add one block to `out`, which is the whole vector."""


class _BFloat16(_InBlocks):
    """The upper half of float32's bits, rounded to the nearest."""

    code = 1

    def most(self, size: int) -> int:
        """Return two bytes for each."""
        return 2 * size

    def pack(self, y: Vector, body: Bytes, block: slice, size: int, spare: Vector) -> None:
        """Add half of the last place that is kept, and cut."""
        to_bfloat16(y, body[: 2 * size].view(np.uint16)[block], spare)

    def add(self, body: Bytes, block: slice, out: Vector, spare: Vector) -> None:
        """Put the bits back in their place."""
        from_bfloat16(body[: 2 * out.size].view(np.uint16)[block], spare)
        np.add(out[block], spare, out=out[block])


class _Float16(_InBlocks):
    """IEEE half precision; what is too large goes in several messages, what is too small once it is not."""

    code = 2
    _LARGEST = np.float32(65504)

    def most(self, size: int) -> int:
        """Return two bytes for each."""
        return 2 * size

    def pack(self, y: Vector, body: Bytes, block: slice, size: int, spare: Vector) -> None:
        """Round what is limited; NaN stays NaN."""
        np.clip(y, -self._LARGEST, self._LARGEST, out=spare)
        if not np.isfinite(y).all():  # nobody may overlook infinity
            spare[np.isinf(y)] = np.nan
        half = body[: 2 * size].view(np.float16)[block]
        np.copyto(half, spare, casting="same_kind")
        np.copyto(spare, half)
        np.subtract(y, spare, out=y)

    def add(self, body: Bytes, block: slice, out: Vector, spare: Vector) -> None:
        """Widen, which is exact."""
        np.copyto(spare, body[: 2 * out.size].view(np.float16)[block])
        np.add(out[block], spare, out=out[block])


class _Int8(_InBlocks):
    """Whole numbers times the scale of their row of 256, so that its largest is 127."""

    code = 3
    _ROW = 256
    _STEPS = np.float32(127)
    _TINY = np.float32(np.finfo(np.float32).tiny)

    def most(self, size: int) -> int:
        """Return one byte for each, and four for a scale; a last row that is not full is one, too."""
        return 4 * -(-size // self._ROW) + size

    def pack(self, y: Vector, body: Bytes, block: slice, size: int, spare: Vector) -> None:  # noqa: ARG002
        """Divide each row by its largest number."""
        for rows, scales, steps, whole in self._rows(y, body, block, spare):
            np.abs(rows, out=whole)
            np.divide(whole.max(1), self._STEPS, out=scales)
            scales[scales < self._TINY] = 0
            np.multiply(rows, np.where(scales == 0, np.float32(0), 1 / scales)[:, None], out=whole)
            np.rint(whole, out=whole)
            np.copyto(steps, whole, casting="unsafe")  # NaN stays NaN by its scale
            np.multiply(whole, scales[:, None], out=whole)
            np.subtract(rows, whole, out=rows)

    def add(self, body: Bytes, block: slice, out: Vector, spare: Vector) -> None:
        """Multiply each row by its scale."""
        for rows, scales, steps, whole in self._rows(out[block], body, block, spare):
            np.copyto(whole, steps)
            np.multiply(whole, scales[:, None], out=whole)
            np.add(rows, whole, out=rows)

    def _rows(
        self, numbers: Vector, body: Bytes, block: slice, spare: Vector
    ) -> Iterator[tuple[Vector, Vector, npt.NDArray[np.int8], Vector]]:
        """Yield the full rows of a block, then the one that is not full.

        Of each: its numbers, scales and whole numbers, and spare memory.
        """
        width, start = self._ROW, self.most(block.start)
        full, rest = divmod(numbers.size, width)
        for first, count, each in ((0, full, width), (full, 1, rest)):
            if count and each:
                at, stop = first * width, first * width + count * each
                written = body[start + self.most(at) : start + self.most(stop)].reshape(count, 4 + each)
                scales, steps = written[:, :4].view(np.float32)[:, 0], written[:, 4:].view(np.int8)
                rows, whole = (one[at:stop].reshape(count, each) for one in (numbers, spare))
                yield rows, scales, steps, whole


class _TopK(_WireFormat):
    """The largest numbers, exact, with their places; the others wait in the residual."""

    code = 4
    #: The parts of all numbers that the first message and later ones send.
    FIRST, LATER = 1 / 4, 1 / 100
    #: Messages until then.
    WARM_UP = 256
    # Numbers among which the limit is looked for; the largest of more than this are found by it first.
    _SAMPLE = 1 << 14

    def most(self, size: int) -> int:
        """Return eight bytes for each that the first message sends."""
        return 4 + 8 * self._count(size, 0)

    def pack(self, y: Vector, body: Bytes, sent: int) -> int:
        """Write the largest of `y` and their places; 0 is left of them. Return how many bytes that needs.

        Args:
            y: the numbers.
            body: at least `most` bytes.
            sent: how many vectors this stream has sent before.
        """
        places = self._largest(y, self._count(y.size, sent)).astype(np.uint32)
        stop = 4 + 4 * places.size
        body[:4].view(np.uint32)[0] = places.size
        body[4:stop].view(np.uint32)[:] = places
        body[stop : stop + 4 * places.size].view(np.float32)[:] = y[places]
        y[places] = 0
        return stop + 4 * places.size

    def add(self, body: Bytes, out: Vector) -> None:
        """Add the numbers at their places.

        Raises:
            ValueError: it was not written by `pack` for so many numbers.
        """
        count = int(body[:4].view(np.uint32)[0]) if body.size >= 4 else -1
        if body.size != 4 + 8 * count:
            raise ValueError(f"it has {body.size} bytes for {count} places")
        places = body[4 : 4 + 4 * count].view(np.uint32)
        if count and (places[-1] >= out.size or (places[1:] <= places[:-1]).any()):
            raise ValueError("its places are not in order")
        numbers = body[4 + 4 * count :].view(np.float32)
        out[places] += numbers
        if not np.isfinite(numbers).all():
            out[:] = np.nan  # a server looks at a few numbers only

    def _count(self, size: int, sent: int) -> int:
        """Return how many numbers a message sends: fewer by the same factor each time."""
        part = self.FIRST * (self.LATER / self.FIRST) ** min(1.0, sent / self.WARM_UP)
        return max(1, int(size * part))

    def _largest(self, y: Vector, count: int) -> npt.NDArray[np.int64]:
        """Return the places of the largest, in order; NaN is larger than all."""
        found: npt.NDArray[np.int64] = np.arange(0)
        if y.size > 4 * self._SAMPLE:
            # A limit that about a half more than wanted exceed; the rest is not looked at.
            sample = np.sort(np.abs(y[:: y.size // self._SAMPLE]))
            limit = sample[-min(sample.size, 1 + 3 * count * sample.size // (2 * y.size))]
            every = blocks(slice(0, y.size), _BLOCK)
            above = [np.flatnonzero(~(np.abs(y[block]) < limit)) + block.start for block in every]
            found = np.concatenate(above)
        if found.size < count:
            found = np.arange(y.size)
        if found.size > count:
            found = found[np.argpartition(np.abs(y[found]), found.size - count)[-count:]]
        found.sort()
        return found


_FORMATS: Mapping[str, _InBlocks | _TopK] = {
    "bfloat16": _BFloat16(),
    "float16": _Float16(),
    "int8": _Int8(),
    "topk": (_TOPK := _TopK()),
}
#: Formats of replies, where another one serves better.
_DOWN = {"topk": "int8"}


def _quietly() -> np.errstate:
    """Return a context in which NaN and infinity travel without a warning; the server tells of them."""
    return np.errstate(divide="ignore", invalid="ignore", over="ignore")


def _start_of_numbers(marks: int) -> int:
    """Return how many bytes a packed vector has before its numbers."""
    return _HEAD + -(-marks // 32) * 4


def _packed_size(way: _WireFormat, size: int, marks: int) -> int:
    """Return how many float32 numbers have room for a packed vector."""
    return -(-(_start_of_numbers(marks) + way.most(size)) // 4)


class _Stream(Stateful):
    """One direction between a worker and a server, on one of its sides.

    Attributes:
        reference: r; without numbers: none.
        residual: e, on the side that sends; without numbers: none.
        sent: how many vectors have been sent.

    Args:
        way: its format.
        size: the number of numbers of a vector.
        reference: r, which may be another stream's.
        follows: r becomes what the receiver gets.
        keeps: this side sends, and keeps e.
        marks: the places of marks.
    """

    saved: ClassVar[tuple[str, ...]] = ("reference", "residual", "sent")
    #: What waits on the side that sends.
    waiting: ClassVar[tuple[str, ...]] = ("residual",)

    def __init__(
        self,
        way: _InBlocks | _TopK,
        size: int,
        reference: Vector | None,
        *,
        follows: bool,
        keeps: bool,
        marks: npt.NDArray[np.int64],
    ) -> None:
        self._way, self._size, self._follows, self._marks = way, size, follows, marks
        self.reference: Vector = np.zeros(0, np.float32) if reference is None else reference
        self.residual: Vector = np.zeros(size if keeps else 0, np.float32)
        self.sent = 0
        self._start = _start_of_numbers(marks.size)
        self._work = Scratch(min(size, _BLOCK))

    def most(self) -> int:
        """Return how many float32 numbers have room for a packed vector."""
        return _packed_size(self._way, self._size, self._marks.size)

    def begin(self, value: Vector, *, again: bool = False) -> None:
        """Start anew: the receiver has `value`; `again`: it is another receiver, and what waits is kept."""
        if not again:
            for name in self.waiting:
                getattr(self, name)[:] = 0
            self.sent = 0
        if self.reference.size:
            np.copyto(self.reference, value)

    def packing(self, value: Vector, room: Vector) -> tuple[Vector, PartWork]:
        """Begin to write a vector into `room`, which has `most` numbers.

        Returns:
            The part that it takes, and what writes a part of its numbers.
        """
        raw = room.view(np.uint8)
        raw[:_HEAD].view(np.uint32)[:] = self._way.code, self._size
        raw[_HEAD : self._start] = 0
        there = value[self._marks] > 0
        bits = np.packbits(there)
        raw[_HEAD : _HEAD + bits.size] = bits
        body = raw[self._start :]
        waiting: list[Vector] = []
        if self.residual.size and there.any():  # else it is no gradient
            waiting = [getattr(self, name) for name in self.waiting]
        if isinstance(self._way, _TopK) or (waiting and not there.all()):
            with _quietly(), without_absent(waiting, self._marks, value):
                used = self._start + self._pack(value, body)
            write: PartWork = _nothing
        else:
            used, write = self._start + self._way.most(self._size), self._writing(self._way, value, body)
        stop = -(-used // 4)
        raw[used : 4 * stop] = 0
        self.sent += 1
        return room[:stop], write

    def unpack(self, packed: Vector, out: Vector) -> None:
        """Write what was packed on the other side into `out`, which is no part of it.

        Raises:
            ValueError: it is not that.
        """
        way = self._way
        if isinstance(way, _TopK):
            self._check_head(packed)
            out[:] = 0
            with _quietly():
                way.add(packed.view(np.uint8)[self._start :], out)
        else:
            work_through(self.unpacking(packed, out), self._size)
        if self._marks.size:
            there = np.unpackbits(packed.view(np.uint8)[_HEAD : self._start], count=self._marks.size)
            out[self._marks] = there * PRESENT

    def unpacking(self, packed: Vector, out: Vector) -> PartWork:
        """Return what writes a part of what was packed in blocks into `out`; the head must be there.

        Raises:
            ValueError: as `unpack`.
        """
        self._check_head(packed)
        way, body = self._way, packed.view(np.uint8)[self._start :]
        assert isinstance(way, _InBlocks)  # the caller has seen to it
        if body.size != -(-way.most(self._size) // 4) * 4:
            raise ValueError(f"it has {body.size} bytes for {self._size} numbers")

        def unpack(part: slice) -> None:
            with _quietly():
                for block in blocks(part, _BLOCK):
                    _, spare = self._work.rows[:, : block.stop - block.start]
                    if self._follows:
                        way.add(body, block, self.reference, spare)
                    out[block] = self.reference[block] if self.reference.size else 0
                    if not self._follows:
                        way.add(body, block, out, spare)

        return unpack

    def touched(self, stop: int) -> int:
        """Return how many numbers must be packed before what lies before `stop` can leave."""
        done = -(-(4 * stop - self._start) // self._way.most(_BLOCK))
        return min(self._size, max(1, done) * _BLOCK)  # the head may be written where numbers have been

    def complete(self, stop: int) -> int:
        """Return how many numbers can be unpacked once what lies before `stop` has come; below 1: none."""
        there = 4 * stop - self._start
        return self._size if there >= self._way.most(self._size) else there // self._way.most(_BLOCK) * _BLOCK

    def _check_head(self, packed: Vector) -> None:
        raw = packed.view(np.uint8)
        if raw.size < self._start or tuple(raw[:_HEAD].view(np.uint32)) != (self._way.code, self._size):
            raise ValueError("it has another format or length")

    def _pack(self, value: Vector, body: Bytes) -> int:
        """Write all numbers; return how many bytes they take."""
        way = self._way
        if isinstance(way, _TopK):  # which keeps a residual, of steps
            self.residual += value
            return way.pack(self.residual, body, self.sent)
        work_through(self._writing(way, value, body), self._size)
        return way.most(self._size)

    def _writing(self, way: _InBlocks, value: Vector, body: Bytes) -> PartWork:
        """Return what writes a part of the numbers."""

        def write(part: slice) -> None:
            with _quietly():
                for block in blocks(part, _BLOCK):
                    y, spare = self._work.rows[:, : block.stop - block.start]
                    new = value[block]
                    if self.reference.size:
                        new = np.subtract(new, self.reference[block], out=y)
                    if self.residual.size:
                        y = self.residual[block]
                        np.add(y, new, out=y)
                    way.pack(y, body, block, self._size, spare)
                    if self._follows:  # by the same code as the receiver, so that both have the same bits
                        way.add(body, block, self.reference, spare)

        return write


def _nothing(part: slice) -> None:
    """Leave it: all was done at once."""


class _MomentumStream(_Stream):
    """Gradients by topk, with the momentum of the SGD that they are sent to; it steps without.

    Momentum correction (Lin et al. 2018, section 3.1), for a gradient g and the momentum m:

        u <- m u + g;  y = u + e                    Nesterov's: y = g + m u + e;  e <- y - Q(y)

    So what arrives is the sum of the steps that SGD with this momentum makes, up to the last e, and the
    server makes each with the learning rate that it has then.

    Deviation: the paper clears u where a number is sent (momentum factor masking). A number that is sent
    often would have hardly any momentum then, in the warm-up most of all: see docs/wire.md for what that
    costs.

    Attributes:
        velocity: u.

    Args:
        momentum: m.
        nesterov: whether it is Nesterov's.
        options: of the stream.
    """

    saved = (*_Stream.saved, "velocity")
    waiting = (*_Stream.waiting, "velocity")

    def __init__(self, momentum: float, size: int, *, nesterov: bool, **options: Any) -> None:
        super().__init__(_TOPK, size, None, **options)
        self._momentum, self._nesterov = np.float32(momentum), nesterov
        self.velocity: Vector = np.zeros(size, np.float32)

    def _pack(self, value: Vector, body: Bytes) -> int:
        def gather(part: slice) -> None:
            for block in blocks(part, _BLOCK):
                u, v = self.velocity[block], self.residual[block]
                np.multiply(u, self._momentum, out=u)
                np.add(u, value[block], out=u)
                if self._nesterov:
                    y = self._work.rows[0, : u.size]
                    np.add(v, np.add(value[block], np.multiply(u, self._momentum, out=y), out=y), out=v)
                else:
                    np.add(v, u, out=v)

        work_through(gather, self._size)
        return _TOPK.pack(self.residual, body, self.sent)


class WireEnd:
    """One side of a compressed conversation between a worker and a server.

    Args:
        wire: the formats.
        serves: it is the server's.
    """

    def __init__(self, wire: Wire, *, serves: bool) -> None:
        size, none = wire.size, np.zeros(0, np.int64)
        center = np.zeros(size, np.float32) if wire.down == "center" else None
        self.down = _Stream(
            _FORMATS[_DOWN.get(wire.name, wire.name)],
            size,
            center,
            follows=center is not None,
            keeps=serves and center is None,
            marks=none,
        )
        follows = wire.up == "weights"
        own: Vector = np.zeros(size if wire.up != "steps" else 0, np.float32)
        self._replies_are_starts = serves and wire.up == "replaced"
        options: dict[str, Any] = {
            "follows": follows,
            "keeps": not serves and not follows,
            "marks": wire.marks,
        }
        reference = {"steps": None, "weights": own, "replaced": own if serves else center}[wire.up]
        self.up = _Stream(_FORMATS[wire.name], size, reference, **options)
        if wire.momentum and not serves:
            self.up = _MomentumStream(wire.momentum, size, nesterov=wire.nesterov, **options)
        self._out, self._into = (self.down, self.up) if serves else (self.up, self.down)
        self._wire = wire

    def begin(self, center: Vector, *, again: bool = False) -> None:
        """Start anew at the centre, which has travelled in float32; `again`: see `_Stream.begin`."""
        self.down.begin(center, again=again)
        self.up.begin(center, again=again)

    def pack(self, vector: Vector, room: Vector) -> Vector:
        """Write a vector into `room`; return the part that it takes."""
        packed, complete = self.packing(vector, room)
        complete(slice(0, packed.size))
        return packed

    def packing(self, vector: Vector, room: Vector) -> tuple[Vector, PartWork]:
        """Begin to write a vector into `room`; it keeps its numbers.

        Returns:
            The part that it takes, and what completes a part of that; call it for all parts, in order.
        """
        packed, write = self._out.packing(vector, room)
        return packed, self._completing(on_threads(write, self._wire.size))

    def packing_in_place(self, frame: Frame, fill: PartWork | None = None) -> tuple[Vector, PartWork]:
        """Begin to write the vector in a frame down in its place; `fill` makes its numbers, if they lack.

        Returns:
            As `packing`.
        """
        vector = frame.vector[: self._wire.size]
        room, write = self._out.packing(vector, self._wire.room)
        packed = frame.vector[: room.size]

        def make(numbers: slice) -> None:
            if fill is not None:
                fill(numbers)
            if self._replies_are_starts:
                np.copyto(self.up.reference[numbers], vector[numbers])
            write(numbers)

        in_order = isinstance(fill, InOrder)
        complete = self._completing(InOrder(make) if in_order else on_threads(make, self._wire.size))

        def put(part: slice) -> None:
            complete(part)
            # A number takes less room packed, so those that are not yet packed stay.
            np.copyto(packed[part], room[part])

        return packed, put

    def _completing(self, write: PartWork) -> PartWork:
        """Return what completes a part of the packed vector, given what writes numbers."""
        written = 0

        def complete(part: slice) -> None:
            nonlocal written
            stop = self._out.touched(part.stop)
            if stop > written:
                write(slice(written, stop))
                written = stop

        return complete

    def unpack_in_place(self, packed: Vector, frame: Frame) -> Vector:
        """Write the vector that was packed in a frame in its place.

        Raises:
            ValueError: it was not packed by the other side.
        """
        copy = self.memory(packed.size)
        np.copyto(copy, packed)
        vector = frame.vector[: self._wire.size]
        self._into.unpack(copy, vector)
        return vector

    def arriving(self, parts: Iterable[Part | None], packed: Vector, out: Vector) -> Iterator[Part | None]:
        """Write a vector that was packed in blocks into `out` while it arrives; give what is written.

        Args:
            parts: those of the packed vector, in order, as each has come; None while none has.
            packed: the memory that they come into.
            out: no part of that.

        Raises:
            ValueError: it was not packed by the other side.
        """
        written, unpack = 0, None
        for part in parts:
            if part is None:
                yield None
                continue
            stop = self._into.complete(packed.size if part[0].stop is None else part[0].stop)
            if stop > written:
                unpack = unpack or self._into.unpacking(packed, out)
                unpack(new := slice(written, stop))
                written = stop
                yield new, out[new]

    def memory(self, size: int) -> Vector:
        """Return memory for a packed vector of so many float32 numbers, for a moment.

        Raises:
            ValueError: none is so long.
        """
        memory = self._wire.room[:size]
        if memory.size < size:
            raise ValueError(f"it has {size} numbers")
        return memory

    def room(self) -> int:
        """Return how many float32 numbers have room for what it packs."""
        return self._out.most()

    def state(self) -> State:
        """Return all that the next message depends on."""
        return {"format": self._wire.name, "up": self.up.state(), "down": self.down.state()}

    def check(self, state: object) -> None:
        """Refuse a state that `load` cannot use; change nothing."""
        require("a wire", state, format=self._wire.name, up=Mapping, down=Mapping)
        assert isinstance(state, Mapping)  # require has seen to it
        self.up.check(state["up"])
        self.down.check(state["down"])

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.check(state)
        self.up.load(state["up"])
        self.down.load(state["down"])


class Wire:
    """How vectors travel between the workers of a training and one server.

    Attributes:
        name: the format; "float32": unchanged.
        size: the number of numbers of a vector.
        marks: the places of the marks in it.
        up: what workers send, see `Algorithm.sends`.
        down: what servers reply, see `Algorithm.replies`.
        momentum: of the velocity that topk's workers keep; 0: they keep none.
        nesterov: whether it is Nesterov's.

    Example:
        >>> from nnlo_common import Downpour, FlatVector
        >>> layout = FlatVector.of([np.zeros(1000, "f4")]).layout
        >>> wire = Wire(Downpour(wire="int8"), layout, slice(0, 1000))
        >>> worker, server, there = wire.end(serves=False), wire.end(serves=True), Frame(1000)
        >>> gradient = np.linspace(-1, 1, 1000, dtype=np.float32)
        >>> packed = worker.pack(gradient, there.vector)
        >>> packed.nbytes
        1024
        >>> applied = server.unpack_in_place(packed, there)
        >>> bool(np.allclose(applied + worker.up.residual, gradient, atol=1e-7))
        True
    """

    def __init__(
        self, algorithm: Algorithm | None = None, layout: Layout | None = None, place: slice = slice(0, 0)
    ) -> None:
        self.size = place.stop - place.start
        packs = algorithm is not None and algorithm.packs(self.size)
        self.name = algorithm.wire if algorithm is not None and packs else "float32"
        self.up = "steps" if algorithm is None else algorithm.sends
        self.down = "center" if algorithm is None else algorithm.replies
        self.momentum = 0.0 if algorithm is None or not self.packs else algorithm.topk_momentum
        self.nesterov = algorithm is not None and algorithm.topk_nesterov
        self.marks: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        if layout is not None and self.packs:
            self.marks = layout.unused_marks(place)
        self._room: Vector = np.zeros(0, np.float32)

    @property
    def packs(self) -> bool:
        """Whether vectors travel in another form."""
        return self.name != "float32"

    @property
    def packed_size(self) -> int:
        """How many float32 numbers a packed contribution has; 0: none is packed, or their number varies."""
        way = _FORMATS.get(self.name)
        return _packed_size(way, self.size, self.marks.size) if isinstance(way, _InBlocks) else 0

    def end(self, *, serves: bool) -> WireEnd:
        """Make one side of a conversation."""
        return WireEnd(self, serves=serves)

    @property
    def room(self) -> Vector:
        """Memory for a packed vector, for a moment."""
        if not self._room.size:
            self._room = np.zeros(self.size + _ROOM, np.float32)
        return self._room


#: All vectors travel unchanged.
PLAIN = Wire()


class WireEnds(dict[int, WireEnd]):
    """A server's sides of the conversations with its workers, by rank.

    Args:
        wire: how their vectors travel.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def begin(self, rank: int, center: Vector) -> None:
        """Start anew with a worker that gets the centre."""
        self[rank] = self.wire.end(serves=True)
        self[rank].begin(center)

    def unpacked(self, event: Received, story: Story) -> Received:
        """Return a contribution with its vector as the worker has made it."""
        message = event.message
        assert message.vector is not None  # a contribution
        try:
            vector = self[message.sender].unpack_in_place(message.vector, event.frame)
        except (KeyError, ValueError) as error:  # of a resumed worker that this state does not know
            raise story.error(
                f"rank {message.sender} sent a vector that cannot be read ({error}); have all ranks one wire?"
            ) from None
        return Received(message.with_vector(vector), event.frame)

    def states(self, names: Mapping[int, int]) -> State:
        """Return what is saved of them, by these names of workers; nothing with float32."""
        saved = {str(names[rank]): end.state() for rank, end in self.items() if rank in names}
        return {"wires": saved} if self.wire.packs else {}

    def loaded(self, owner: str, state: Mapping[str, Any]) -> WireEnds:
        """Return the sides that were saved in a server's state.

        Raises:
            ConfigurationError: it was saved with another wire.
        """
        if self.wire.packs != ("wires" in state):
            raise ConfigurationError(
                f"{owner}: the state was saved with another wire than {self.wire.name!r}; resume with it"
            )
        ends = WireEnds(self.wire)
        for rank, one in state.get("wires", {}).items():
            ends[int(rank)] = self.wire.end(serves=True)
            ends[int(rank)].load(one)
        return ends
