"""Advice for a loop of PyTorch: a probe of the model, its loss, its data and its optimizer."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Advice, ProcessMemory, StepParts, Vector, advise_with, function_given
from nnlo_torch._compat import copy_all
from nnlo_torch._wrapper import Wrapper

__all__ = ["TorchProbed", "advise"]


def advise(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    loader: Any,
    optimizer: torch.optim.Optimizer,
    *,
    seconds: float = 60.0,
    link: tuple[float, float] | None = None,
    folder: str | Path | None = None,
) -> Advice:
    """Try a training for a minute, and say how many workers, which batch and which layout suit it.

    Call it in a script before the loop, started plainly or on several ranks, which then all try at the same
    time: that shows what they take from each other. The model and the optimizer are as before afterwards.

        advice = nnlo_torch.advise(model, torch.nn.functional.cross_entropy, loader, optimizer)
        print(advice)

    Args:
        model: on its device.
        loss: called as loss(model(x), y); returns one number.
        loader: yields batches (x, y), as the loop gets them.
        optimizer: yours; on several ranks not wrapped yet, and with a loader for one process.
        seconds: about how long it takes.
        link: seconds of a short message, and bytes a second of a long one, between hosts, as `nnlo doctor`
            measures them; None: say what follows for a common network.
        folder: write advice.html and advice.json there.

    Raises:
        ConfigurationError: the model does not fit into the memory, a loss is not finite, or there are too few
            samples; nothing is written then.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(2, (256,)))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=32)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> advice = advise(model, torch.nn.functional.cross_entropy, loader, optimizer, seconds=1)
        >>> advice.facts.parameters
        18
    """
    if isinstance(optimizer, Wrapper) and optimizer.size > 1:
        raise ConfigurationError(
            f"advise() tries a training before ranks join, but {type(optimizer).__name__} has joined them; "
            "call it before you wrap the optimizer, with a loader for one process"
        )
    inner = optimizer.optimizer if isinstance(optimizer, Wrapper) else optimizer
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        one = TorchProbed(model, loss, loader, inner)
        kept = copy.deepcopy(model.state_dict()), copy.deepcopy(one.optimizer.state_dict())
        training = model.training
        model.train()
        try:
            return advise_with(one, seconds=seconds, link=link, folder=folder, wrappers="nnlo_torch")
        finally:
            model.train(training)
            model.load_state_dict(kept[0])
            one.optimizer.load_state_dict(kept[1])
            one.optimizer.zero_grad()


class TorchProbed:
    """A training of PyTorch in the hands of a probe; see `nnlo_common.simulation._probe.ProbedModel`.

    Attributes:
        optimizer: the user's own.
        on_gpu: whether the model is on a GPU.

    Args:
        model: the user's.
        loss: the user's.
        loader: yields batches.
        optimizer: not wrapped.
        validated: whether there are samples to validate with.
        samples: how many there are; None: as the loader says.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        loader: Any,
        optimizer: torch.optim.Optimizer,
        *,
        validated: bool = True,
        samples: int | None = None,
    ) -> None:
        function_given("advise(): loss", loss)
        self._model, self._loss, self._loader, self.optimizer = model, loss, loader, optimizer
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        if not named:
            raise ConfigurationError("the model has no parameters to train; give one that has")
        self._parameters = [one for _, one in named]
        self._device = self._parameters[0].device
        self.on_gpu = self._device.type == "cuda"
        self.framework = f"PyTorch {torch.__version__.partition('+')[0]}"
        self.device = torch.cuda.get_device_name(self._device) if self.on_gpu else str(self._device)
        self.layers = [(name, one.numel()) for name, one in named]
        self.validated = validated
        self._rest: Any = None  # read and not used yet
        self._batches: Iterator[Any] = iter(())
        self._begun = False  # whether there was a batch
        first = self._next()
        self.batch, self._rest = _length(first), first
        self.samples = _samples(loader, self.batch) if samples is None else samples
        self._memory = ProcessMemory()
        self._collected: list[torch.Tensor] = []

    @property
    def slots(self) -> int:
        """Numbers that the optimizer keeps for each parameter."""
        kept = sum(
            value.numel()
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
        return round(kept / sum(one.numel() for one in self._parameters))

    def read(self, size: int) -> Any:
        """Return a batch of this size from the loader's."""
        found = self._next() if self._rest is None else self._rest
        while _length(found) < size:
            found = _joined(found, self._next())
        self._rest = None if _length(found) == size else _cut(found, slice(size, None))
        return _cut(found, slice(0, size))

    def step(self, batch: Any) -> float:
        """Train on a batch."""
        loss = self._backward(batch)
        self.optimizer.step()
        return float(loss.detach())

    def gradient(self, batch: Any) -> Vector:
        """Return the gradient of a batch."""
        self._backward(batch)
        parts = [
            torch.zeros(one.numel()) if one.grad is None else one.grad.detach().reshape(-1).float().cpu()
            for one in self._parameters
        ]
        self.optimizer.zero_grad()
        return np.asarray(torch.cat(parts).numpy(), np.float32)

    def step_parts(self, batch: Any) -> StepParts:
        """Train on a batch; return what the parts of that take."""
        self._backward(batch)
        self._finish()
        began_s = time.perf_counter()
        self._collect()
        self._finish()
        collected_s = time.perf_counter()
        self.optimizer.step()
        self._finish()
        return StepParts(collected_s - began_s, time.perf_counter() - collected_s)

    def begin_memory(self) -> None:
        """Forget the peak before."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._memory.begin()

    def peak_bytes(self) -> int:
        """Return the peak since then."""
        return torch.cuda.max_memory_allocated(self._device) if self.on_gpu else self._memory.bytes

    def left_bytes(self) -> int | None:
        """Return how much memory is left on the device."""
        return torch.cuda.mem_get_info(self._device)[0] if self.on_gpu else self._memory.left

    def _collect(self) -> None:
        """Copy the gradients into memory of the host that is used again, as wrappers do."""
        made = [one.grad.detach() for one in self._parameters if one.grad is not None]
        made = [one.to_dense() if one.is_sparse else one for one in made]
        if [one.shape for one in made] != [one.shape for one in self._collected]:
            self._collected = [torch.zeros(one.shape) for one in made]
        copy_all(self._collected, made)

    def _finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def _backward(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self._measured(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _measured(self, batch: Any) -> torch.Tensor:
        x, y = batch
        output = self._model(*x) if isinstance(x, tuple | list) else self._model(x)
        loss = self._loss(output, y)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigurationError(
                f"loss(model(x), y) returned {type(loss).__name__} {loss!r:.60}, and not one number; give "
                "the function that the loop uses"
            )
        return loss

    def _next(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches, None)
        if batch is None and self._begun:
            raise ConfigurationError(
                "the loader has ended, and it begins only once; give a DataLoader, or an object whose "
                "__iter__ begins anew"
            )
        if batch is None:
            raise ConfigurationError("the loader yields no batches, so there is nothing to try")
        self._begun = True
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ConfigurationError(
                f"the loader yields {type(batch).__name__} {batch!r:.60}, and a probe takes batches (x, y); "
                "give an object whose __iter__ yields these"
            )
        return self._moved(tuple(batch))

    def _moved(self, some: Any) -> Any:
        if isinstance(some, Mapping):
            return {name: self._moved(one) for name, one in some.items()}
        if isinstance(some, tuple | list):
            return tuple(map(self._moved, some))
        return some.to(self._device) if isinstance(some, torch.Tensor) else some


def _length(some: Any) -> int:
    first = _first(some)
    return len(first)


def _first(some: Any) -> torch.Tensor:
    if isinstance(some, Mapping):
        return _first(next(iter(some.values())))
    if isinstance(some, tuple | list):
        return _first(some[0])
    if not isinstance(some, torch.Tensor) or not some.ndim:
        raise ConfigurationError(
            f"a batch has a {type(some).__name__} where tensors of samples were expected; give batches (x, "
            "y) of tensors"
        )
    return some


def _cut(some: Any, part: slice) -> Any:
    if isinstance(some, Mapping):
        return {name: _cut(one, part) for name, one in some.items()}
    return tuple(_cut(one, part) for one in some) if isinstance(some, tuple | list) else some[part]


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {name: _joined(one[name], other[name]) for name in one}
    if isinstance(one, tuple | list):
        return tuple(_joined(*pair) for pair in zip(one, other, strict=True))
    return torch.cat([one, other])


def _samples(loader: Any, batch: int) -> int | None:
    """Return how many samples a loader has, as far as it says."""
    for find in (lambda: loader.size, lambda: len(loader.dataset), lambda: len(loader) * batch):
        try:
            found = find()
        except (AttributeError, TypeError):
            continue
        if isinstance(found, int) and math.isfinite(found):
            return found
    return None
