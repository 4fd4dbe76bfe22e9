"""Parts of PyTorch that are not public, all in one place, named by what they give.

Where PyTorch has changed one of them a `ConfigurationError` names it and the version of PyTorch, or the
function does without. `tests/torch/test_compat.py` says which part it is before a user meets it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules import batchnorm
from torch.optim import optimizer as optim
from torch.utils.data import dataloader

from nnlo_common.plugin import OtherProject

__all__ = [
    "BatchNorm",
    "LoaderBatches",
    "children_of",
    "copy_all",
    "driving_loader",
    "global_hooks",
    "hooks_of",
    "parameters_of",
    "saved_buffers",
    "stepped",
    "without_hooks",
]

_TORCH = OtherProject("torch", "nnlo_torch/_compat.py")
_Step = TypeVar("_Step", bound=Callable[..., Any])

# -- the batch that a DataLoader is working on --------------------------------------------------------------

_BASE: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
_SINGLE: Any = getattr(dataloader, "_SingleProcessDataLoaderIter", None)
#: The functions of a loader's iterator below which samplers, and data sets that are looped over, run.
DRIVERS = {
    getattr(function, "__code__", None)
    for function in (getattr(_BASE, "_next_index", None), getattr(_SINGLE, "_next_data", None))
}


class LoaderBatches:
    """The batches of one loop over a DataLoader: their numbers, and which of them the loop has not got yet.

    The loader's iterator is held weakly, so that its processes end when the loop is left.

    Args:
        iterator: that of the DataLoader.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._processes = iterator._num_workers > 0
        # The batches between processes and loop, by their numbers. It outlives the iterator, which takes
        # another one when it is used again (persistent_workers).
        self._under_way: dict[int, Any] = iterator._task_info if self._processes else {}
        self._counts = "_send_idx" if self._processes else "_num_yielded"
        getattr(iterator, self._counts)  # an AttributeError comes now or never
        self.drops_last = bool(getattr(iterator._index_sampler, "drop_last", False))

    @property
    def drawing(self) -> int:
        """The number of the batch that is being drawn; -1 if the loader's iterator is gone."""
        return int(getattr(self._iterator(), self._counts, -1))

    @property
    def over(self) -> bool:
        """Whether the loop gets no more of these batches."""
        iterator = self._iterator()
        return iterator is None or (self._processes and iterator._task_info is not self._under_way)

    def is_under_way(self, number: int) -> bool:
        """Say whether the loop has not got this batch, though it was drawn."""
        return number in self._under_way


def driving_loader() -> LoaderBatches | None:
    """Return the batches of the DataLoader for which the calling sampler runs; None: there is none.

    A sampler knows nothing of its loader, so it is looked for among the functions that have called. A loader
    with worker processes draws from its sampler ahead of the loop, and says nowhere how far ahead it is.
    Where PyTorch has changed nothing is found, and samples count when they are drawn.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in DRIVERS:
            try:
                return LoaderBatches(frame.f_locals["self"])
            except (AttributeError, KeyError):
                return None
        frame = frame.f_back
    return None


# -- optimizers -------------------------------------------------------------------------------------------


@_TORCH.uses("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
def global_hooks() -> tuple[list[Any], list[Any]]:
    """Return the hooks of all optimizers, those before a step and those after."""
    return [*optim._global_optimizer_pre_hooks.values()], [*optim._global_optimizer_post_hooks.values()]


def hooks_of(optimizer: Any, event: str) -> tuple[list[Any], list[Any]]:
    """Return the hooks that were registered with an optimizer, those before and those after.

    Args:
        optimizer: of torch.
        event: "step", "state_dict" or "load_state_dict".
    """
    try:
        before = getattr(optimizer, f"_optimizer_{event}_pre_hooks")
        after = getattr(optimizer, f"_optimizer_{event}_post_hooks")
    except AttributeError as error:
        raise _TORCH.changed(f"{type(optimizer).__name__} has no {error.name} any more") from error
    return list(before.values()), list(after.values())


def without_hooks(step: _Step) -> _Step:
    """Keep torch from wrapping the `step` of an optimizer, so that it calls hooks by itself."""
    step.hooked = True  # type: ignore[attr-defined]
    return step


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers not warn that an optimizer makes no step; where torch has changed, they do."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@_TORCH.uses("_foreach_copy_")
def copy_all(places: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy tensors into others, by one call."""
    torch._foreach_copy_(places, tensors)


# -- modules ----------------------------------------------------------------------------------------------

#: The layers that normalise by batches, those of the user that derive from them too.
BatchNorm: Any = getattr(batchnorm, "_BatchNorm", None)
if BatchNorm is None:
    raise _TORCH.changed("torch.nn.modules.batchnorm has no _BatchNorm any more")


@_TORCH.uses("_non_persistent_buffers_set")
def saved_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the names and the buffers of a module itself that belong to its saved state."""
    unsaved = module._non_persistent_buffers_set
    return [
        pair for pair in module.named_buffers(recurse=False, remove_duplicate=False) if pair[0] not in unsaved
    ]


def children_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules right within a module; another thread may still be making it."""
    return _table(module, "_modules")


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module itself; another thread may still be making it."""
    return _table(module, "_parameters")


def _table(module: torch.nn.Module, name: str) -> list[Any]:
    table = vars(module).get(name) or {}
    return [value for value in list(table.values()) if value is not None]  # a list is made in one go
