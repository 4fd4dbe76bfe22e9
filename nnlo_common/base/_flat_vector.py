"""One contiguous float32 vector for a whole model, sent without copying.

Requirements that shaped this module:

* a message is one header and one vector in one piece of memory, so a vector is allocated with room for the
  header in front of it (`Frame`);
* the vector starts on a cache line (64 bytes), so that every numpy and BLAS kernel takes its fast path; a
  long one lies in large pages, which a transport copies at twice the speed;
* arrays are copied once into the vector and once out of it; views cost nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._layout import Layout, Segment, described

__all__ = [
    "FlatVector",
    "Frame",
    "HEADER_BYTES",
    "PAGE",
    "PRESENT",
    "PartWork",
    "Vector",
    "blocks",
    "looks_finite",
    "telling_places",
    "zeroed",
]

# -- memory in large pages, for vectors that ranks send ------------------------------------------------
# A message between two ranks of a host is one copy out of the sender's memory, for which the system looks
# up each page of both sides. With the usual 4 KiB pages the lookups take as long as the copy itself;
# Linux grants 2 MiB pages on request. Several pieces of memory share such a page, so a small piece does
# not occupy 2 MiB.

Bytes = npt.NDArray[np.uint8]

PAGE = 1 << 21
# Smaller pieces gain nothing.
_SMALL = 1 << 15
_ALIGNMENT = 64

_lock = threading.Lock()
_rest: Bytes = np.empty(0, np.uint8)  # the unused end of the page that small pieces share


def zeroed(count: int) -> Bytes:
    """Return `count` zeroed bytes; they are freed with the last reference to them.

    Example:
        >>> zeroed(100_000).any()
        np.False_
    """
    if count < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(count, np.uint8)
    if count > PAGE // 2:
        return _pages(count)
    global _rest  # noqa: PLW0603 - one process, one memory
    with _lock:
        if count > _rest.size:
            _rest = _pages(PAGE)
        piece, _rest = _rest[:count], _rest[-(-count // _ALIGNMENT) * _ALIGNMENT :]
    return piece


def _pages(count: int) -> Bytes:
    """Return `count` zeroed bytes in pages that nothing else uses."""
    # A short rest stays in small pages: it would waste a large one.
    large = max(1, round(count / PAGE)) * PAGE
    room = max(large, count)
    try:
        # One page more than needed, because large pages begin at multiples of their size.
        memory = mmap.mmap(-1, room + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # out of memory: numpy raises a better error
        return np.zeros(count, np.uint8)
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % PAGE
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    return everything[start : start + count]


Vector: TypeAlias = npt.NDArray[np.float32]
#: Computes one part of a vector; to be called once for each part.
PartWork: TypeAlias = Callable[[slice], None]
#: Returns the given number of zeroed bytes.
Allocate: TypeAlias = Callable[[int], npt.NDArray[np.uint8]]

#: Mark behind the gradient of a parameter that has one. It is added and scaled along with the gradient and
#: stays above 0; its square is 0 in float32, so no norm sees it.
PRESENT = np.float32(2.0**-100)

ALIGNMENT = 64
HEADER_BYTES = 64


class Frame:
    """Header room and a zeroed float32 vector in one contiguous, 64-byte-aligned piece of memory.

    Attributes:
        bytes: header and vector, in this order; a transport sends them.
        header: the header part, for struct.
        vector: the float32 part; starts on a cache line too.

    Args:
        size: the number of elements of the vector.
        allocate: returns the given number of zeroed bytes; for special memory.

    Example:
        >>> frame = Frame(3)
        >>> frame.vector
        array([0., 0., 0.], dtype=float32)
        >>> frame.bytes.nbytes - frame.vector.nbytes
        64
    """

    __slots__ = ("bytes", "header", "vector")

    def __init__(self, size: int, allocate: Allocate = zeroed) -> None:
        raw = allocate(ALIGNMENT + HEADER_BYTES + 4 * size)
        start = -raw.ctypes.data % ALIGNMENT
        self.lie_in(raw[start : start + HEADER_BYTES + 4 * size])

    def lie_in(self, memory: npt.NDArray[np.uint8]) -> None:
        """Use this memory from now on: writable room for the header, then the numbers."""
        self.bytes = memory
        self.header: memoryview[int] = memory.data[:HEADER_BYTES]
        self.vector: Vector = memory[HEADER_BYTES:].view(np.float32)


class FlatVector:
    """All arrays of a model in one float32 vector, in the order and at the places that `layout` gives.

    Attributes:
        layout: the segment table.
        frame: the memory, with header room.
        vector: the float32 vector; compute on it in place.

    Example:
        >>> weights = [np.ones((2, 2), "f4"), np.zeros(2, "f2")]
        >>> flat = FlatVector.of(weights)
        >>> flat.vector *= 3
        >>> flat.views()[0]
        array([[3., 3.],
               [3., 3.]], dtype=float32)
        >>> flat.write_to(weights)
        >>> weights[0].sum()
        np.float32(12.0)
    """

    __slots__ = ("frame", "layout", "vector")

    def __init__(self, layout: Layout, allocate: Allocate = zeroed) -> None:
        self.layout = layout
        self.frame = Frame(layout.size, allocate)
        self.vector = self.frame.vector

    @classmethod
    def of(
        cls,
        arrays: Sequence[npt.NDArray[Any]],
        names: Sequence[str] | None = None,
        *,
        allow_narrowing: bool = False,
    ) -> FlatVector:
        """Copy `arrays` (see `Layout.of`) into a new flat vector."""
        flat = cls(Layout.of(arrays, names, allow_narrowing=allow_narrowing))
        flat.read_from(arrays)
        return flat

    def part(self, layout: Layout, place: slice = slice(None)) -> FlatVector:
        """Return a part of the vector, or all of it, with its own layout; it shares the frame."""
        vector = self.vector[place]
        if layout.size != vector.size:
            raise ConfigurationError(
                f"a layout of {layout.size} numbers was given for {vector.size}; give one of that size"
            )
        part = copy(self)
        part.layout, part.vector = layout, vector
        return part

    def lie_in(self, memory: npt.NDArray[np.uint8]) -> None:
        """Use this memory from now on, see `Frame.lie_in`; earlier views keep the old memory."""
        self.frame.lie_in(memory)
        self.vector = self.frame.vector

    def views(self) -> list[Vector]:
        """Return one view of the vector for each array, in its shape; tied arrays share memory."""
        return [self.vector[segment.place].reshape(segment.shape) for segment in self.layout.segments]

    def read_from(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Copy `arrays` into the vector; widening from 16 bits is exact."""
        for segment, array, view in self._matched(arrays):
            if segment.tied_to is None:
                np.copyto(view, array, casting="unsafe")

    def write_to(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Copy the vector back into `arrays`, rounding to their dtype."""
        matched = self._matched(arrays)
        for segment, array, _ in matched:
            if not array.flags.writeable:
                raise ConfigurationError(
                    f"{segment.name} is read-only, so it cannot take the vector; pass a writable array"
                )
        for _, array, view in matched:
            np.copyto(array, view, casting="unsafe")

    def _matched(self, arrays: Sequence[npt.NDArray[Any]]) -> list[tuple[Segment, npt.NDArray[Any], Vector]]:
        segments = self.layout.segments
        if len(arrays) != len(segments):
            raise ConfigurationError(
                f"{len(arrays)} arrays were given for a layout of {len(segments)}; give one for each segment"
            )
        for segment, array in zip(segments, arrays, strict=True):
            if not isinstance(array, np.ndarray) or (array.shape, array.dtype.name) != (
                segment.shape,
                segment.dtype,
            ):
                raise ConfigurationError(
                    f"{segment.name} was laid out as {segment.dtype}{list(segment.shape)} but is now "
                    f"{described(array)}; make a new FlatVector when the model changes"
                )
        return list(zip(segments, arrays, self.views(), strict=True))


def blocks(part: slice, length: int) -> Iterator[slice]:
    """Cut a part of a vector into blocks.

    Example:
        >>> [(one.start, one.stop) for one in blocks(slice(3, 8), 2)]
        [(3, 5), (5, 7), (7, 8)]
    """
    return (slice(at, min(at + length, part.stop)) for at in range(part.start, part.stop, length))


def looks_finite(vector: Vector, places: npt.NDArray[np.int64]) -> bool:
    """Return whether the numbers at these places of the vector are finite; see `telling_places`."""
    return bool(np.isfinite(vector[places]).all())


def telling_places(layout: Layout, part: slice) -> npt.NDArray[np.int64]:
    """Return the places, counted from the part's start, to test for NaN: two in each parameter.

    A NaN loss makes its whole gradient NaN, except for frozen parameters and embedding rows that were not
    looked up. So two numbers of each parameter are enough; testing all takes as long as an optimizer step.
    """
    inside = [layout.segments[index] for index in layout.inside(part) if layout.segments[index].size]
    ends = [place for s in inside for place in (s.offset, s.offset + s.size - 1)]
    places: npt.NDArray[np.int64] = np.array(ends, np.int64) - part.start
    return places
