"""Modules that own an optimizer's parameters, found by a search of this process.

A model's buffers (running statistics and the like) must reach the centre, or it cannot be evaluated. But a
script passes parameters to its optimizer, not modules. So this searches all modules of the process for those
that hold the parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch

from nnlo_torch._compat import children_of, parameters_of, saved_buffers

__all__ = ["buffers_of", "modules_of"]


def modules_of(tensors: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the outermost modules that hold any of these parameters, in the order of the parameters."""
    order = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    everything = _all_modules()
    inner = {id(child) for module in everything for child in children_of(module)}
    found: list[tuple[int, int, torch.nn.Module]] = []
    for module in everything:
        if id(module) not in inner:
            places = [order[id(p)] for p in _parameters(module) if id(p) in order]
            if places:
                found.append((min(places), len(found), module))
    return [module for _, _, module in sorted(found, key=lambda item: item[:2])]


def buffers_of(modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return the names and float buffers in the saved state of modules.

    Unsaved buffers can be recomputed, and only floats can be averaged.
    """
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for module in modules:
        for prefix, part in module.named_modules():
            for name, buffer in saved_buffers(part):
                if buffer.is_floating_point() and not buffer.is_sparse:
                    buffers.setdefault(id(buffer), (f"{prefix}.{name}".lstrip("."), buffer))
    return list(buffers.values())


def _all_modules() -> list[torch.nn.Module]:
    """Return all modules of this process: the referrers of every subclass of `torch.nn.Module`.

    Do not use `gc.get_objects`: it holds references to everything. A tuple that another thread is still
    filling must not get a second reference, or that thread fails with a SystemError.
    """
    classes: set[type] = {torch.nn.Module}
    waiting: list[type] = [torch.nn.Module]
    while waiting:
        more: set[type] = set(type.__subclasses__(waiting.pop())) - classes
        classes |= more
        waiting += more
    return [item for item in gc.get_referrers(*classes) if issubclass(type(item), torch.nn.Module)]


def _parameters(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            waiting += children_of(part)
            yield from parameters_of(part)
