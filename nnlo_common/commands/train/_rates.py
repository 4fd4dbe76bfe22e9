"""Learning rates: the defaults of the optimizers, and how a rate changes in the course of a training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["MOMENTUM", "RATES", "RatePlan"]

#: The rates of optimizers whose defaults differ between the frameworks, or are poor.
RATES: Mapping[str, float] = {"sgd": 0.01, "adagrad": 0.01, "adadelta": 1.0, "rmsprop": 0.001}
#: The momentum of SGD for algorithms that are made of it.
MOMENTUM = 0.9
_FACTORS = {"step": 0.1, "exponential": 0.9, "inverse": 0.5, "plateau": 0.1}
_PATIENCE = 5
#: The power of the polynomial decay, that of LARS (You et al. 2017).
_POWER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePlan:
    """The learning rates of a training.

    Attributes:
        kind: "cosine", "step", "exponential", "inverse", "linear", "polynomial" or "plateau"; None: the rate
            stays.
        factor: of a decay.
        every: epochs of a step, or without improvement on a plateau.
        warm_up: epochs of the warm-up, before the schedule begins.
        length: epochs after it.
        start: fraction of the rate that the warm-up begins with.

    Example:
        >>> RatePlan.of("step", None, None, 2, 11).every
        3
    """

    kind: str | None
    factor: float
    every: int
    warm_up: int
    length: int
    start: float = 0.1

    @classmethod
    def of(
        cls, kind: str | None, decay: float | None, every: int | None, warm_up: int | None, epochs: int
    ) -> RatePlan:
        """Return the schedule of some options, with their defaults."""
        length = max(epochs - (warm_up or 0), 1)
        return cls(
            kind=kind,
            factor=_FACTORS.get(kind or "", 1.0) if decay is None else decay,
            every=every or (_PATIENCE if kind == "plateau" else max(length // 3, 1)),
            warm_up=warm_up or 0,
            length=length,
        )

    def contradictions(self, decay: float | None, every: int | None, epochs: int) -> Iterator[str]:
        """Yield what is wrong with the options."""
        if decay is not None and self.kind not in _FACTORS:
            yield f"--decay is the factor of --schedule {', '.join(_FACTORS)}; add one, or leave it out"
        if every is not None and self.kind not in ("step", "plateau"):
            yield "--decay-every belongs to --schedule step or plateau; add one of them, or leave it out"
        if self.warm_up >= epochs:
            yield f"--warm-up {self.warm_up} takes all of --epochs {epochs}; give more epochs, or less of it"

    def part(self, epoch: int) -> float:
        """Return the rate of an epoch after the warm-up, as a part of the first one; not for a plateau.

        Args:
            epoch: from 0, the first one after the warm-up.

        Example:
            >>> plan = RatePlan.of("inverse", None, None, None, 10)
            >>> [round(plan.part(epoch), 3) for epoch in range(4)]
            [1.0, 0.5, 0.333, 0.25]
        """
        done = min(epoch / self.length, 1.0)
        parts = {
            "cosine": lambda: (1 + math.cos(math.pi * done)) / 2,
            "linear": lambda: 1 - done,
            "polynomial": lambda: (1 - done) ** _POWER,
            "step": lambda: self.factor ** (epoch // self.every),
            "exponential": lambda: self.factor**epoch,
            # 1/t; with another factor the second epoch has that part of the rate.
            "inverse": lambda: 1 / (1 + epoch * (1 / self.factor - 1)),
        }
        return parts[self.kind]() if self.kind in parts else 1.0

    def __bool__(self) -> bool:
        return self.kind is not None or self.warm_up > 0
