"""Objects in a volume of many pieces: labels joined over faces, and points or boxes that are found once.

    1  each piece    its map is labelled by itself, and kept on the disk                     (any rank)
    2  each piece    pairs of labels that touch over its faces                               (any rank)
       all pairs     union-find; the numbers of all objects follow from the pairs and counts (first rank)
    3  each piece    its labels become the numbers of objects                                (any rank)

Only pairs that touch are sent. Points and boxes are looked for in a piece with some context of its
neighbours, and belong to the piece that has their middle.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import new_folder, remove_tree, whole_file
from nnlo_common.base._limited_formats import mapped_array
from nnlo_common.inference._journal import full_disk, parts_folder
from nnlo_common.inference._pieces import Following
from nnlo_common.inference._tiles import Tiling
from nnlo_common.inference.sinks import Region, Regions, Whole

__all__ = [
    "FacesWork",
    "FoundRows",
    "Labelling",
    "MapSink",
    "ObjectIds",
    "PieceMaps",
    "RowsWork",
    "joined",
    "label_by_scipy",
    "remove_maps",
    "rows_of",
    "table_of_objects",
    "whole_of",
]

_Array = npt.NDArray[Any]
_MAP, _CLASSES = "map", "classes"


class Pieces(Protocol):
    """The pieces of one or several volumes."""

    tiling: Tiling

    @property
    def pieces(self) -> int: ...

    def place(self, piece: int) -> tuple[int, Region]: ...


def label_by_scipy(mask: _Array, connectivity: int) -> tuple[_Array, int]:
    """Label the connected parts of a mask; return labels from 1, and how many there are.

    Args:
        mask: of voxels.
        connectivity: 1: over faces; 2: over edges, too; and so on.
    """
    try:
        from scipy import ndimage
    except ImportError:
        raise MissingExtraError("labelling objects", "scipy", "objects") from None
    structure = ndimage.generate_binary_structure(mask.ndim, connectivity)
    labels, count = ndimage.label(mask, structure)
    return labels, int(count)


class Labelling:
    """Labels a piece of a map; 0 is no object, and neighbours of different values are different objects.

    Args:
        connectivity: as in `label_by_scipy`.
        function: of the map, returns labels from 1; None: the connected parts of each value.
    """

    def __init__(self, connectivity: int, function: Callable[[_Array], Any] | None = None) -> None:
        self.connectivity, self._function = connectivity, function

    def __call__(self, values: _Array) -> tuple[_Array, _Array]:
        """Return the labels of a map, and the value of each."""
        if self._function is not None:
            return self._by_function(values)
        labels: _Array = np.zeros(values.shape, np.uint32)
        classes: list[Any] = []
        for value in np.unique(values):
            if value:
                found, count = label_by_scipy(values == value, self.connectivity)
                labels[found > 0] = found[found > 0] + len(classes)
                classes += [value] * count
        return labels, np.asarray(classes, values.dtype)

    def _by_function(self, values: _Array) -> tuple[_Array, _Array]:
        assert self._function is not None
        found = np.asarray(self._function(values))
        if found.shape != values.shape or found.dtype.kind not in "biu" or (found.size and found.min() < 0):
            raise ConfigurationError(
                f"objects returned {found.dtype} of shape {found.shape} for a map of {values.shape}; return "
                "whole numbers from 0, of the same shape"
            )
        # 0 is no object; whatever the function calls the others, here they are 1, 2, 3, ...
        numbers, inverse = np.unique(found, return_inverse=True)
        first = 0 if numbers.size and numbers[0] == 0 else 1
        labels = (inverse.reshape(found.shape) + first).astype(np.uint32)
        return labels, np.ones(int(np.count_nonzero(numbers)), np.uint8)


class PieceMaps:
    """The maps of all pieces, each in a file of its own.

    Args:
        path: of the result; the maps are in a folder beside it.
        pieces: where each piece is.
    """

    def __init__(self, path: Path, pieces: Pieces) -> None:
        self._path, self.pieces = path, pieces
        self.folder = parts_folder(path) / "maps"

    def has(self, piece: int) -> bool:
        """Return whether a piece is there."""
        return self._file(piece, _MAP).is_file()

    def save(self, piece: int, **arrays: _Array) -> None:
        """Write the arrays of a piece."""
        try:
            new_folder(self.folder)
            for name in sorted(arrays):  # the map last: it says that the piece is there
                with whole_file(self._file(piece, name), synced=False) as file:
                    np.save(file, arrays[name], allow_pickle=False)
        except OSError as error:
            raise full_disk(self._path, error) from None

    def load(self, piece: int, name: str) -> _Array:
        """Return an array of a piece, mapped into memory."""
        path = self._file(piece, name)
        try:
            return mapped_array(path, follow=False)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be read ({error}); begin anew with --overwrite (overwrite=True)"
            ) from None

    def within(self, item: int, region: Region) -> Iterator[tuple[int, Region, Region]]:
        """Yield the pieces that have some of a region: the number, its part there, and that part here."""
        tiling = self.pieces.tiling
        for number in tiling.pieces_in(region):
            whole = tiling.piece(number)
            common = [
                (max(one.start, other.start), min(one.stop, other.stop))
                for one, other in zip(whole, region, strict=True)
            ]
            there = tuple(
                slice(a - one.start, b - one.start) for (a, b), one in zip(common, whole, strict=True)
            )
            here = tuple(
                slice(a - one.start, b - one.start) for (a, b), one in zip(common, region, strict=True)
            )
            yield item * tiling.pieces + number, there, here

    def read(self, item: int, region: Region) -> _Array:
        """Return the map of a region, from all pieces that have some of it."""
        found: _Array | None = None
        for piece, there, here in self.within(item, region):
            part = self.load(piece, _MAP)[there]
            if found is None:
                found = np.empty(tuple(one.stop - one.start for one in region), part.dtype)
            found[here] = part
        assert found is not None
        return found

    def _file(self, piece: int, name: str) -> Path:
        return self.folder / f"{name}-{piece:06}.npy"


class MapSink:
    """Sink that keeps the map of each piece, labelled if that is asked for.

    Args:
        maps: where they are kept.
        labelling: labels them; None: the maps themselves are kept.
    """

    lasts = True

    def __init__(self, maps: PieceMaps, labelling: Labelling | None) -> None:
        self.maps, self._labelling = maps, labelling

    def prepare(self) -> None:
        """Do nothing: a piece makes its own files."""

    def has(self, piece: int) -> bool:
        """Return whether a piece is there."""
        return self.maps.has(piece)

    def begin(self, piece: int, regions: Regions) -> _MapWriter:  # noqa: ARG002 - it is written as a whole
        """Begin a piece."""
        return _MapWriter(self.maps, piece, self._labelling)

    def finish(self, pieces: int, regions: Callable[[int], Regions]) -> None:
        """Do nothing: objects are joined next."""


class _MapWriter:
    """Writes the map of one piece."""

    def __init__(self, maps: PieceMaps, piece: int, labelling: Labelling | None) -> None:
        self._maps, self._piece, self._labelling = maps, piece, labelling
        self._map: _Array | None = None

    def write(self, name: str, region: Region, array: _Array) -> None:  # noqa: ARG002 - there is one, whole
        """Take the map."""
        shape = tuple(one.stop - one.start for one in self._maps.pieces.place(self._piece)[1])
        self._map = array.reshape(shape)

    def close(self) -> None:
        """Label the map, and write it."""
        assert self._map is not None
        if self._labelling is None:
            self._maps.save(self._piece, map=self._map)
            return
        labels, classes = self._labelling(self._map)
        self._maps.save(self._piece, map=labels, classes=classes)

    def discard(self) -> None:
        """Drop the map."""


class FacesWork:
    """Looks for labels that touch over the faces of a piece.

    Args:
        maps: labelled.
        connectivity: as in `label_by_scipy`.
    """

    def __init__(self, maps: PieceMaps, connectivity: int) -> None:
        self._maps, self._connectivity = maps, connectivity
        self._done: list[tuple[int, Any]] = []
        counts = [len(maps.load(piece, _CLASSES)) for piece in range(maps.pieces.pieces)]
        self._bases = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @property
    def bases(self) -> _Array:
        """How many labels all pieces before each have."""
        return self._bases

    def begin(self, piece: int, following: Following) -> Iterator[None]:  # noqa: ARG002 - nothing is read ahead
        """Find the pairs of a piece."""
        item, region = self._maps.pieces.place(piece)
        shape = self._maps.pieces.tiling.shape
        pairs = [np.zeros((0, 2), np.int64)]
        for axis, (one, size) in enumerate(zip(region, shape, strict=True)):
            if one.stop < size:
                pairs.append(self._pairs(item, region, axis, shape))
        found = np.unique(np.concatenate(pairs), axis=0)
        self._done.append((piece, base64.b64encode(found.astype("<i8").tobytes()).decode()))
        yield

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:  # noqa: ARG002 - they are done at once
        """Return the pairs of the pieces done since the last call."""
        found, self._done = self._done, []
        return found

    def _pairs(self, item: int, region: Region, axis: int, shape: Sequence[int]) -> _Array:
        """Return labels at the end of a piece along an axis, and those that they touch beyond."""
        end = region[axis].stop
        diagonal = self._connectivity > 1
        wide = [
            slice(max(one.start - 1, 0), min(one.stop + 1, size)) if diagonal else one
            for one, size in zip(region, shape, strict=True)
        ]
        inside, beyond = list(region), wide
        inside[axis], beyond[axis] = slice(end - 1, end), slice(end, end + 1)
        near, near_class = self._numbers(item, tuple(inside))
        far, far_class = self._numbers(item, tuple(beyond))
        found = []
        for shift in np.ndindex(*(1 if at == axis or not diagonal else 3 for at in range(len(shape)))):
            step = [0 if at == axis or not diagonal else one - 1 for at, one in enumerate(shift)]
            if sum(map(abs, step)) + 1 > self._connectivity:
                continue
            here, there = [], []
            for one, other, by in zip(inside, beyond, step, strict=True):
                if one.stop - one.start == 1 and other.start == one.stop:  # the axis itself
                    here.append(slice(0, 1))
                    there.append(slice(0, 1))
                    continue
                start, stop = max(one.start, other.start - by), min(one.stop, other.stop - by)
                here.append(slice(start - one.start, stop - one.start))
                there.append(slice(start + by - other.start, stop + by - other.start))
            first, second = near[tuple(here)], far[tuple(there)]
            alike = near_class[tuple(here)] == far_class[tuple(there)]
            touch = (first > 0) & (second > 0) & alike
            found.append(np.unique(np.stack([first[touch], second[touch]], 1), axis=0))
        return np.concatenate(found)

    def _numbers(self, item: int, region: Region) -> tuple[_Array, _Array]:
        """Return the labels in a region, numbered through all pieces from 1, and their values."""
        shape = tuple(one.stop - one.start for one in region)
        numbers = np.zeros(shape, np.int64)
        classes: _Array | None = None
        for piece, there, here in self._maps.within(item, region):
            labels, values = self._maps.load(piece, _MAP)[there], self._maps.load(piece, _CLASSES)
            numbers[here] = np.where(labels > 0, labels + self._bases[piece], 0)
            if classes is None:
                classes = np.zeros(shape, values.dtype)
            if len(values):
                classes[here] = np.where(labels > 0, values[np.maximum(labels, 1) - 1], 0)
        assert classes is not None
        return numbers, classes


def joined(notes: Mapping[int, str]) -> tuple[_Array, _Array]:
    """Return the numbers of labels that belong to an earlier one, rising, and the first of each such object.

    Args:
        notes: the pairs of each piece, as `FacesWork` notes them.

    Example:
        >>> pairs = np.array([[1, 4], [4, 9], [2, 3]], "<i8")
        >>> joined({0: base64.b64encode(pairs.tobytes()).decode()})
        (array([3, 4, 9]), array([2, 1, 1]))
    """
    parents: dict[int, int] = {}

    def root(one: int) -> int:
        while (up := parents.setdefault(one, one)) != one:
            parents[one] = parents.setdefault(up, up)
            one = parents[one]
        return one

    for text in notes.values():
        for one, other in np.frombuffer(base64.b64decode(text), "<i8").reshape(-1, 2).tolist():
            first, second = sorted((root(one), root(other)))
            parents[second] = first
    members = sorted(one for one in parents if root(one) != one)
    return np.asarray(members, np.int64), np.asarray([root(one) for one in members], np.int64)


class ObjectIds:
    """The numbers of objects, from 1 without gaps, in the order in which a piece has them first.

    Args:
        bases: how many labels all pieces before each have.
        members: the labels that belong to an earlier one, numbered through all pieces, rising.
        firsts: the first label of the object of each.

    Example:
        >>> ids = ObjectIds(np.array([0, 2, 4]), np.array([3]), np.array([1]))
        >>> ids.count, ids.of_piece(0), ids.of_piece(1)
        (3, array([0, 1, 2]), array([0, 1, 3]))
    """

    def __init__(self, bases: _Array, members: _Array, firsts: _Array) -> None:
        self._bases, self._members, self._firsts = bases, members, firsts

    @property
    def count(self) -> int:
        """How many objects there are."""
        return int(self._bases[-1]) - len(self._members)

    @property
    def dtype(self) -> np.dtype[Any]:
        """A type for all numbers."""
        return np.dtype(np.uint32 if self.count < 2**32 else np.uint64)

    def of_piece(self, piece: int) -> _Array:
        """Return the number of the object of each label of a piece; that of label 0 is 0."""
        labels = np.arange(self._bases[piece] + 1, self._bases[piece + 1] + 1)
        at = np.searchsorted(self._members, labels)
        known = at < len(self._members)
        belongs = np.zeros(len(labels), bool)
        belongs[known] = self._members[at[known]] == labels[known]
        firsts = labels.copy()
        firsts[belongs] = self._firsts[at[belongs]]
        return np.concatenate([[0], firsts - np.searchsorted(self._members, firsts)])

    def state(self) -> list[str]:
        """Return all as texts, for other ranks."""
        return [
            base64.b64encode(np.asarray(one, "<i8").tobytes()).decode()
            for one in (self._bases, self._members, self._firsts)
        ]

    @classmethod
    def of(cls, state: Sequence[str]) -> ObjectIds:
        """Return what `state` described."""
        return cls(*(np.frombuffer(base64.b64decode(text), "<i8") for text in state))


class FoundRows:
    """Points or boxes that a function finds in a map.

    Args:
        function: of the map of a region; returns a row for each, which begins with its coordinates there: of
            a point one for each axis; of a box the begins, then the ends.
        boxes: whether the rows are boxes.
        context: how many voxels of its neighbours a piece is shown with.
    """

    def __init__(self, function: Callable[[_Array], Any], *, boxes: bool, context: int) -> None:
        self._function, self._boxes, self.context = function, boxes, context

    def within(self, values: _Array, region: Region, owned: Region) -> _Array:
        """Return the rows whose middle is owned, in coordinates of the volume.

        Args:
            values: the map of a region.
            region: where it is.
            owned: the piece.
        """
        axes = len(region)
        least = 2 * axes if self._boxes else axes
        found = np.asarray(self._function(values), float)
        found = found.reshape(0, least) if not found.size and found.ndim != 2 else found
        if found.ndim != 2 or found.shape[1] < least:
            what = f"the begins and ends along {axes} axes" if self._boxes else f"its place along {axes} axes"
            raise ConfigurationError(
                f"the function for {'boxes' if self._boxes else 'points'} returned an array of shape "
                f"{found.shape}; return a row for each, with {what}, and more if you like"
            )
        found = found.copy()
        origin = np.array([one.start for one in region], float)
        found[:, :axes] += origin
        middle = found[:, :axes]
        if self._boxes:
            found[:, axes : 2 * axes] += origin
            middle = (found[:, :axes] + found[:, axes : 2 * axes]) / 2
        begin, end = (np.array([getattr(one, side) for one in owned]) for side in ("start", "stop"))
        mine: _Array = found[((middle >= begin) & (middle < end)).all(1)]
        return mine


class RowsWork:
    """Looks for points or boxes in a piece.

    Args:
        maps: of the pieces.
        rows: how they are found.
    """

    def __init__(self, maps: PieceMaps, rows: FoundRows) -> None:
        self._maps, self._rows = maps, rows
        self._done: list[tuple[int, Any]] = []

    def begin(self, piece: int, following: Following) -> Iterator[None]:  # noqa: ARG002 - nothing is read ahead
        """Find the rows of a piece."""
        item, owned = self._maps.pieces.place(piece)
        context, shape = self._rows.context, self._maps.pieces.tiling.shape
        region = tuple(
            slice(max(one.start - context, 0), min(one.stop + context, size))
            for one, size in zip(owned, shape, strict=True)
        )
        found = self._rows.within(self._maps.read(item, region), region, owned)
        if self._maps.pieces.pieces > self._maps.pieces.tiling.pieces:  # several volumes: which one
            found = np.concatenate([np.full((len(found), 1), item), found], axis=1)
        packed = base64.b64encode(found.astype("<f8").tobytes()).decode()
        self._done.append((piece, [found.shape[1], packed]))
        yield

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:  # noqa: ARG002 - they are done at once
        """Return the rows of the pieces done since the last call."""
        found, self._done = self._done, []
        return found


def rows_of(notes: Sequence[Any]) -> _Array:
    """Return all rows, in the order of the pieces."""
    parts = [np.frombuffer(base64.b64decode(text), "<f8").reshape(-1, width) for width, text in notes]
    widths = {part.shape[1] for part in parts if len(part)}
    if len(widths) > 1:
        raise ConfigurationError(
            f"the function returned rows of {sorted(widths)} numbers; return equally many each"
        )
    return np.concatenate([part for part in parts if len(part)] or parts[:1])


def table_of_objects(maps: PieceMaps, ids: ObjectIds, axes: str, path: Path) -> None:
    """Write a table of all objects: their value, size, box and centre.

    Args:
        maps: labelled.
        ids: of the objects.
        axes: the names of the axes.
        path: of the file, .csv.
    """
    count = ids.count
    sizes, values = np.zeros(count + 1, np.int64), np.zeros(count + 1)
    items = np.zeros(count + 1, np.int64)
    begins = np.full((count + 1, len(axes)), np.iinfo(np.int64).max)
    ends, sums = np.zeros((count + 1, len(axes)), np.int64), np.zeros((count + 1, len(axes)))
    for piece in range(maps.pieces.pieces):
        item, region = maps.pieces.place(piece)
        labels, classes = np.asarray(maps.load(piece, _MAP)), maps.load(piece, _CLASSES)
        if not len(classes):
            continue
        numbers = ids.of_piece(piece)
        places = np.nonzero(labels)
        of = numbers[labels[places]]
        values[numbers[1:]], items[numbers[1:]] = classes, item
        np.add.at(sizes, of, 1)
        for at, (one, begin) in enumerate(zip(places, region, strict=True)):
            where = one + begin.start
            np.minimum.at(begins[:, at], of, where)
            np.maximum.at(ends[:, at], of, where + 1)
            np.add.at(sums[:, at], of, where)
    several = maps.pieces.pieces > maps.pieces.tiling.pieces
    head = ["id", *(["volume"] if several else []), "value", "voxels"]
    head += [f"{axis}_{what}" for what in ("begin", "end", "centre") for axis in axes]
    try:
        with whole_file(path) as file:
            file.write((",".join(head) + "\n").encode())
            for number in range(1, count + 1):
                facts: list[Any] = [number, *([items[number]] if several else [])]
                facts += [f"{values[number]:g}", sizes[number], *begins[number], *ends[number]]
                facts += [f"{part:.6g}" for part in sums[number] / sizes[number]]
                file.write((",".join(map(str, facts)) + "\n").encode())
    except OSError as error:
        raise full_disk(path, error) from None


def remove_maps(maps: PieceMaps) -> None:
    """Remove the maps of all pieces, and their journal."""
    with suppress(OSError):
        remove_tree(maps.folder.parent)


def whole_of(wholes: Mapping[str, Whole], axes: int, items: bool, what: str) -> tuple[str, Whole]:
    """Return the one map of a result; refuse several, or channels."""
    (name, one), *more = wholes.items()
    if more or len(one.shape) != axes + items:
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in wholes.items())
        raise ConfigurationError(
            f"{what} need one map without channels, but the result is {shapes}; reduce it, e.g. "
            "reduce='argmax' or reduce=0.5"
        )
    return name, one
