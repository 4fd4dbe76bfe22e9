"""Validation in a thread beside the serving, on a copy of the model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

__all__ = ["start"]

_Result = TypeVar("_Result")


def start(
    validate: Callable[[torch.nn.Module], _Result],
    model: torch.nn.Module,
    then: Callable[[_Result], object] | None,
    *,
    wait: bool,
) -> Future[_Result]:
    """Copy the model now, then validate the copy in a thread."""
    snapshot = copy.deepcopy(model).eval()
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            with torch.no_grad():
                result = validate(snapshot)
            if then is not None:
                then(result)
        except BaseException as error:  # raised by `future.result()`
            future.set_exception(error)
        else:
            future.set_result(result)

    # A daemon: a failing program must not wait for the validation to finish.
    thread = threading.Thread(target=run, name="nnlo validation", daemon=True)
    thread.start()
    if wait:
        thread.join()
    return future
