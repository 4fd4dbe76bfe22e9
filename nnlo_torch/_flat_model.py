"""A torch model's parameters and gradients as one flat vector each.

Where a parameter is stored, as the vector is float32 and lies in the host's memory:

* float32 on the CPU: the parameter *is* a view of the vector;
* float32 on another device: it is a view of a block there, which is copied to and from page-locked memory as
  a whole;
* everything else (16 bits, channels last) is copied tensor by tensor.

A gradient is `None` until a backward pass has made it, as in any loop. A large one is moved into the vector
as soon as it is made, while it is still in the cache, and is a view of it from then on: to have autograd add
it to zeros that lie there already would cost four passes over the memory instead of two. The small ones are
moved together, before the step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from nnlo_common import ConfigurationError, FlatVector, Layout, Segment
from nnlo_common.plugin import PRESENT, padded, vectors_in_turn
from nnlo_torch._compat import copy_all

__all__ = ["FlatModel", "Storage", "named_parameters"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# From so many numbers on a gradient is large: to move it at once gains more than the call costs.
_LARGE = 16384


class Storage(enum.Enum):
    """How numbers get from a parameter to the vector and back."""

    VIEW = "the parameter is a view of the vector"
    BLOCK = "the parameter is a view of a block on its device"
    COPY = "the parameter is copied"


def named_parameters(
    optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module] = ()
) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters an optimizer steps, with their names where anybody knows them."""
    known = {id(tensor): name for module in reversed(modules) for name, tensor in module.named_parameters()}
    named = []
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [
            f"parameter {index} of group {number}" for index in range(len(group["params"]))
        ]
        for name, tensor in zip(own, group["params"], strict=True):
            named.append((name if "param_names" in group else known.get(id(tensor), name), tensor))
    return named


class FlatModel:
    """Ties the parameters of a model to a flat vector, and their gradients to another.

    Attributes:
        parameters: the flat vector of the parameters.
        gradient: the flat vector of the gradients.
        tensors: the model's parameters, in the order of the vector.
        storages: how each gets into the vector.
        marks: where the vector says whether there is a gradient, for each parameter.

    Args:
        named: names and parameters; each appears once.
        gradients: whether gradients are wanted; where each worker steps by itself they stay as they are.
        lag: how many gradients may still travel when the next one is made.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], *, gradients: bool = True, lag: int = 0
    ) -> None:
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        self.storages = [_storage(tensor) for tensor in self.tensors]
        layout = _layout(named)
        locked = Storage.BLOCK in self.storages
        make = partial(FlatVector, layout, _page_locked) if locked else partial(FlatVector, layout)
        self.parameters, self.gradient = make(), make()
        self.gradients = [self.gradient]
        if gradients and not locked:
            self.gradients += [FlatVector(layout) for _ in range(vectors_in_turn(layout, lag) - 1)]
        self._kept = len(self.gradients) == 1  # whether gradients are changed in place from step to step
        self._turns, self._turning = 0, False
        self.views = _views(self.parameters)
        self.gradient_views = _views(self.gradient)
        self._all_views = [self.gradient_views, *map(_views, self.gradients[1:])]
        self.marks = layout.marks()
        self._wanted = gradients
        self._blocks = _blocks(self, gradients=gradients)
        # Where each gradient lies once a backward pass has made it.
        self._places = list(self.gradient_views)
        for block in self._blocks:
            self._places[block.first : block.first + len(block.gradients)] = block.gradients
        self._copied = [index for index, storage in enumerate(self.storages) if storage is Storage.COPY]
        # Then nothing moves between them, step after step.
        self._all_views_of_it = not self._copied and not self._blocks
        self._attach()

    def collect(self) -> None:
        """Bring into the flat gradient what does not lie there yet, and say which parameters have one."""
        self._check()
        present = np.zeros(len(self.tensors), np.float32)
        places, made = [], []
        for index, tensor in enumerate(self.tensors):
            gradient, place = tensor.grad, self._places[index]
            if gradient is None:
                place.zero_()
                continue
            present[index] = PRESENT
            if gradient.is_sparse:
                self._refuse_sparse(index)
            if gradient is not place:
                places.append(place)
                made.append(gradient.detach() if gradient.requires_grad else gradient)
        if places:
            copy_all(places, made)
        for block in self._blocks:
            block.host_gradient.copy_(block.gradient)
        self.gradient.vector[self.marks] = present

    def turn(self) -> bool:
        """Let the next gradient be made in another vector, while this one travels; say whether it is.

        It is not before a step has shown that the loop forgets its gradients: one that sets them to zero in
        place, or adds to them, would change what travels.
        """
        self._turns += 1
        if self._kept or self._turns == 1:
            return False
        self._turning = True
        turn = self._turns % len(self.gradients)
        self.gradient, self.gradient_views = self.gradients[turn], self._all_views[turn]
        self._places = list(self.gradient_views)
        return True

    def check(self) -> None:
        """Refuse what could not be exchanged, where gradients stay as they are."""
        self._check()
        for index, tensor in enumerate(self.tensors):
            if tensor.grad is not None and tensor.grad.is_sparse:
                self._refuse_sparse(index)

    def absorb(self) -> None:
        """Bring the parameters into the flat vector where they are no views of it."""
        if self._all_views_of_it:
            return
        with torch.no_grad():
            for index in self._copied:
                self.views[index].copy_(self.tensors[index])
            for block in self._blocks:
                block.host.copy_(block.device)

    def publish(self) -> None:
        """Bring the flat vector into the parameters that are no views of it."""
        if self._all_views_of_it:
            return
        with torch.no_grad():
            for index in self._copied:
                self.tensors[index].copy_(self.views[index])
            for block in self._blocks:
                block.device.copy_(block.host)

    def _attach(self) -> None:
        for block in self._blocks:
            for offset, view in enumerate(block.views):
                view.copy_(self.tensors[block.first + offset].detach())
                self.tensors[block.first + offset].data = view
            block.host.copy_(block.device)
        for index, tensor in enumerate(self.tensors):
            if self.storages[index] is not Storage.BLOCK:
                self.views[index].copy_(tensor.detach())
            if self.storages[index] is Storage.VIEW:
                tensor.data = self.views[index]
            large = tensor.numel() >= _LARGE and self.storages[index] is not Storage.COPY
            if self._wanted and tensor.requires_grad and large:
                catch = self._catcher(index)
                tensor.register_post_accumulate_grad_hook(catch)  # type: ignore[no-untyped-call]
                if tensor.grad is not None:
                    catch(tensor)
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def _check(self) -> None:
        for index, tensor in enumerate(self.tensors):
            if tensor.data_ptr() != self._addresses[index]:
                raise ConfigurationError(
                    f"{self.names[index]} has got new memory since it was wrapped (by model.to(...), "
                    "param.data = ... or the like); do that before you wrap the optimizer"
                )

    def _catcher(self, index: int) -> Callable[[torch.Tensor], None]:
        """What is called when autograd has made or changed a parameter's gradient."""
        elsewhere = {id(views[index]) for views in self._all_views}

        def catch(tensor: torch.Tensor) -> None:
            gradient, place = tensor.grad, self._places[index]
            # One that can be differentiated again, and one that is sparse, are left to `collect`.
            if gradient is None or gradient.requires_grad or gradient.is_sparse:
                return
            if gradient is place:
                self._kept |= not self._turning  # else it was made anew in this step
            elif id(gradient) in elsewhere:
                raise ConfigurationError(
                    f"the gradient of {self.names[index]} was kept and changed after a step while it "
                    "travels (lag > 0); call optimizer.zero_grad() with set_to_none=True after each step, or "
                    "use lag=0"
                )
            else:
                place.copy_(gradient)
                tensor.grad = place

        return catch

    def _refuse_sparse(self, index: int) -> None:
        raise ConfigurationError(
            f"the gradient of {self.names[index]} is sparse; sparse gradients are not exchanged: "
            "use sparse=False in its Embedding"
        )


@dataclass(frozen=True, eq=False)
class _Block:
    """Neighbouring parameters on one device other than the CPU.

    Attributes:
        first: the index of the first of them.
        device: their memory there.
        host: their part of the vector.
        views: the parameters in `device`.
        gradient: the memory of their gradients there.
        host_gradient: their part of the gradient vector.
        gradients: the gradients in `gradient`.
    """

    first: int
    device: torch.Tensor
    host: torch.Tensor
    views: list[torch.Tensor]
    gradient: torch.Tensor
    host_gradient: torch.Tensor
    gradients: list[torch.Tensor]


def _blocks(flat_model: FlatModel, *, gradients: bool) -> list[_Block]:
    blocks = []
    keys = [
        (storage, tensor.device)
        for storage, tensor in zip(flat_model.storages, flat_model.tensors, strict=True)
    ]
    for (storage, device), run in groupby(range(len(keys)), key=keys.__getitem__):
        members = list(run)
        if storage is not Storage.BLOCK:
            continue
        segments = [flat_model.parameters.layout.segments[index] for index in members]
        start, stop = segments[0].offset, int(flat_model.marks[members[-1]]) + 1
        on_device = torch.zeros(stop - start, device=device)
        gradient = torch.zeros(stop - start if gradients else 0, device=device)
        blocks.append(
            _Block(
                members[0],
                on_device,
                torch.from_numpy(flat_model.parameters.vector[start:stop]),
                _cut(on_device, segments, start),
                gradient,
                torch.from_numpy(flat_model.gradient.vector[start : start + gradient.numel()]),
                _cut(gradient, segments, start) if gradients else [],
            )
        )
    return blocks


def _cut(block: torch.Tensor, segments: Sequence[Segment], start: int) -> list[torch.Tensor]:
    return [block[s.offset - start : s.offset - start + s.size].view(s.shape) for s in segments]


def _layout(named: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    segments, offset = [], 0
    for name, tensor in named:
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{name} is {tensor.dtype}, {tensor.layout}; dense float32, float16 and bfloat16 parameters "
                "can be exchanged: convert it before you wrap the optimizer"
            )
        shape = tuple(tensor.shape)
        segments.append(Segment(name, shape, _DTYPES[tensor.dtype], offset, tensor.numel()))
        offset += padded(tensor.numel())  # as torch itself aligns its tensors
    return Layout(tuple(segments), offset)


def _views(flat: FlatVector) -> list[torch.Tensor]:
    return [torch.from_numpy(view) for view in flat.views()]


def _storage(tensor: torch.Tensor) -> Storage:
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        return Storage.COPY
    return Storage.VIEW if tensor.device.type == "cpu" else Storage.BLOCK


def _page_locked(count: int) -> npt.NDArray[np.uint8]:
    """Memory that a GPU reads and writes directly."""
    locked = torch.cuda.is_available()
    memory: npt.NDArray[np.uint8] = torch.zeros(count, dtype=torch.uint8, pin_memory=locked).numpy()
    return memory
