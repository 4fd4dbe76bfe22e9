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
import hashlib
import json
import mmap
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, plural
from nnlo_common.base._limited_formats import parsed_json

__all__ = [
    "Apart",
    "FlatVector",
    "Frame",
    "HEADER_BYTES",
    "Layout",
    "PAGE",
    "PRESENT",
    "PartWork",
    "Segment",
    "Vector",
    "blocks",
    "described",
    "laid_out",
    "looks_finite",
    "put_together",
    "telling_places",
    "without_absent",
    "zeroed",
]

# -- the segment table of a flat vector: the place of each array, and checks of the arrays --------------

# float32 holds every value of these; bfloat16 is ml_dtypes' (what torch, JAX and TensorFlow hand out).
_EXACT = ("float32", "float16", "bfloat16")
# np.shares_memory solves an integer problem; views that need more work than this are refused.
_OVERLAP_WORK = 100_000
_LINE = 16  # float32 numbers in a cache line


@dataclass(frozen=True, slots=True)
class Segment:
    """The place of one array in the vector; a tied array has the place of the array it is tied to.

    Example:
        >>> Segment(name="bias", shape=(3,), dtype="float32", offset=6, size=3).place
        slice(6, 9, None)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int
    tied_to: str | None = None

    @property
    def place(self) -> slice:
        """The slice of the vector that holds this array."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class Layout:
    """The segment table: the place of each array in the flat vector.

    Segments may have gaps behind them, for alignment; numbers in a gap are sent with the segment before it.

    Example:
        >>> layout = Layout.of([np.zeros((2, 3), "f4"), np.zeros(3, "f4")], names=["w", "b"])
        >>> layout.size
        9
        >>> [(segment.name, segment.place) for segment in layout.segments]
        [('w', slice(0, 6, None)), ('b', slice(6, 9, None))]
    """

    segments: tuple[Segment, ...]
    size: int

    @classmethod
    def of(
        cls,
        arrays: Sequence[npt.NDArray[Any]],
        names: Sequence[str] | None = None,
        *,
        allow_narrowing: bool = False,
    ) -> Layout:
        """Lay `arrays` out one after another, in order, without gaps.

        Arrays that are the same memory (tied weights) share one place. Zero-size arrays get an empty one.

        Args:
            arrays: numpy arrays, 0-d allowed, contiguous or not.
            names: used in error messages; "array 0", "array 1", ... by default.
            allow_narrowing: accept float64, and round it to float32.

        Raises:
            ConfigurationError: a dtype that float32 cannot hold, an item that is not an array, a name
                given twice, or partly overlapping arrays.
        """
        arrays, names = list(arrays), _checked_names(arrays, names)
        for array, name in zip(arrays, names, strict=True):
            _check_array(array, name, allow_narrowing)
        tied = _ties(arrays, names)
        return laid_out(
            (name, array.shape, array.dtype.name, tied.get(index, index))
            for index, (array, name) in enumerate(zip(arrays, names, strict=True))
        )

    def marks(self) -> npt.NDArray[np.int64]:
        """Return the last place before each next segment; it is unused if segments are padded."""
        ends = [segment.offset for segment in self.segments[1:]] + [self.size]
        return np.array(ends, np.int64) - 1

    def unused_marks(self, place: slice) -> npt.NDArray[np.int64]:
        """Return the marks within a part of the vector that are no number of an array, from its start."""
        ends = zip(self.segments, self.marks().tolist(), strict=True)
        unused = {mark for one, mark in ends if mark >= one.place.stop and place.start <= mark < place.stop}
        places: npt.NDArray[np.int64] = np.array(sorted(unused), np.int64) - place.start
        return places

    def inside(self, place: slice) -> list[int]:
        """Return the indices of the segments in a part of the vector that `cut` made."""
        return [
            index for index, segment in enumerate(self.segments) if place.start <= segment.offset < place.stop
        ]

    def cut(self, parts: int) -> tuple[slice, ...]:
        """Cut the vector at parameter boundaries into `parts` pieces whose largest is as small as possible.

        Raises:
            ConfigurationError: more parts than parameters.

        Example:
            >>> Layout.of([np.zeros(n, "f4") for n in (5, 1, 1, 4)]).cut(2)
            (slice(0, 6, None), slice(6, 11, None))
        """
        starts = [segment.offset for segment in self.segments if segment.size and segment.tied_to is None]
        sizes = np.diff([0, *starts[1:], self.size]).tolist() if starts else []
        if not 1 <= parts <= max(1, len(sizes)):
            raise ConfigurationError(
                f"the centre cannot be cut into {parts} parts at parameter boundaries: the model has "
                f"{len(sizes)} non-empty parameters; use at most {plural(max(1, len(sizes)), 'server')}"
            )
        low, high = max(sizes, default=0), self.size
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(_packed(sizes, middle)) <= parts else (middle + 1, high)
        ends = np.cumsum(_split_to(_packed(sizes, low), sizes, parts)).tolist()
        return tuple(slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))

    def difference(self, other: Layout) -> str | None:
        """Describe the first difference between `other` and this layout in a line; None if they are equal."""
        for index, (mine, theirs) in enumerate(zip(self.segments, other.segments, strict=False)):
            if mine != theirs:
                return f"parameter {index} is {_brief(mine)} here and {_brief(theirs)} there"
        if len(self.segments) != len(other.segments):
            return f"{len(self.segments)} parameters here and {len(other.segments)} there"
        return None

    def to_json(self) -> str:
        """Return the table as one line of JSON, for other ranks and for files."""
        rows = [asdict(segment) for segment in self.segments]
        return json.dumps({"size": self.size, "segments": rows}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        table = parsed_json(text)
        try:
            rows = [Segment(**{**row, "shape": tuple(row["shape"])}) for row in table["segments"]]
            return cls(tuple(rows), table["size"])
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it is no layout ({error})") from error

    def fingerprint(self) -> str:
        """Return a hash of 16 hexadecimal digits, equal for equal layouts."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()


def laid_out(pieces: Iterable[tuple[str, Sequence[int], str, Hashable]], *, padded: bool = False) -> Layout:
    """Lay pieces out one after another, in order; pieces with the same memory share one place.

    Args:
        pieces: name, shape and dtype of each, and an identity of its memory.
        padded: leave at least one number free after each, for a mark, and begin the next on a cache line.
            Kernels sum unaligned memory in another order, and back ends wrap a piece without copying only if
            it is aligned.

    Example:
        >>> layout = laid_out([("a", (2, 3), "float32", 1), ("b", (6,), "float32", 1)], padded=True)
        >>> [(segment.offset, segment.tied_to) for segment in layout.segments], layout.size
        ([(0, None), (0, 'a')], 16)
    """
    segments: list[Segment] = []
    owners: dict[Hashable, Segment] = {}
    offset = 0
    for name, shape, dtype, memory in pieces:
        owner, size = owners.get(memory), prod(shape)
        place, tied_to = (offset, None) if owner is None else (owner.offset, owner.name)
        segments.append(Segment(name, tuple(shape), dtype, place, size, tied_to))
        if owner is None:
            owners[memory] = segments[-1]
            offset += _LINE * (size // _LINE + 1) if padded else size
    return Layout(tuple(segments), offset)


def described(array: object) -> str:
    """Describe an array for an error message."""
    if isinstance(array, np.ndarray):
        return f"{array.dtype.name}{list(array.shape)}"
    return f"a {type(array).__name__}"


def _brief(segment: Segment) -> str:
    tie = f" tied to {segment.tied_to!r}" if segment.tied_to else ""
    return f"{segment.name!r} {segment.dtype}{list(segment.shape)}{tie}"


def _checked_names(arrays: Sequence[object], names: Sequence[str] | None) -> list[str]:
    if names is None:
        return [f"array {index}" for index in range(len(arrays))]
    if len(names) != len(arrays):
        raise ConfigurationError(f"{len(arrays)} arrays were given with {len(names)} names; give one each")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigurationError(f"the name {name!r} was given to two arrays; names must differ")
        seen.add(name)
    return list(names)


def _check_array(array: object, name: str, allow_narrowing: bool) -> None:
    if not isinstance(array, np.ndarray):
        raise ConfigurationError(f"{name} is {described(array)}, not a numpy array; use numpy.asarray on it")
    lengths = zip(array.strides, array.shape, strict=True)
    if array.size and any(stride == 0 and length > 1 for stride, length in lengths):
        raise ConfigurationError(f"{name} overlaps itself, as a broadcast array does; pass a copy of it")
    if array.dtype.name in _EXACT or (allow_narrowing and array.dtype == np.float64):
        if array.dtype.isnative:
            return
        raise ConfigurationError(f"{name} is not in this machine's byte order; use .astype on it")
    advice = (
        "float32 would round it: convert it yourself, or pass allow_narrowing=True (FlatVector only)"
        if array.dtype == np.float64
        else "only float32, float16 and bfloat16 arrays are exchanged; leave it out or convert it yourself"
    )
    raise ConfigurationError(f"{name} is {described(array)}; {advice}")


def _ties(arrays: Sequence[npt.NDArray[Any]], names: Sequence[str]) -> dict[int, int]:
    """Map each array to the earlier one that has the same memory; refuse partial overlaps."""
    tied: dict[int, int] = {}
    bounds = np.lib.array_utils.byte_bounds
    spans = sorted((*bounds(array), index) for index, array in enumerate(arrays) if array.size)
    reach: list[tuple[int, int]] = []  # (end, index) of the earlier spans that are still open
    for low, high, index in spans:
        reach = [(end, other) for end, other in reach if end > low]
        for _, other in reach:
            if _identity(arrays[index]) == _identity(arrays[other]):
                tied[max(index, other)] = min(index, other)
            elif _overlap(arrays[index], arrays[other]):
                raise ConfigurationError(
                    f"{names[min(index, other)]} and {names[max(index, other)]} share part of their memory; "
                    "pass arrays that are either the same view or separate"
                )
        reach.append((high, index))
    return {later: _first(tied, later) for later in tied}


def _first(tied: dict[int, int], index: int) -> int:
    while index in tied:
        index = tied[index]
    return index


def _identity(array: npt.NDArray[Any]) -> tuple[object, ...]:
    return (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)


def _overlap(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    try:
        # The stubs know only the special values -1 and 0 of max_work.
        return np.shares_memory(one, other, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _packed(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill parts in order, each up to `capacity`; every size fits into one part."""
    parts: list[list[int]] = []
    room = -1
    for size in sizes:
        if size > room:
            parts.append([])
            room = capacity
        parts[-1].append(size)
        room -= size
    return parts


def _split_to(packed: list[list[int]], sizes: Sequence[int], parts: int) -> list[int]:
    """Split parts of several parameters until there are `parts` of them; return their sizes."""
    if not sizes:
        return [0]
    packed = [list(part) for part in packed]
    while len(packed) < parts:
        index = max((i for i, part in enumerate(packed) if len(part) > 1), key=lambda i: sum(packed[i]))
        part = packed[index]
        best = min(range(1, len(part)), key=lambda k: max(sum(part[:k]), sum(part[k:])))
        packed[index : index + 1] = [part[:best], part[best:]]
    return [sum(part) for part in packed]


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
#: Parts of a vector whose numbers lie elsewhere: their places, and the numbers.
Apart: TypeAlias = Sequence[tuple[slice, Vector]]
#: Returns the given number of zeroed bytes.
Allocate: TypeAlias = Callable[[int], npt.NDArray[np.uint8]]

#: Mark behind the gradient of a parameter that has one. It is added and scaled along with the gradient and
#: stays above 0; its square is 0 in float32, so no norm sees it.
PRESENT = np.float32(2.0**-100)


def put_together(vector: Vector, part: slice, apart: Apart) -> None:
    """Copy into a part of a vector what of it lies elsewhere.

    Example:
        >>> vector = np.zeros(5, np.float32)
        >>> put_together(vector, slice(0, 3), [(slice(2, 4), np.ones(2, np.float32))])
        >>> vector.tolist()
        [0.0, 0.0, 1.0, 0.0, 0.0]
    """
    for place, numbers in apart:
        start, stop = max(place.start, part.start), min(place.stop, part.stop)
        if start < stop:
            vector[start:stop] = numbers[start - place.start : stop - place.start]


@contextlib.contextmanager
def without_absent(
    memories: Sequence[Vector], marks: npt.NDArray[np.int64], vector: Vector
) -> Iterator[None]:
    """Within a `with` block, take what waits for arrays without a gradient out of some memories.

    Optimizers skip such arrays, so what is sent for them would be lost.

    Args:
        memories: each as long as the vector.
        marks: the places of the marks of all arrays in it, in order.
        vector: the gradient.

    Example:
        >>> gradient, waiting = np.float32([0, 0, 5, PRESENT]), np.float32([7, 0, 8, 0])
        >>> with without_absent([waiting], np.array([1, 3]), gradient):
        ...     print(waiting)
        [0. 0. 8. 0.]
        >>> waiting
        array([7., 0., 8., 0.], dtype=float32)
    """
    there = vector[marks] > 0
    if there.all() or not memories:
        yield
        return
    starts = [0, *(marks[:-1] + 1).tolist()]
    found = zip(starts, marks.tolist(), there.tolist(), strict=True)
    places = [slice(start, mark + 1) for start, mark, is_there in found if not is_there]
    waiting = [memory[place] for memory in memories for place in places]
    kept = [one.copy() for one in waiting]
    for one in waiting:
        one[:] = 0
    yield
    for one, before in zip(waiting, kept, strict=True):
        np.add(one, before, out=one)


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
    return bool(np.isfinite(vector.take(places)).all())


def telling_places(layout: Layout, part: slice) -> npt.NDArray[np.int64]:
    """Return the places, counted from the part's start, to test for NaN: two in each parameter.

    A NaN loss makes its whole gradient NaN, except for frozen parameters and embedding rows that were not
    looked up. So two numbers of each parameter are enough; testing all takes as long as an optimizer step.
    """
    inside = [layout.segments[index] for index in layout.inside(part) if layout.segments[index].size]
    ends = [place for s in inside for place in (s.offset, s.offset + s.size - 1)]
    places: npt.NDArray[np.int64] = np.array(ends, np.int64) - part.start
    return places
