"""PyTorch's private parts that nnlo uses, all in this file, each behind a function named after its purpose.

If a new PyTorch has changed one, a `ConfigurationError` names it and the version, or the function works
without it. `tests/torch/test_compat.py` fails on the changed part before a user meets it.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.nn.modules import batchnorm
from torch.optim import optimizer as optim
from torch.utils.data import dataloader

from nnlo_common.plugin import OtherProject

__all__ = [
    "BatchNorm",
    "LoaderBatches",
    "after_backward",
    "changes_of",
    "children_of",
    "copy_all",
    "driving_loader",
    "global_hooks",
    "hooks_of",
    "parameters_of",
    "saved_buffers",
    "stepped",
    "watch_saves",
    "without_hooks",
]

_TORCH = OtherProject("torch", "nnlo_torch/_compat.py")
_Step = TypeVar("_Step", bound=Callable[..., Any])

# -- the DataLoader's current batch -------------------------------------------------------------------------

_BASE: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
_SINGLE: Any = getattr(dataloader, "_SingleProcessDataLoaderIter", None)
#: Functions of a loader's iterator that call samplers and iterable data sets.
DRIVERS = {
    getattr(function, "__code__", None)
    for function in (getattr(_BASE, "_next_index", None), getattr(_SINGLE, "_next_data", None))
}


class LoaderBatches:
    """Batches of one loop over a DataLoader: their numbers, and which the loop has not received yet.

    It holds the loader's iterator weakly, so that its processes end when the loop is left.

    Args:
        iterator: the DataLoader's iterator.
        shard: accelerate's loader around it, if the loop runs over one.
    """

    def __init__(self, iterator: Any, shard: Any = None) -> None:
        self._iterator = weakref.ref(iterator)
        self._shard = None if shard is None else weakref.ref(shard)
        self._run = getattr(shard, "iteration", None)
        self._processes = iterator._num_workers > 0
        # Batches between processes and loop, by number. The dictionary outlives this use of the iterator,
        # which makes another one when it is reused (persistent_workers).
        self._under_way: dict[int, Any] = iterator._task_info if self._processes else {}
        self._counts = "_send_idx" if self._processes else "_num_yielded"
        getattr(iterator, self._counts)  # raises AttributeError here if torch has changed
        self._index_sampler, self._dataset = iterator._index_sampler, iterator._dataset
        self.drops_last = bool(getattr(self._index_sampler, "drop_last", False))

    @property
    def drawing(self) -> int:
        """Number of the batch being drawn; -1 if the loader's iterator is gone."""
        return int(getattr(self._iterator(), self._counts, -1))

    @property
    def over(self) -> bool:
        """Whether the loop will receive no more of these batches."""
        iterator = self._iterator()
        return iterator is None or (self._processes and iterator._task_info is not self._under_way)

    def batch_size(self, source: Any) -> int | None:
        """Return how many elements of a sampler or iterable data set make a batch.

        None: that is unknown, or incomplete batches are dropped.
        """
        batches, whole = self._index_sampler, self._dataset is source
        if type(batches) is torch.utils.data.BatchSampler and (whole or batches.sampler is source):
            return None if batches.drop_last else int(batches.batch_size)
        return 1 if batches is source or whole else None

    def arrived(self, numbers: Iterable[int]) -> list[int]:
        """Return which of these batches, drawn and not counted yet, have reached the loop."""
        found = sorted(number for number in numbers if number not in self._under_way)
        return found[:-1] if self._one_is_held else found

    @property
    def _one_is_held(self) -> bool:
        """Whether the newest batch is with accelerate, which takes one ahead to know which is the last."""
        if self._shard is None:
            return False
        shard = self._shard()
        # It counts its complete runs, and forgets that one has ended as soon as the next begins.
        return shard is None or not (shard.end_of_dataloader or shard.iteration != self._run)


def driving_loader() -> LoaderBatches | None:
    """Return the batches of the DataLoader that runs the calling sampler; None: there is none.

    A sampler has no reference to its loader, so this searches the call stack. A loader with worker processes
    draws from its sampler ahead of the loop and does not report how far. If PyTorch has changed, the search
    finds nothing and samples count when they are drawn.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in DRIVERS:
            try:
                return LoaderBatches(frame.f_locals["self"], _accelerates_loader(frame))
            except (AttributeError, KeyError):
                return None
        frame = frame.f_back
    return None


def _accelerates_loader(frame: types.FrameType | None) -> Any:
    """Return accelerate's loader that calls from outside this frame; None: there is none."""
    while frame is not None:
        # Only frames of accelerate are looked into: a frame keeps what it was asked for, also past a `del`.
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            caller = frame.f_locals.get("self")
            if hasattr(caller, "end_of_dataloader") and hasattr(caller, "iteration"):
                return caller
        frame = frame.f_back
    return None


# -- optimizers -------------------------------------------------------------------------------------------


@_TORCH.uses("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
def global_hooks() -> tuple[list[Any], list[Any]]:
    """Return the hooks registered for all optimizers: before a step, after a step."""
    return [*optim._global_optimizer_pre_hooks.values()], [*optim._global_optimizer_post_hooks.values()]


def hooks_of(optimizer: Any, event: str) -> tuple[list[Any], list[Any]]:
    """Return the hooks registered with one optimizer: before the event, after it.

    Args:
        optimizer: a torch optimizer.
        event: "step", "state_dict" or "load_state_dict".
    """
    try:
        before = getattr(optimizer, f"_optimizer_{event}_pre_hooks")
        after = getattr(optimizer, f"_optimizer_{event}_post_hooks")
    except AttributeError as error:
        raise _TORCH.changed(f"{type(optimizer).__name__} has no {error.name} any more") from error
    return list(before.values()), list(after.values())


def without_hooks(step: _Step) -> _Step:
    """Keep torch from wrapping an optimizer's `step`, which calls the hooks itself."""
    step.hooked = True  # type: ignore[attr-defined]
    return step


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep schedulers from warning that an optimizer was never stepped; if torch has changed, they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@_TORCH.uses("_foreach_copy_")
def copy_all(places: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy tensors into others in one call."""
    torch._foreach_copy_(places, tensors)


# -- autograd ---------------------------------------------------------------------------------------------


@_TORCH.uses("_execution_engine", "queue_callback")
def after_backward(call: Callable[[], None]) -> None:
    """Call a function once the current backward pass has made all gradients; call this within the pass."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


@_TORCH.uses("_version")
def changes_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, as far as autograd counts it."""
    return tensor._version


# -- torch.save, which has no hook -------------------------------------------------------------------------


class _Saves:
    """Replaces `torch.save` while somebody watches it, and restores it afterwards.

    Whatever replaces it meanwhile stays: the function below then only passes calls on.
    """

    def __init__(self) -> None:
        # Reentrant: a garbage collection within it may end another watch.
        self._lock = threading.RLock()
        self._looks: list[Callable[[Any, str], object]] = []
        self._ours: Any = None
        self._before: Any = None
        self._module: Any = torch

    def watch(self, look: Callable[[Any, str], object]) -> Callable[[], None]:
        with self._lock:
            self._looks.append(look)
            if self._ours is None or self._module.save is not self._ours:
                self._before = self._module.save
                self._ours = self._module.save = self._looking(self._before)
        return functools.partial(self._forget, look)

    def _forget(self, look: Callable[[Any, str], object]) -> None:
        with self._lock:
            self._looks = [one for one in self._looks if one is not look]
            if self._looks or self._ours is None:
                return
            if self._module.save is self._ours:
                self._module.save = self._before
            self._ours = self._before = None

    def _looking(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._ours is save:  # else it is inside another one of these, or nobody watches
                frame = inspect.currentframe()
                caller = None if frame is None else frame.f_back
                module = "" if caller is None else str(caller.f_globals.get("__name__", ""))
                for look in self._looks:
                    look(args[1] if len(args) > 1 else kwargs.get("f"), module)
            return before(*args, **kwargs)

        return save


_saves = _Saves()


def watch_saves(look: Callable[[Any, str], object]) -> Callable[[], None]:
    """Call `look` before each `torch.save`, in its thread; the returned function ends this.

    Args:
        look: gets the file that is written to, and the name of the calling module.
    """
    return _saves.watch(look)


# -- modules ----------------------------------------------------------------------------------------------

#: Base class of all batch normalisation layers, the user's own included.
BatchNorm: Any = getattr(batchnorm, "_BatchNorm", None)
if BatchNorm is None:
    raise _TORCH.changed("torch.nn.modules.batchnorm has no _BatchNorm any more")


@_TORCH.uses("_non_persistent_buffers_set")
def saved_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the names and buffers in a module's saved state, without those of its children."""
    unsaved = module._non_persistent_buffers_set
    return [
        pair for pair in module.named_buffers(recurse=False, remove_duplicate=False) if pair[0] not in unsaved
    ]


def children_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module's direct children; another thread may still be constructing it."""
    return _table(module, "_modules")


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters; another thread may still be constructing it."""
    return _table(module, "_parameters")


def _table(module: torch.nn.Module, name: str) -> list[Any]:
    table = vars(module).get(name) or {}
    return [value for value in list(table.values()) if value is not None]  # list() is atomic
