"""A torch model's parameters and gradients as one flat vector each.

Float32 parameters on the CPU *are* views of the flat vector from here on, and so are their gradients:
nothing is packed. Others (16 bits, CUDA) are copied at each step; the flat vectors are float32 always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nnlo_common import ConfigurationError, FlatVector, Layout, Segment

__all__ = ["Bridge", "named_parameters"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters an optimizer steps, with the names it knows or their places."""
    named = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [
            f"parameter {index} of group {number}" for index in range(len(group["params"]))
        ]
        named += list(zip(names, group["params"], strict=True))
    return named


class Bridge:
    """Ties the parameters of a model to a flat vector, and their gradients to another.

    Attributes:
        parameters: the flat vector of the parameters.
        gradient: the flat vector of the gradients.
        tensors: the model's parameters, in the order of the vector.
        used: whether each parameter has had a gradient since `clear`.

    Args:
        named: names and parameters; each appears once.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        self.parameters = FlatVector(_layout(named))
        self.gradient = FlatVector(self.parameters.layout)
        self.views = _views(self.parameters)
        self.gradient_views = _views(self.gradient)
        self.aliased = [_can_alias(tensor) for tensor in self.tensors]
        self._copied = [
            (tensor, view)
            for tensor, view, aliased in zip(self.tensors, self.views, self.aliased, strict=True)
            if not aliased
        ]
        self.used = [False] * len(named)
        self._addresses: list[int] = []
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(self._marker(index))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(self.tensors)
            if tensor.requires_grad
        ]
        self._attach()

    def clear(self) -> None:
        """Set all gradients to zero, in place, and count every parameter as unused."""
        self.gradient.vector.fill(0)
        for index, tensor in enumerate(self.tensors):
            self.used[index] = False
            if self.aliased[index]:
                tensor.grad = self.gradient_views[index]
            else:
                tensor.grad = None

    def collect(self) -> None:
        """Bring into the flat gradient what does not lie there yet."""
        self._check()
        for index, tensor in enumerate(self.tensors):
            gradient, view = tensor.grad, self.gradient_views[index]
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                raise ConfigurationError(
                    f"the gradient of {self.names[index]} is sparse; sparse gradients are not exchanged: "
                    "use sparse=False in its Embedding"
                )
            elif gradient is not view:
                view.copy_(gradient)

    def absorb(self) -> None:
        """Bring the parameters into the flat vector where they are no views of it."""
        for tensor, view in self._copied:
            view.copy_(tensor.detach())

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the flat vector into the parameters that are no views of it."""
        for tensor, view in self._copied:
            tensor.copy_(view)

    @contextmanager
    def only_used(self) -> Iterator[None]:
        """Hide the gradients of parameters that had none, as a plain loop would."""
        hidden = [
            (tensor, tensor.grad) for tensor, used in zip(self.tensors, self.used, strict=True) if not used
        ]
        for tensor, _ in hidden:
            tensor.grad = None
        try:
            yield
        finally:
            for tensor, gradient in hidden:
                tensor.grad = gradient

    def _attach(self) -> None:
        for index, tensor in enumerate(self.tensors):
            self.views[index].copy_(tensor.detach())
            if self.aliased[index]:
                tensor.data = self.views[index]
            if tensor.grad is not None:
                self.gradient_views[index].copy_(tensor.grad)
                self.used[index] = True
            if self.aliased[index]:
                tensor.grad = self.gradient_views[index]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def _check(self) -> None:
        for index, tensor in enumerate(self.tensors):
            if tensor.data_ptr() != self._addresses[index]:
                raise ConfigurationError(
                    f"{self.names[index]} has got new memory since it was wrapped (by model.to(...), "
                    "param.data = ... or the like); do that before you wrap the optimizer"
                )

    def _marker(self, index: int) -> object:
        def mark(_: torch.Tensor) -> None:
            self.used[index] = True

        return mark


def _layout(named: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    segments, offset = [], 0
    for name, tensor in named:
        if tensor.is_sparse or tensor.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{name} is {tensor.dtype}, {tensor.layout}; dense float32, float16 and bfloat16 parameters "
                "can be exchanged: convert it before you wrap the optimizer"
            )
        shape = tuple(tensor.shape)
        segments.append(Segment(name, shape, _DTYPES[tensor.dtype], offset, tensor.numel()))
        offset += tensor.numel()
    return Layout(tuple(segments), offset)


def _views(flat: FlatVector) -> list[torch.Tensor]:
    return [torch.from_numpy(view) for view in flat.views()]


def _can_alias(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
