"""Where a model lies: on a GPU, and on any machine as if it were elsewhere than in the host's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnlo_torch import _flat_model

__all__ = ["DEVICES", "device_of", "on_gpu"]

#: Marks what needs a GPU; `make gpu` runs it.
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use on this machine"),
]
DEVICES = ["as if elsewhere", pytest.param("cuda", marks=on_gpu)]


def device_of(name: str, monkeypatch: Any) -> str:
    """Return this device; "as if elsewhere": the CPU, but no parameter is the memory of the flat vector."""
    torch.set_num_threads(1)
    if name == "cuda":
        return "cuda"
    ordinary = _flat_model._storage

    def as_if_elsewhere(tensor: torch.Tensor) -> _flat_model.Storage:
        storage = ordinary(tensor)
        return _flat_model.Storage.BLOCK if storage is _flat_model.Storage.VIEW else storage

    monkeypatch.setattr(_flat_model, "_storage", as_if_elsewhere)
    return "cpu"
