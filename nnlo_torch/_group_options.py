"""Options of torch optimizers' parameter groups (schedulers change them), as one short vector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Vector, unwired

__all__ = ["GroupOptions"]


class GroupOptions:
    """Reads and sets the numbers of all groups: learning rates, momenta, weight decays, ...

    Args:
        optimizers: the optimizers.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = [
            (one, sorted(name for name, value in one.defaults.items() if _is_numeric(value)))
            for one in optimizers
        ]

    def read(self) -> tuple[float, ...]:
        """Return the numbers of all groups, in order."""
        numbers: list[float] = []
        for group, name in self._places():
            value = group[name]
            if isinstance(value, tuple | list):
                numbers += map(float, value)
            else:
                numbers.append(float(value))
        return tuple(numbers)

    def _places(self) -> Iterator[tuple[dict[str, Any], str]]:
        for optimizer, names in self._optimizers:
            for group in optimizer.param_groups:
                for name in names:
                    yield group, name

    def set(self, vector: Vector) -> None:
        """Set the numbers that another rank has read and sent."""
        numbers = unwired(vector)
        if len(numbers) != len(self.read()):
            raise ConfigurationError(
                f"a worker sent {len(numbers)} options of its optimizer, but the optimizer on this rank has "
                f"{len(self.read())}; make the same optimizer on all ranks"
            )
        for group, name in self._places():
            value = group[name]
            if isinstance(value, tuple | list):
                group[name] = type(value)(numbers[: len(value)])
                del numbers[: len(value)]
            elif isinstance(value, torch.Tensor):
                value.fill_(numbers.pop(0))
            else:
                number = numbers.pop(0)
                whole = isinstance(value, int) and number.is_integer()
                group[name] = int(number) if whole else number


def _is_numeric(value: object) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_numeric, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
