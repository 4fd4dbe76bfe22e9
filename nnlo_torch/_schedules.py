"""Schedules by batch that follow progress: where a worker's step is not a step of one process.

Where progress ends an epoch (see `Steady`), a worker's loop has another number of batches than that of one
process, which nobody knows beforehand. A schedule that is stepped after each batch, such as `OneCycleLR`,
was made for the steps of one process. So within an epoch `scheduler.step()` makes as many steps as one
process would have made since the last call: none, one or several. After an epoch it makes one, as always.

PyTorch tells an optimizer nothing of its schedulers, so `step` of the scheduler classes is wrapped, once,
when the first such training begins; for all other optimizers it does what it did.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Vector, unwired

__all__ = ["GroupOptions", "follow_progress", "steps_of_one_process"]

# -- options of torch optimizers' parameter groups (schedulers change them), as one short vector -------


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


class _Training(Protocol):
    """What a schedule asks of a training."""

    @property
    def counts_progress(self) -> bool: ...

    @property
    def paces(self) -> tuple[int, float, float, float]: ...

    def in_epoch(self) -> bool: ...


_COUNT = "nnlo_steps"  # of a scheduler, part of its `state_dict`
_trainings: dict[int, Callable[[], _Training | None]] = {}  # by the id of an optimizer
_state = threading.local()
_wrapped = False
_following = threading.Lock()  # in the virtual cluster each rank is a thread


def follow_progress(training: Callable[[], _Training | None], *optimizers: object) -> None:
    """Let schedulers of these optimizers follow the progress of a training.

    Args:
        training: returns it; None once it is gone.
        optimizers: a wrapper, and the optimizer in it.
    """
    global _wrapped  # noqa: PLW0603 - PyTorch's classes are wrapped once
    with _following:
        for gone in [key for key, one in _trainings.items() if one() is None]:
            del _trainings[gone]
        _trainings.update((id(one), training) for one in optimizers)
        if not _wrapped:
            _wrapped = True
            for kind in vars(lr_scheduler).values():
                # ReduceLROnPlateau follows a metric.
                if _is_schedule(kind) and "step" in vars(kind) and kind is not lr_scheduler.ReduceLROnPlateau:
                    kind.step = _paced(kind.step)


def steps_of_one_process(epochs: int, progress: float, size: float, batch: float) -> int:
    """Return the number of steps that one process makes for this progress.

    Args:
        epochs: earlier epochs.
        progress: of this epoch, in samples.
        size: the number of samples in an epoch.
        batch: the number of samples in a step.

    Example:
        >>> [steps_of_one_process(1, progress, 10, 4) for progress in (0, 7, 8, 12)]
        [3, 4, 5, 6]
    """
    in_epoch = math.ceil(size / batch)
    done = in_epoch if progress >= size else min(in_epoch, int(progress / batch))
    return epochs * in_epoch + done


def _is_schedule(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)


def _paced(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def paced(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(_state, "inside", False):  # a scheduler of schedulers steps its own
            step(scheduler, *args, **kwargs)
            return
        _state.inside = True
        try:
            for _ in range(_due(scheduler)):
                step(scheduler, *args, **kwargs)
        finally:
            _state.inside = False

    return paced


def _training_of(optimizer: Any) -> _Training | None:
    """Return the training of an optimizer, which another package may have put its own around."""
    while optimizer is not None:
        if find := _trainings.get(id(optimizer)):
            return find()
        optimizer = vars(optimizer).get("optimizer")
    return None


def _due(scheduler: Any) -> int:
    """Return how often to step now."""
    training = _training_of(getattr(scheduler, "optimizer", None))
    if training is None or not training.counts_progress:
        return 1
    earlier, progress, size, batch = training.paces
    within = training.in_epoch()
    if not size or not batch:  # nothing is known before the first step
        return 0 if within else 1
    begun, end = (steps_of_one_process(epochs, 0, size, batch) for epochs in (earlier, earlier + 1))
    target = steps_of_one_process(earlier, progress, size, batch)
    done: int = vars(scheduler).get(_COUNT, begun)
    if target < end <= done:  # it was loaded, and has made its steps in another training
        done = begun
    if not within and done <= begun:  # a schedule by epoch; one by batch may be late, after the last batch
        return 1
    setattr(scheduler, _COUNT, max(target, done))
    return max(0, target - done)
