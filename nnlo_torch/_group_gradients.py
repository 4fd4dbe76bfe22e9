"""Mean gradients of a group, made when a backward pass ends.

The gradients of the parameters are the group's means as soon as `backward()` returns, so that all that a loop
does with them before `step()`, such as clipping or a `GradScaler`, is what it does with one large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from nnlo_common.plugin import GroupRank
from nnlo_torch._buckets import Buckets
from nnlo_torch._compat import after_backward
from nnlo_torch._flat_model import FlatModel

__all__ = ["GroupGradients"]


class GroupGradients:
    """Replaces the gradients of a model by their means over a group, after each backward pass.

    Where sums are made while the caller computes, they begin as soon as the first gradients are there.

    Each rank sends the whole vector: zeros for a parameter without a gradient there, and a mark for each that
    has one. So ranks that have used different parts of the model agree, and a parameter that none has used
    keeps no gradient.

    Args:
        group: this rank's side of the group.
        flat_model: the model.
        weight: returns the weight of the gradient that is ready.
        samples: returns the number of samples that this rank has taken so far.
    """

    def __init__(
        self,
        group: GroupRank,
        flat_model: FlatModel,
        weight: Callable[[], float],
        samples: Callable[[], int],
    ) -> None:
        self._group, self._flat_model = group, flat_model
        self._weight, self._samples = weight, samples
        self._on, self._queued, self._made = True, False, False
        self._buckets = Buckets(group, flat_model) if group.reducer.overlaps else None
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._noticed, index)
            )
            for index, tensor in enumerate(flat_model.tensors)
            if tensor.requires_grad
        ]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the gradients of backward passes within a `with` block as they are."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def settle(self) -> None:
        """Make the means before a step, if no backward pass has made them since the last one."""
        if not self._made:
            self._make()
        self._made = self._queued = False  # a backward pass that failed has made none

    def release(self) -> None:
        """Leave the gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _noticed(self, index: int, tensor: torch.Tensor) -> None:  # noqa: ARG002 - a hook's argument
        if not self._on:
            return
        if not self._queued:
            self._queued = True
            after_backward(self._make)
        if self._buckets is not None:
            self._begin(self._buckets)
            self._buckets.notice(index)

    def _reach_all(self) -> None:
        """Take the gradients of all optimizers of the training, whichever has stepped last."""
        self._flat_model.chosen = range(len(self._flat_model.tensors))

    def _begin(self, buckets: Buckets) -> None:
        if not buckets.begun:
            self._reach_all()
            buckets.begin(self._weight(), self._samples())

    def _make(self) -> None:
        self._queued, self._made = False, True
        self._reach_all()
        if self._buckets is None:
            self._flat_model.collect()
            self._group.mean(self._flat_model.gradient.vector, self._weight(), self._samples())
        else:
            self._begin(self._buckets)
            self._buckets.finish()
        self._flat_model.hand_out()
