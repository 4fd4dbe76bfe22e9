"""Snapshot of one rank's modules and random states, converted to bytes and back."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Vector, check_stored, random_numbers
from nnlo_torch._flat_model import layout_of, named_parameters

__all__ = [
    "check_random",
    "load_modules",
    "load_random",
    "load_vector",
    "model_fact",
    "packed",
    "random_states",
    "saved_modules",
    "unpacked",
]

_ARRAY = "an array of numpy"


def packed(tree: Mapping[str, Any]) -> bytes:
    """Serialize a tree of numbers, strings, tensors and arrays with `torch.save`."""
    file = io.BytesIO()
    torch.save(_without_arrays(tree), file)
    return file.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """Deserialize the tree that `packed` returned; it cannot run code.

    Raises:
        ConfigurationError: the bytes are not such a tree.
    """
    try:
        check_stored(data)
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        tree: dict[str, Any] = dict(_with_arrays(found))
    except Exception as error:  # torch raises errors of many types for bytes that it has not written
        raise ConfigurationError(
            f"a saved state cannot be read and is probably damaged; use another checkpoint ({error})"
        ) from error
    return tree


def saved_modules(modules: Sequence[torch.nn.Module], *, parameters: bool) -> list[dict[str, Any]]:
    """Return the state of modules, with or without their parameters."""
    states = []
    for module in modules:
        left_out = (
            set() if parameters else {name for name, _ in module.named_parameters(remove_duplicate=False)}
        )
        states.append({name: value for name, value in module.state_dict().items() if name not in left_out})
    return states


def load_modules(modules: Sequence[torch.nn.Module], states: Sequence[Mapping[str, Any]]) -> None:
    """Load what `saved_modules` returned."""
    if len(modules) != len(states):
        raise ConfigurationError(
            f"{len(states)} modules were saved, but {len(modules)} hold the optimizer's parameters now; pass "
            "model= to the wrapper to choose one"
        )
    for module, state in zip(modules, states, strict=True):
        module.load_state_dict(dict(state), strict=False)


def random_states() -> dict[str, Any]:
    """Return the states of all random generators that a script may use."""
    return {
        **random_numbers.random_states(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_random(states: Mapping[str, Any]) -> None:
    """Restore the random generators' states."""
    random_numbers.load_random(states)
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def check_random(states: Mapping[str, Any]) -> None:
    """Refuse states that the generators cannot have; change none.

    Raises:
        ValueError: there is one.
        TypeError: there is one.
        RuntimeError: there is one.
    """
    random_numbers.check_random(states)
    torch.Generator().set_state(states["torch"])
    if not all(isinstance(state, torch.Tensor) for state in states["cuda"]):
        raise TypeError("the states of the CUDA generators are no tensors")


def model_fact(optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module]) -> str:
    """Return the names, shapes and types of the parameters of optimizers, for comparison."""
    return layout_of(_parameters(optimizers, modules)).to_json()


def load_vector(
    optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module], vector: Vector
) -> None:
    """Copy a flat vector of several ranks into the parameters of optimizers."""
    named = _parameters(optimizers, modules)
    flat = torch.from_numpy(vector)
    with torch.no_grad():
        for (_, tensor), segment in zip(named, layout_of(named).segments, strict=True):
            tensor.copy_(flat[segment.place].view(segment.shape))


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[torch.nn.Module]
) -> list[tuple[str, torch.Tensor]]:
    return [pair for one in optimizers for pair in named_parameters(one, modules)]


def _without_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_without_arrays(item) for item in value)
    return {key: _without_arrays(item) for key, item in value.items()} if type(value) is dict else value


def _with_arrays(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_with_arrays(item) for item in value)
    if type(value) is not dict:
        return value
    if value.keys() == {_ARRAY}:
        return value[_ARRAY].numpy()
    return {key: _with_arrays(item) for key, item in value.items()}
