"""Losses and metrics of PyTorch by name, for `nnlo train`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from nnlo_common.plugin import RunPlan

__all__ = ["Function", "accuracy", "function_of"]

#: Of a model's output and the labels.
Function: TypeAlias = Callable[[Any, Any], Any]
# Losses whose labels are the numbers of classes.
_OF_CLASSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share of samples whose highest output is that of their class, a number or a row of 0 and 1."""
    if output.ndim < 2 or output.shape[1] < 2:
        raise ValueError("accuracy needs an output for each of several classes; write one in the Python file")
    classes = labels.argmax(1) if labels.shape == output.shape else labels
    return (output.argmax(1) == classes).float().mean()


def function_of(plan: RunPlan, flag: str, name: str) -> Function:
    """Return what is called so: in the Python file, or in PyTorch."""
    functions = {one: getattr(torch.nn.functional, one) for one in dir(torch.nn.functional) if _is_loss(one)}
    classes = {one: getattr(torch.nn, one) for one in dir(torch.nn) if one.endswith("Loss")}
    measures = {} if flag == "--loss" else {"accuracy": accuracy}
    known = measures | functions | classes

    def made(one: str) -> Function:
        loss = known[one]() if inspect.isclass(known[one]) else known[one]
        return _with_classes(loss) if one in _OF_CLASSES else loss

    found: Function = plan.resolved(flag, name, made, [*known])
    return found


def _is_loss(name: str) -> bool:
    return name[0] != "_" and (name.endswith("_loss") or "cross_entropy" in name or name == "kl_div")


def _with_classes(loss: Function) -> Function:
    """Let classes be integers of any width: files have what is narrow, and these losses take int64 only."""

    def wide(output: Any, labels: Any) -> Any:
        return loss(output, labels if labels.is_floating_point() else labels.long())

    return wide
