"""The numbers in a torch optimizer's parameter groups, as schedulers change them, as one short vector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common._flat import Vector

__all__ = ["options_of", "set_options", "wire"]


def options_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Return all numbers of all groups: learning rates, momenta, weight decays, ..."""
    numbers: list[float] = []
    for group, name in _places(optimizer):
        value = group[name]
        numbers += map(float, value) if isinstance(value, tuple | list) else [float(value)]
    return tuple(numbers)


def wire(options: tuple[float, ...]) -> Vector:
    """Return the numbers in full precision, as pairs of what only looks like float32."""
    vector: Vector = np.array(options, np.float64).view(np.float32)
    return vector


def set_options(optimizer: torch.optim.Optimizer, wired: Vector) -> None:
    """Set all numbers of all groups to what `wire` returned on another rank."""
    numbers = np.ascontiguousarray(wired).view(np.float64).tolist()
    if len(numbers) != len(options_of(optimizer)):
        raise ConfigurationError(
            f"a worker sent {len(numbers)} options of its optimizer, but this one has "
            f"{len(options_of(optimizer))}; make the same optimizer on all ranks"
        )
    for group, name in _places(optimizer):
        value = group[name]
        if isinstance(value, tuple | list):
            group[name] = type(value)(numbers[: len(value)])
            del numbers[: len(value)]
        elif isinstance(value, torch.Tensor):
            value.fill_(numbers.pop(0))
        else:
            group[name] = type(value)(numbers.pop(0))


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    names = sorted(name for name, value in optimizer.defaults.items() if _is_numeric(value))
    for group in optimizer.param_groups:
        for name in names:
            yield group, name


def _is_numeric(value: object) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_numeric, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
