"""Evaluation of a model: sums over batches, and `eval()` mode without gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from nnlo_common import ConfigurationError

__all__ = ["Sums", "counted", "evaluating", "numbers_of", "samples_in", "weight_of"]


def numbers_of(values: object) -> dict[str, float]:
    """Return numbers by name as floats; refuse everything else."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f'scores are numbers by name, such as {{"loss": loss}}, but one of type {type(values).__name__} '
            'was given; return or pass a dict, e.g. {"loss": loss}'
        )
    numbers = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigurationError(
                f"the score {value!r:.100} has the name {name!r}, which is an {type(name).__name__}; name it "
                f"by a text, e.g. {str(name)!r}"
            )
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # torch raises either for several numbers
            raise ConfigurationError(
                f"the score {name!r} is {value!r:.100}, which is not one number; give e.g. its mean()"
            ) from error
    return numbers


def weight_of(weight: Any) -> float:
    """Return the weight of a mean as a float; refuse everything else."""
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigurationError(
            f"weight = {weight!r:.100} of a mean is not possible: it must be a finite number of at least 0, "
            "such as the number of samples behind the values"
        )
    return number


class Sums:
    """Sums of the values measured on each batch, weighted by its number of samples."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: Counter[str] = Counter()

    def add(self, batch: object, means: Mapping[str, Any], samples: int | None = None) -> None:
        """Add the means over one batch; `samples`: its number of samples, if known."""
        numbers = numbers_of(means)
        samples = samples_in(batch) if samples is None else samples
        if not samples:  # the mean of nothing is NaN
            return
        self.samples += samples
        for name, value in numbers.items():
            self._sums[name] += samples * value  # type: ignore[assignment]

    def means(self) -> dict[str, float]:
        """Return the means over all samples so far; empty without samples."""
        return {name: total / self.samples for name, total in self._sums.items()} if self.samples else {}

    def state(self) -> dict[str, Any]:
        """Return the sums for a checkpoint."""
        return {"samples": self.samples, "sums": dict(self._sums)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume with saved sums."""
        self.samples, self._sums = state["samples"], Counter(state["sums"])


def samples_in(batch: object) -> int:
    """Return the number of samples in a batch.

    In this order: the number of graphs (torch_geometric), `batch_size` where the batch has one (tensordict,
    neighbour samplers), the sequences of a `PackedSequence`, the first dimension of a tensor or array, and
    that of the first part of a container that has one. A list of texts has as many samples as texts.
    """
    samples = counted(batch)
    if samples is not None:
        return samples
    raise ConfigurationError(
        f"the number of samples in a batch of type {type(batch).__name__} is unknown; let the loader yield "
        "tensors, or tuples, lists or dicts of them, with the samples along the first dimension, or pass "
        "samples=, a function that returns the number of samples in a batch"
    )


def counted(batch: object) -> int | None:
    """Return the number of samples in a batch; None: unknown."""
    samples = _samples(batch)
    return _number_of_parts(batch) if samples is None else samples


def _samples(batch: object) -> int | None:
    """Return the number that a batch tells of itself, or that of its first part that tells one."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return _first_dimension(batch)
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    told = _told(batch)
    if told is not None:
        return told
    return next((found for found in map(_samples, _parts(batch)) if found is not None), None)


def _told(batch: object) -> int | None:
    """Return the number of samples in a batch that has a name for it."""
    if isinstance(batch, type):
        return None
    graphs = _count(getattr(batch, "num_graphs", None))
    if graphs is not None:
        return graphs
    size = getattr(batch, "batch_size", None)
    if isinstance(size, torch.Size):
        return int(size[0]) if size else None
    if _count(size) is not None:
        return _count(size)
    # The length of a single graph is the number of its attributes.
    single = any(hasattr(batch, name) for name in ("edge_index", "edge_index_dict"))
    return 1 if single and not isinstance(batch, Mapping) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _first_dimension(batch: torch.Tensor | np.ndarray[Any, Any]) -> int | None:
    if not batch.ndim:
        return None
    # A nested tensor has no `shape`.
    return int(batch.size(0)) if isinstance(batch, torch.Tensor) else int(batch.shape[0])


def _parts(batch: object) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return list(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return []


def _number_of_parts(batch: object) -> int | None:
    """Return the number of samples in a batch without any that tells one: single numbers, or texts."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return 1
    parts = _parts(batch)
    if isinstance(batch, Sequence) and parts and all(isinstance(part, str | bytes) for part in parts):
        return len(parts)
    return next((found for found in map(_number_of_parts, parts) if found is not None), None)


@contextmanager
def evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put modules in `eval()` mode without gradients; afterwards restore the mode of each part."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
