"""Weights of a file, loaded into a module for `nnlo train --from`; no file runs code unless it is trusted."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nnlo_common import ConfigurationError, MissingExtraError
from nnlo_common.plugin import npz_arrays, read_whole, readable_file

__all__ = ["fill"]

#: Names under which scripts save the weights beside other things.
_NESTED = ("state_dict", "model_state_dict", "model")


def fill(model: torch.nn.Module, path: Path, trusted: bool) -> None:
    """Load the weights of a file into a model, all of them.

    Args:
        model: the model.
        path: a `.pt`, `.pth`, `.safetensors` or `.npz` file.
        trusted: whether it may contain code.
    """
    read = {".safetensors": _of_safetensors, ".npz": _of_npz}.get(path.suffix.lower())
    found = _of_torch(path, trusted) if read is None else read(path)
    if isinstance(found, torch.nn.Module):
        found = found.state_dict()
    if isinstance(found, Mapping):
        found = next((found[name] for name in _NESTED if isinstance(found.get(name), Mapping)), found)
    if not isinstance(found, Mapping) or not found:
        raise ConfigurationError(
            f"--from {path} holds {type(found).__name__} data and no weights by name; save model.state_dict()"
        )
    model.load_state_dict(found)


def _of_torch(path: Path, trusted: bool) -> Any:
    with readable_file(path) as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=not trusted)
        except pickle.UnpicklingError:
            if trusted:
                raise
            raise ConfigurationError(
                f"--from {path} is not only weights: loading it can run any code; save model.state_dict(), "
                "or add --allow-pickle if you trust it"
            ) from None


def _of_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load
    except ImportError:
        raise MissingExtraError(f"--from {path}", "safetensors", "safetensors") from None
    return load(_content(path))


def _of_npz(path: Path) -> Any:
    return {name: torch.from_numpy(array) for name, array in npz_arrays(_content(path)).items()}


def _content(path: Path) -> bytes:
    return read_whole(path, os.stat(path).st_size)  # noqa: PTH116 - as large as it is
