"""Receptive field of a model, measured: which inputs an output depends on, and how far it may be moved.

A slab of the input is changed, one position after another, and the outputs that change are looked for. So
the model is a black box: no layer is known here. What two runs of the same input differ by is taken for
noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.inference._rows import BatchModel
from nnlo_common.inference._structure import named_arrays

__all__ = ["ReceptiveField", "check_fits", "measured_field", "measured_period"]

_DRAWS, _VALUES = 2, 32  # a ReLU or a maximum may hide a path for one input: so often, and for so many values
_LARGE = 4.0  # changed values are larger than others, so that they are the maximum at times
_LARGEST_PERIOD = 32
_UNALIGNED = 8  # positions that are changed where no period is found
_SIZES = (64, 128, 256, 512)
_SIDES = (16, 32, 64)  # along the axes that are not looked at: the smallest that the model takes
_MOST_NUMBERS = 2**24
_FEW_VOXELS = 2**12  # where a tile has fewer, a period is looked for in inputs of so many
_CLOSE = 1e-4  # of the largest output
_ROUNDING = 3e-6  # of the largest output


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """What an output depends on along each axis.

    Attributes:
        before: how many voxels before it; None: all, or more than was looked at.
        after: how many after it.
        period: how far a tile may be moved for the same outputs, moved: the product of strides; None: not at
            all.

    Example:
        >>> ReceptiveField((2, None), (3, None), (4, None)).margin
        (3, None)
    """

    before: tuple[int | None, ...]
    after: tuple[int | None, ...]
    period: tuple[int | None, ...]

    @property
    def margin(self) -> tuple[int | None, ...]:
        """What to drop at an inner face, for each axis; None: nothing helps."""
        return tuple(
            None if one is None or other is None else max(one, other)
            for one, other in zip(self.before, self.after, strict=True)
        )


def measured_field(
    compute: BatchModel, channels: int, dtype: Any, axes: int, tile: Sequence[int] | None = None
) -> ReceptiveField:
    """Measure the receptive field of a model whose outputs are as large as its inputs.

    Args:
        compute: the model, of batches (samples, channels, ...).
        channels: of its input.
        dtype: of its input.
        axes: the number of axes besides.
        tile: a shape that it takes for sure, if it takes few.

    Raises:
        ConfigurationError: it takes no size that was tried.
    """
    found = [
        _Probe(compute, channels, dtype, axes=axes, axis=axis, tile=tile).measured() for axis in range(axes)
    ]
    before, after, period = zip(*found, strict=True)
    return ReceptiveField(before, after, period)


def measured_period(
    compute: BatchModel, channels: int, dtype: Any, axes: int, tile: Sequence[int]
) -> ReceptiveField:
    """Measure the period alone, from inputs hardly larger than a tile, and leave the reach unknown.

    A margin given by hand may be for want of memory, or as the reach is unbounded. No period is found where
    moving the input changes all outputs.

    Args:
        compute: the model, of batches (samples, channels, ...).
        channels: of its input.
        dtype: of its input.
        axes: the number of axes besides.
        tile: the shape of a tile.
    """
    period = [
        _Probe(compute, channels, dtype, axes=axes, axis=axis, tile=tile).period() for axis in range(axes)
    ]
    return ReceptiveField((None,) * axes, (None,) * axes, tuple(period))


class _Probe:
    """A measurement along one axis."""

    def __init__(
        self,
        compute: BatchModel,
        channels: int,
        dtype: Any,
        *,
        axes: int,
        axis: int,
        tile: Sequence[int] | None,
    ) -> None:
        self._compute, self._channels, self._dtype = compute, channels, np.dtype(dtype)
        self._axes, self._axis, self._tile = axes, axis, tile
        self._draw = np.random.default_rng(0)

    def measured(self) -> tuple[int | None, int | None, int | None]:
        """Return how far it reaches before and after, and its period."""
        problems: list[str] = []
        for side in self._sides():
            try:
                return self._measured(side)
            except ConfigurationError:
                raise
            except Exception as error:  # a size that the model does not take
                problems.append(f"{self._shape(side, _SIZES[0])} ({type(error).__name__}: {error!s:.200})")
        raise ConfigurationError(
            f"the model takes none of the tiles tried to measure its receptive field, such as {problems[0]}; "
            "give the margin by hand"
        )

    def period(self) -> int | None:
        """Return its period; the tile itself is taken where the model takes nothing else, as it is slower."""
        most = max(math.prod(self._tile or ()), _FEW_VOXELS)
        for side in self._sides():
            sizes = (side[self._axis],) if side is self._tile else _SIZES
            shapes = [shape for size in sizes if math.prod(shape := self._shape(side, size)) <= most]
            with suppress(Exception):  # a size that the model does not take
                found = (self._period(shape) for shape in shapes)
                if shapes:
                    return next((one for one in found if one is not None), None)
        return None

    def _sides(self) -> Iterator[Sequence[int]]:
        for side in _SIDES:
            yield [side] * self._axes
        if self._tile is not None:
            yield self._tile

    def _shape(self, side: Sequence[int], size: int) -> tuple[int, ...]:
        return tuple(size if at == self._axis else one for at, one in enumerate(side))

    def _measured(self, side: Sequence[int]) -> tuple[int | None, int | None, int | None]:
        sizes = [
            size for size in _SIZES if math.prod(self._shape(side, size)) * self._channels <= _MOST_NUMBERS
        ]
        # First any change counts. A convolution by Fourier transform changes all outputs, by rounding.
        for tolerance in (0.0, _ROUNDING):
            for size in sizes or _SIZES[:1]:
                shape = self._shape(side, size)
                period = self._period(shape)
                if (reach := self._reach(shape, period or _UNALIGNED, tolerance)) is not None:
                    return *reach, period
        return None, None, None

    def _reach(self, shape: tuple[int, ...], positions: int, tolerance: float) -> tuple[int, int] | None:
        """Return how far an output reaches; None: as far as this shape, so larger ones are to be tried."""
        size = shape[self._axis]
        middle = (size - positions) // 2
        before = after = 0
        values = self._channels * math.prod(shape) // size
        for _ in range(max(_DRAWS, _VALUES // values)):
            base = self._noise(shape)
            first = self._outputs(base)
            noise = 4 * float(np.abs(first - self._outputs(base)).max(initial=0))
            noise = max(noise, tolerance * float(np.abs(first).max(initial=0)))
            for at in range(middle, middle + positions):
                moved = base.copy()
                place: Any = (slice(None), *(slice(None),) * self._axis, at)
                moved[place] = self._noise(moved[place].shape, raw=True, scale=_LARGE)
                outputs = np.abs(self._outputs(moved) - first).max(axis=self._others(first))
                changed = np.flatnonzero(outputs > noise)
                if len(changed):
                    before, after = max(before, int(changed[-1]) - at), max(after, at - int(changed[0]))
            if middle - after <= 0 or middle + positions + before >= size:
                return None
        return max(before, 0), max(after, 0)

    def _period(self, shape: tuple[int, ...]) -> int | None:
        """Return by how much the input may be moved so that the outputs in the middle only move."""
        size = shape[self._axis]
        longer = list(shape)
        longer[self._axis] += _LARGEST_PERIOD
        whole = self._noise(tuple(longer))
        # What comes in stands out, so that no step is taken for a period where an output sees everything.
        self._window(whole, size, _LARGEST_PERIOD)[...] = whole.max()
        first = self._outputs(self._window(whole, 0, size))
        scale = float(np.abs(first).max(initial=0)) * _CLOSE
        few = min(8, size // 2)
        for step in range(1, min(_LARGEST_PERIOD, size - few) + 1):
            moved = self._outputs(self._window(whole, step, size))
            at = (size + step - few) // 2  # as far from both ends in both
            one = self._window(first, at, few)
            other = self._window(moved, at - step, few)
            if float(np.abs(one - other).max(initial=0)) <= scale:
                return step
        return None

    def _window(self, array: npt.NDArray[Any], start: int, size: int) -> npt.NDArray[Any]:
        return array[(slice(None),) * (1 + self._axis) + (slice(start, start + size),)]

    def _noise(self, shape: tuple[int, ...], *, raw: bool = False, scale: float = 1.0) -> npt.NDArray[Any]:
        full = shape if raw else (self._channels, *shape)
        if self._dtype.kind in "biu":
            top = 2 if self._dtype.kind == "b" else min(int(np.iinfo(self._dtype).max), 255) + 1
            return self._draw.integers(0, top, full).astype(self._dtype)
        return (scale * self._draw.standard_normal(full)).astype(self._dtype)

    def _outputs(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return all outputs of one tile, joined along their channels."""
        found = named_arrays(self._compute.result(self._compute.begin(array[None])), "the model", 1)
        parts = []
        for name, one in found.items():
            check_fits(name, one, array.shape[1:])
            parts.append(one[0].reshape(-1, *array.shape[1:]).astype(np.float64))
        return np.concatenate(parts)

    def _others(self, outputs: npt.NDArray[Any]) -> tuple[int, ...]:
        return tuple(at for at in range(outputs.ndim) if at != outputs.ndim - self._axes + self._axis)


def check_fits(name: str, output: npt.NDArray[Any], tile: tuple[int, ...]) -> None:
    """Refuse an output that is not as large as its tile."""
    if output.shape[-len(tile) :] != tile or output.ndim not in (len(tile) + 1, len(tile) + 2):
        raise ConfigurationError(
            f"the model's output {name!r} has the shape {output.shape[1:]} for a tile of {tile}; it must "
            "have a value, or some channels, for each voxel of the tile (pad its convolutions, and upsample "
            "what is pooled)"
        )
