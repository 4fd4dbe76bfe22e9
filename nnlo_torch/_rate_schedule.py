"""Learning rates of `nnlo train --schedule` and `--warm-up`.

A rate depends only on the epoch, the batch and the metrics so far, so a resumed training needs no state. The
schedulers of PyTorch for a warm-up and a plateau step an optimizer of a single number, whose rate is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.optim import lr_scheduler

from nnlo_common.plugin import RatePlan

__all__ = ["RateSchedule"]


class RateSchedule:
    """Sets the learning rates of an optimizer.

    Args:
        plan: the options.
        optimizer: to set.
        mode: "max" if the metric of a plateau should rise, else "min".
    """

    def __init__(self, plan: RatePlan, optimizer: torch.optim.Optimizer, mode: Literal["min", "max"]) -> None:
        self._plan, self._mode, self._optimizer = plan, mode, optimizer
        self._base = float(optimizer.param_groups[0]["lr"])
        self._warm: list[float] = []

    def begin_epoch(self, epoch: int, batches: int, seen: Sequence[float]) -> None:
        """Set the rate of an epoch.

        Args:
            epoch: its number, from 0.
            batches: of each epoch of this worker.
            seen: the metric of a plateau after each epoch so far.
        """
        plan = self._plan
        if epoch < plan.warm_up:
            if not self._warm:
                self._warm = self._warming(plan.warm_up * batches)
            self._at = epoch * batches
            self.begin_batch(0)
            return
        self._warm = []
        self._set(self._scheduled(epoch - plan.warm_up, seen[plan.warm_up :]))

    def begin_batch(self, batch: int) -> None:
        """Set the rate of a batch of a warm-up."""
        if self._warm:
            self._set(self._warm[min(self._at + batch, len(self._warm) - 1)])

    @property
    def rate(self) -> float:
        """The rate as it is."""
        return float(self._optimizer.param_groups[0]["lr"])

    def _warming(self, steps: int) -> list[float]:
        steps = max(steps, 1)
        model, scheduler = self._model(
            lambda one: lr_scheduler.LinearLR(one, self._plan.start, total_iters=steps)
        )
        return [_next(model, scheduler) for _ in range(steps + 1)]

    def _scheduled(self, epoch: int, seen: Sequence[float]) -> float:
        plan = self._plan
        if plan.kind == "plateau":
            # Keras reduces after `every` epochs without improvement, PyTorch after its patience and one more.
            optimizer, scheduler = self._model(
                lambda one: lr_scheduler.ReduceLROnPlateau(
                    one, self._mode, plan.factor, plan.every - 1, threshold=0, threshold_mode="abs"
                )
            )
            for value in seen:
                scheduler.step(value)
            return float(optimizer.param_groups[0]["lr"])
        return self._base * plan.part(epoch)

    def _model(self, make: Any) -> tuple[torch.optim.Optimizer, Any]:
        """Return an optimizer of one number with the first rate, and its scheduler."""
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], self._base)
        return optimizer, make(optimizer)

    def _set(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate


def _next(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
    """Return the rate, and step to the next one."""
    rate = float(optimizer.param_groups[0]["lr"])
    optimizer.step()  # a scheduler warns if it is stepped first
    scheduler.step()
    return rate
