"""Losses and metrics of PyTorch by name, for `nnlo train`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from nnlo_common.plugin import RunPlan

__all__ = ["Function", "accuracy", "function_of"]

#: A function of a model's output and the labels.
Function: TypeAlias = Callable[[Any, Any], Any]
# Losses whose labels are the numbers of classes.
_OF_CLASSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of samples whose highest output is their class; labels are numbers or one-hot rows."""
    if output.ndim < 2 or output.shape[1] < 2:
        raise ValueError("accuracy needs an output for each of several classes; write one in the Python file")
    classes = labels.argmax(1) if labels.shape == output.shape else labels
    return (output.argmax(1) == classes).float().mean()


def function_of(plan: RunPlan, flag: str, name: str) -> Function:
    """Look up a loss or metric in the Python file, then in PyTorch."""
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
    """Widen integer labels to int64: these losses take no narrower integers, which files often have."""

    def wide(output: Any, labels: Any) -> Any:
        return loss(output, labels if labels.is_floating_point() else labels.long())

    return wide
