"""Early stopping: end a training that no longer improves, or that has reached its target."""

from __future__ import annotations

import math
from typing import Literal

from nnlo_common.base._arguments import is_number, whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._state_tree import Stateful

__all__ = ["EarlyStopping", "Target"]


class EarlyStopping(Stateful):
    """Detects that a metric has stopped improving.

    It only decides. Give it the same value on all ranks, as `evaluate` returns it, or call it only on the
    rank that has the centre. NaN is never an improvement.

    Args:
        patience: stop after this many evaluations in a row without improvement.
        mode: "min" if less is better (a loss), "max" if more is better (an accuracy).
        min_delta: the least improvement that counts.

    Attributes:
        best: the best value so far.
        waited: evaluations since the best value.

    Example:
        >>> stopping = EarlyStopping(patience=2)
        >>> [stopping(loss) for loss in (1.0, 0.5, 0.6, 0.7, 0.8)]
        [False, False, False, True, True]
    """

    saved = ("best", "waited")

    def __init__(
        self, *, patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"mode={mode!r} is not possible: it must be 'min' or 'max'")
        if not is_number(min_delta) or not 0 <= min_delta < math.inf:
            raise ConfigurationError(
                f"min_delta={min_delta!r} is not possible: it must be a number of at least 0"
            )
        self.patience, self.mode, self.min_delta = whole_number("patience", patience, 1), mode, min_delta
        self.best, self.waited = math.inf if mode == "min" else -math.inf, 0

    def __call__(self, value: float) -> bool:
        """Take the next value; return whether to stop."""
        gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta or (gain == math.inf and not math.isnan(value)):
            self.best, self.waited = float(value), 0
        else:
            self.waited += 1
        return self.waited >= self.patience


class Target:
    """Detects that a metric has reached its target.

    Args:
        above: stop when it is above this; for an accuracy.
        below: stop when it is below this; for a loss.

    Example:
        >>> target = Target(above=0.97)
        >>> target(0.96), target(0.98)
        (False, True)
    """

    def __init__(self, *, above: float | None = None, below: float | None = None) -> None:
        if (above is None) == (below is None):
            raise ConfigurationError(
                f"Target(above={above!r}, below={below!r}) is not possible: give one of the two"
            )
        for name, value in {"above": above, "below": below}.items():
            if value is not None and (not is_number(value) or math.isnan(value)):
                raise ConfigurationError(f"{name}={value!r} is not possible: it must be a number")
        self.above, self.below = above, below

    def __call__(self, value: float) -> bool:
        """Return whether `value` has reached the target."""
        if self.above is not None:
            return value > self.above
        return self.below is not None and value < self.below
