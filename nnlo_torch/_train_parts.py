"""Losses and metrics of PyTorch by name, for `nnlo train`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import RunPlan

__all__ = ["Function", "accuracy", "function_of", "weighted_of"]

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


def weighted_of(plan: RunPlan, flag: str, name: str) -> Callable[[Any, Any, Any], torch.Tensor]:
    """Look up a loss or metric, as a function of output, labels and weights.

    It returns the sum of the weighted values of all samples, divided by their number: so the sums of batches
    add up to that of the whole, however it is divided.
    """
    own = plan.from_module(name)
    if own is not None:
        if _places(own) < 3:
            raise ConfigurationError(
                f"{flag} {name}: the function in the Python file takes no weights; give it a third argument, "
                "the samples' weights, and return the sum of the weighted values divided by their number"
            )
        found: Callable[[Any, Any, Any], torch.Tensor] = own
        return found
    each = (
        _correct if name == "accuracy" and flag != "--loss" else _of_each(function_of(plan, flag, name), name)
    )

    def weighted(output: Any, labels: Any, weights: torch.Tensor) -> torch.Tensor:
        values = each(output, labels)
        if values.ndim == 0 or len(values) != len(weights):
            raise ValueError(f"{name} has no value for each sample, so it cannot be weighted")
        return (values.reshape(len(values), -1).mean(1) * weights).sum() / len(weights)

    return weighted


def _of_each(loss: Function, name: str) -> Function:
    """Return a loss of PyTorch that has a value for each sample."""
    functional: Any = getattr(torch.nn.functional, name, None)
    kind: Any = getattr(torch.nn, name, None)
    if functional is not None:
        loss = partial(functional, reduction="none")
    elif kind is not None:
        loss = kind(reduction="none")
    return _with_classes(loss) if name in _OF_CLASSES else loss


def _correct(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    accuracy(output, labels)  # refuses what has no classes
    classes = labels.argmax(1) if labels.shape == output.shape else labels
    return (output.argmax(1) == classes).float()


def _places(function: Callable[..., Any]) -> int:
    """Return how many arguments a function takes by their place."""
    kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    return 3 if inspect.Parameter.VAR_POSITIONAL in kinds else len([one for one in kinds if one <= 1])


def _is_loss(name: str) -> bool:
    return name[0] != "_" and (name.endswith("_loss") or "cross_entropy" in name or name == "kl_div")


def _with_classes(loss: Function) -> Function:
    """Widen integer labels to int64: these losses take no narrower integers, which files often have."""

    def wide(output: Any, labels: Any) -> Any:
        return loss(output, labels if labels.is_floating_point() else labels.long())

    return wide
