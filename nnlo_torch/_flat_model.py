"""Flat vectors of a torch model's parameters and gradients, one for each.

The vectors are float32 in host memory. A parameter is stored by its type and device:

* float32 on the CPU: the parameter *is* a view of the vector;
* float32 on another device: it is a view of a block there, copied to and from page-locked memory as a whole;
* everything else (16 bits, channels last): copied tensor by tensor.

A gradient is `None` until a backward pass has made it, as in any loop. A large one is moved into the vector
at once, while it is still in the cache, and stays a view of it. Having autograd add it to zeros in the
vector would cost four passes over memory instead of two. Small gradients are moved together before the step.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from nnlo_common import ConfigurationError, FlatVector, Layout, Segment
from nnlo_common.plugin import PRESENT, Vector, laid_out, vectors_in_turn, when_made
from nnlo_torch._compat import changes_of, children_of, copy_all, parameters_of, saved_buffers

__all__ = ["FlatModel", "Storage", "buffers_of", "layout_of", "modules_of", "named_parameters"]

# -- modules that own an optimizer's parameters, found by a search of this process ---------------------
# A model's buffers (running statistics and the like) must reach the centre, or it cannot be evaluated.
# But a script passes parameters to its optimizer, not modules. So this searches all modules of the
# process for those that hold the parameters.


def modules_of(tensors: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the outermost modules that hold any of these parameters, in the order of the parameters."""
    order = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    everything = _all_modules()
    inner = {id(child) for module in everything for child in children_of(module)}
    found: list[tuple[int, int, torch.nn.Module]] = []
    for module in everything:
        if id(module) not in inner:
            places = [order[id(p)] for p in _parameters(module) if id(p) in order]
            if places:
                found.append((min(places), len(found), module))
    return [module for _, _, module in sorted(found, key=lambda item: item[:2])]


def buffers_of(modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return the names and float buffers in the saved state of modules.

    Unsaved buffers can be recomputed, and only floats can be averaged.
    """
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for module in modules:
        for prefix, part in module.named_modules():
            for name, buffer in saved_buffers(part):
                if buffer.is_floating_point() and not buffer.is_sparse:
                    buffers.setdefault(id(buffer), (f"{prefix}.{name}".lstrip("."), buffer))
    return list(buffers.values())


def _all_modules() -> list[torch.nn.Module]:
    """Return all modules of this process: the referrers of every subclass of `torch.nn.Module`.

    Do not use `gc.get_objects`: it holds references to everything. A tuple that another thread is still
    filling must not get a second reference, or that thread fails with a SystemError.
    """
    classes: set[type] = {torch.nn.Module}
    waiting: list[type] = [torch.nn.Module]
    while waiting:
        more: set[type] = set(type.__subclasses__(waiting.pop())) - classes
        classes |= more
        waiting += more
    return [item for item in gc.get_referrers(*classes) if issubclass(type(item), torch.nn.Module)]


def _parameters(module: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            waiting += children_of(part)
            yield from parameters_of(part)


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Gradients of at least this many numbers are moved at once: that saves more than the call costs.
_LARGE = 16384


class Storage(enum.Enum):
    """Storage of a parameter relative to the vector."""

    VIEW = "the parameter is a view of the vector"
    BLOCK = "the parameter is a view of a block on its device"
    COPY = "the parameter is copied"


def named_parameters(
    optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module] = ()
) -> list[tuple[str, torch.Tensor]]:
    """Return an optimizer's parameters, named by the optimizer, the modules or their position."""
    known = {id(tensor): name for module in reversed(modules) for name, tensor in module.named_parameters()}
    named = []
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [
            f"parameter {index} of group {number}" for index in range(len(group["params"]))
        ]
        for name, tensor in zip(own, group["params"], strict=True):
            named.append((name if "param_names" in group else known.get(id(tensor), name), tensor))
    return named


# -- parameters that share memory ----------------------------------------------------------------------
# The vector would part them: each would get memory of its own in it, and a step of one would not move the
# other any more. One `Parameter` in two places of a model is one parameter, and stays so.


def _refuse_shared_memory(
    named: Sequence[tuple[str, torch.Tensor]], others: Sequence[tuple[str, torch.Tensor]]
) -> None:
    trained = {id(tensor) for _, tensor in named}
    memories: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, one in [*named, *((name, other) for name, other in others if id(other) not in trained)]:
        there = not torch.nn.parameter.is_lazy(one) and one.layout is torch.strided and not one.is_meta
        if there and one.numel():
            memories.setdefault(one.untyped_storage().data_ptr(), []).append((name, one))
    for sharing in memories.values():
        reaching: list[tuple[str, torch.Tensor]] = []  # to where the next one begins, or beyond
        for name, one in sorted(sharing, key=lambda item: _bytes_of(item[1]).start):
            begin = _bytes_of(one).start
            reaching = [item for item in reaching if _bytes_of(item[1]).stop > begin]
            for other_name, other in reaching:
                if {id(one), id(other)} & trained and _overlap(one, other):
                    raise ConfigurationError(
                        f"the parameters {other_name!r} and {name!r} share memory, as views of one tensor "
                        "do, and would be trained apart; use one Parameter in both places, or give each its "
                        "own memory: Parameter(values.clone())"
                    )
            reaching.append((name, one))


def _bytes_of(tensor: torch.Tensor) -> range:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return range(start, start + (last + 1) * tensor.element_size())


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in one memory, where their first and last bytes are, have a number in common."""
    if one is other or one.element_size() != other.element_size():
        return one is not other
    start = min(one.storage_offset(), other.storage_offset())
    size = max(_bytes_of(one).stop, _bytes_of(other).stop) // one.element_size() - start
    taken = torch.zeros(size, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - start).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - start).any())


class FlatModel:
    """Ties the parameters of a model to a flat vector, and their gradients to another.

    Attributes:
        parameters: the flat vector of the parameters.
        gradient: the flat vector of the gradients.
        tensors: the model's parameters, in the order of the vector.
        storages: the storage of each parameter.
        marks: for each parameter, the position in the vector that marks whether it has a gradient.
        published: how often the vector was put into the parameters.
        blocks: the neighbouring parameters on another device, with their gradients there.
        fetches: whether `collect` copies the gradients of blocks to the host.
        chosen: indices of the parameters whose gradients `collect` takes; the others count as without one.
        sent: indices of those whose gradients have left for the servers; `collect` leaves them as they are.

    Args:
        named: names and parameters; each appears once.
        gradients: whether gradients are sent; they are not if each worker steps by itself.
        lag: how many earlier gradients may still be in flight when the next one is made.
        catches: whether large gradients are moved at once; not if several optimizers take turns: one's step
            must leave the gradients of the others as they are. Nor if they leave while they are made.
        others: names and parameters of the same modules; for those that are not trained.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        gradients: bool = True,
        lag: int = 0,
        catches: bool = True,
        others: Sequence[tuple[str, torch.Tensor]] = (),
    ) -> None:
        for name, tensor in named:
            if torch.nn.parameter.is_lazy(tensor):
                raise ConfigurationError(
                    f"{name} has no shape yet: run the model on a batch before you wrap its optimizer"
                )
        _refuse_shared_memory(named, others)
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
        self.published, self.chosen = 0, range(len(self.tensors))
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.views = _views(self.parameters)
        self.gradient_views = _views(self.gradient)
        self._all_views = [self.gradient_views, *map(_views, self.gradients[1:])]
        self.marks = layout.marks()
        self._wanted = gradients and catches
        self.blocks = _blocks(self, gradients=gradients)
        self.fetches = True
        self.sent: Container[int] = ()
        self._make = make
        # Target of each gradient after a backward pass.
        self._places = list(self.gradient_views)
        for block in self.blocks:
            self._places[block.first : block.first + len(block.gradients)] = block.gradients
        self._copied = [index for index, storage in enumerate(self.storages) if storage is Storage.COPY]
        # If so, `absorb` and `publish` have nothing to copy.
        self._all_are_views = not self._copied and not self.blocks
        self._attach()

    def collect(self, part: range | None = None, apart: Container[int] = ()) -> None:
        """Move all remaining gradients into the flat vector, and mark which parameters have one.

        Args:
            part: the parameters; None: all that are not `sent`.
            apart: those whose gradients stay where they are.
        """
        apart = self.sent if part is None else apart
        part = range(len(self.tensors)) if part is None else part
        self._check(part)
        present = np.zeros(len(part), np.float32)
        places, made = [], []
        for index in part:
            gradient, place = self.tensors[index].grad, self._places[index]
            if gradient is None or index not in self.chosen:
                place.zero_()
                continue
            present[index - part.start] = PRESENT
            if gradient.is_sparse:
                self._refuse_sparse(index)
            if gradient is not place and index not in apart:
                places.append(place)
                made.append(gradient.detach() if gradient.requires_grad else gradient)
        if places:
            copy_all(places, made)
        for block in self.blocks if self.fetches else ():
            block.fetch(self.place_of(part))
        self.gradient.vector[self.marks[part.start : part.stop]] = present

    def apart(self, part: range, least: int) -> dict[int, tuple[slice, Vector]]:
        """Return the places and numbers of long gradients that lie outside of the vector, by parameter.

        Args:
            part: the parameters.
            least: shorter gradients are left out.
        """
        found = {}
        for index in part:
            gradient, segment = self.tensors[index].grad, self.gradient.layout.segments[index]
            if gradient is None or gradient is self._places[index] or segment.size < least:
                continue
            if index in self.chosen and not gradient.is_sparse and gradient.is_contiguous():
                place = slice(segment.offset, segment.offset + segment.size)
                found[index] = place, gradient.detach().view(-1).numpy()
        return found

    @property
    def all_are_blocks(self) -> bool:
        """Whether all parameters lie on another device, with their gradients in blocks there."""
        return {*self.storages} == {Storage.BLOCK}

    def like_gradient(self) -> Vector:
        """Return another vector on the host of the gradient's size, of the same kind of memory."""
        return self._make().vector

    def place_of(self, part: range) -> slice:
        """Return the place of neighbouring parameters in the vector, with their marks."""
        return slice(self.gradient.layout.segments[part.start].offset, int(self.marks[part.stop - 1]) + 1)

    def hand_out(self) -> None:
        """Give each parameter its gradient in the vector, unless the vector marks that there is none."""
        present = self.gradient.vector[self.marks] > 0
        with torch.no_grad():
            for block in self.blocks:
                block.gradient.copy_(block.host_gradient)
            for index, tensor in enumerate(self.tensors):
                gradient, place = tensor.grad, self._places[index]
                if not present[index] or gradient is place:
                    continue
                if gradient is None:
                    tensor.grad = torch.empty_like(tensor).copy_(place)
                else:
                    gradient.copy_(place)

    def turn(self) -> bool:
        """Switch to another vector for the next gradient while this one is in flight; return whether it did.

        It does not before a step has shown that the loop sets gradients to None: a loop that zeroes them in
        place, or adds to them, would change the vector in flight.
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
        """Refuse moved parameters and sparse gradients, for workers that do not send gradients."""
        self._check()
        for index, tensor in enumerate(self.tensors):
            if tensor.grad is not None and tensor.grad.is_sparse:
                self._refuse_sparse(index)

    def when_made(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Call a function with an index each time that a backward pass has made a gradient.

        Also of parameters that are frozen now: fine-tuning unfreezes them later.

        Returns:
            Ends that.
        """
        return when_made(self.tensors, call)

    def complete(self) -> None:
        """Do nothing: a step takes the gradients that are there."""

    def made(self, index: int) -> tuple[object | None, int]:
        """Return a parameter's gradient, and how often it was changed in place."""
        gradient = self.tensors[index].grad
        return gradient, 0 if gradient is None else changes_of(gradient)

    def trained(self) -> list[bool]:
        """Return for each parameter whether it is not frozen now."""
        return [tensor.requires_grad for tensor in self.tensors]

    def release(self) -> None:
        """Leave the gradients of later backward passes alone; the training is over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def absorb(self) -> None:
        """Copy the parameters that are not views of the flat vector into it."""
        if self._all_are_views:
            return
        with torch.no_grad():
            for index in self._copied:
                self.views[index].copy_(self.tensors[index])
            for block in self.blocks:
                block.host.copy_(block.device)

    def publish(self) -> None:
        """Copy the flat vector into the parameters that are not views of it."""
        self.published += 1
        if self._all_are_views:
            return
        with torch.no_grad():
            for index in self._copied:
                self.tensors[index].copy_(self.views[index])
            for block in self.blocks:
                block.device.copy_(block.host)

    def absorb_changes(self) -> None:
        """Copy into the vector what was changed in parameters since `publish`; keep its bits elsewhere.

        A parameter of 16 bits cannot hold the vector's number, so only other numbers are taken.
        """
        if self._all_are_views:
            return
        with torch.no_grad():
            for index in self._copied:
                tensor, view = self.tensors[index].detach(), self.views[index]
                changed = (tensor != view.to(tensor.device, tensor.dtype)).to(view.device)
                if changed.any():
                    view.copy_(torch.where(changed, tensor.to(view.device, view.dtype), view))
            for block in self.blocks:
                block.host.copy_(block.device)

    def _attach(self) -> None:
        for block in self.blocks:
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
                hook = tensor.register_post_accumulate_grad_hook(catch)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
                if tensor.grad is not None:
                    catch(tensor)
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def _check(self, part: range | None = None) -> None:
        for index in range(len(self.tensors)) if part is None else part:
            if self.tensors[index].data_ptr() != self._addresses[index]:
                raise ConfigurationError(
                    f"the memory of {self.names[index]} was replaced after the optimizer was wrapped (by "
                    "model.to(...), param.data = ... or the like); do that before you wrap the optimizer"
                )

    def _catcher(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that autograd calls after it has made or changed a parameter's gradient."""
        elsewhere = {id(views[index]) for views in self._all_views}

        def catch(tensor: torch.Tensor) -> None:
            gradient, place = tensor.grad, self._places[index]
            # `collect` handles sparse gradients and those that can be differentiated again.
            if gradient is None or gradient.requires_grad or gradient.is_sparse:
                return
            if gradient is place:
                self._kept |= not self._turning  # while turning, this gradient is new in this step
            elif id(gradient) in elsewhere:
                raise ConfigurationError(
                    f"the gradient of {self.names[index]} was kept and changed after a step while it was "
                    "still being sent (lag > 0); call optimizer.zero_grad() with set_to_none=True after each "
                    "step, or use lag=0"
                )
            else:
                place.copy_(gradient)
                tensor.grad = place

        return catch

    def _refuse_sparse(self, index: int) -> None:
        raise ConfigurationError(
            f"the gradient of {self.names[index]} is sparse, and sparse gradients cannot be exchanged; "
            "use sparse=False in its Embedding"
        )


@dataclass(frozen=True, eq=False)
class _Block:
    """Neighbouring parameters on one device other than the CPU.

    Attributes:
        first: the index of the first parameter.
        start: the place of their part in the vector.
        device: the parameters' memory on the device.
        host: their part of the vector.
        views: the single parameters in `device`.
        gradient: the gradients' memory on the device.
        host_gradient: their part of the gradient vector.
        gradients: the single gradients in `gradient`.
    """

    first: int
    start: int
    device: torch.Tensor
    host: torch.Tensor
    views: list[torch.Tensor]
    gradient: torch.Tensor
    host_gradient: torch.Tensor
    gradients: list[torch.Tensor]

    def fetch(self, place: slice) -> None:
        """Copy the gradients that lie in a part of the vector there."""
        inside = slice(max(place.start - self.start, 0), max(place.stop - self.start, 0))
        self.host_gradient[inside].copy_(self.gradient[inside])


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
                start,
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
    for name, tensor in named:
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{name} is {tensor.dtype}, {tensor.layout}; only dense float32, float16 and bfloat16 "
                "parameters can be exchanged: convert it before you wrap the optimizer"
            )
    return layout_of(named)


def layout_of(named: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    """Return the places of parameters in a flat vector."""
    kinds = [str(tensor.dtype).removeprefix("torch.") for _, tensor in named]
    # Padded to the alignment of torch's own tensors.
    return laid_out(
        ((name, tensor.shape, kind, id(tensor)) for (name, tensor), kind in zip(named, kinds, strict=True)),
        padded=True,
    )


def _views(flat: FlatVector) -> list[torch.Tensor]:
    return [torch.from_numpy(view) for view in flat.views()]


def _storage(tensor: torch.Tensor) -> Storage:
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        return Storage.COPY
    return Storage.VIEW if tensor.device.type == "cpu" else Storage.BLOCK


def _page_locked(count: int) -> npt.NDArray[np.uint8]:
    """Return memory that a GPU reads and writes directly, if there is one."""
    locked = torch.cuda.is_available()
    memory: npt.NDArray[np.uint8] = torch.zeros(count, dtype=torch.uint8, pin_memory=locked).numpy()
    return memory
