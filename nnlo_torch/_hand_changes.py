"""Check that nothing but the exchanges changes a worker's weights, where they alone may.

If the optimizer runs on the centre, the next centre overwrites whatever a script does to a worker's weights
after `step()`: clipping, noise, averages. PyTorch does not record such changes (`param.data.clamp_(...)`
leaves the version of a tensor as it is), so this compares weights after a step with those before the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from nnlo_common import ConfigurationError, Segment
from nnlo_torch._flat_model import FlatModel, Storage

__all__ = ["HandChanges", "renormed"]

# Numbers compared at a time, and after how many steps: copying and comparing them takes some 8 microseconds,
# where a step of a small network takes 600.
_WINDOW = 4096
_EVERY = 3


class HandChanges:
    """Finds weights that were changed between two steps, by whatever means.

    After an epoch's first step it compares all weights, after every third one window of them, in turn: a loop
    that changes weights now and then is found, too. A model that fits one window is compared after every
    step. Weights on another device and those of 16 bits are compared after an epoch's first step only.

    Args:
        flat_model: the worker's model.
        exempt: parameters that a forward pass may change; see `renormed`.
        algorithm: the name of the algorithm.
    """

    def __init__(
        self, flat_model: FlatModel, exempt: Iterable[torch.Tensor] = (), algorithm: str = ""
    ) -> None:
        self._model, self._algorithm = flat_model, algorithm
        left_out = {id(tensor) for tensor in exempt}
        chosen = [index for index, tensor in enumerate(flat_model.tensors) if id(tensor) not in left_out]
        views = [index for index in chosen if flat_model.storages[index] is Storage.VIEW]
        self._copies = [index for index in chosen if flat_model.storages[index] is not Storage.VIEW]
        self._segments = {index: flat_model.parameters.layout.segments[index] for index in views}
        self._windows = _windows(self._segments)
        self._next = self._steps = 0
        self._kept: list[tuple[slice, bytes]] = []
        self._epoch = self._published = -1
        self._compares_copies = False

    def keep(self, epoch: int) -> None:
        """Remember weights after a step of this epoch."""
        self._steps += 1
        if epoch == self._epoch and self._skips():
            return
        self._published = self._model.published
        windows = self._windows
        if epoch == self._epoch:
            windows = [windows[self._next]]
            self._next = (self._next + 1) % len(self._windows)
        else:
            self._compares_copies, self._steps = True, 0
        self._epoch = epoch
        vector = self._model.parameters.vector
        self._kept = [(window, vector[window].tobytes()) for window in windows]

    def _skips(self) -> bool:
        return not self._windows or (len(self._windows) > 1 and self._steps % _EVERY > 0)

    def check(self) -> None:
        """Raise if weights are not what they were after the last step; call it before the next."""
        kept, self._kept = self._kept, []
        copies, self._compares_copies = self._compares_copies, False
        if not (kept or copies) or self._published != self._model.published:
            return  # or a new centre has come since
        vector = self._model.parameters.vector
        for window, before in kept:
            # By bits, so that NaN is equal to itself; the server refuses it with a better message.
            if vector[window].tobytes() != before:
                differs = np.frombuffer(before, np.int32) != vector[window].view(np.int32)
                self._refuse(self._name_at(window.start + int(differs.argmax())))
        if copies:
            for index in self._copies:
                if not _same(self._model.tensors[index].detach(), self._model.views[index]):
                    self._refuse(self._model.names[index])

    def _name_at(self, place: int) -> str:
        segments = self._segments.values()
        return next(s.name for s in segments if s.offset <= place < s.offset + s.size)

    def _refuse(self, name: str) -> None:
        raise ConfigurationError(
            f"{name} was changed outside of step(), but with {self._algorithm} only an exchange changes the "
            "weights of a worker, and the next one would undo the change; change them in a function that you "
            "pass to optimizer.after_commit(...), which calls it where the weights are moved, or use an "
            "algorithm whose optimizer runs on workers, such as LocalSGD"
        )


def renormed(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the weights that forward passes renormalise: each pass does it anew, so nothing is lost."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    parts = [part for module in modules for part in module.modules() if isinstance(part, kinds)]
    return [part.weight for part in parts if part.max_norm is not None]


def _windows(segments: Mapping[int, Segment]) -> list[slice]:
    """Return slices of at most a window's size that cover segments, by their indices in the layout.

    Neighbours share a slice: nothing but padding lies between them.
    """
    windows: list[slice] = []
    before = -1
    for index, segment in segments.items():
        for start in range(segment.offset, segment.offset + segment.size, _WINDOW):
            stop = min(start + _WINDOW, segment.offset + segment.size)
            neighbours = bool(windows) and index - before == 1 and stop - windows[-1].start <= _WINDOW
            if neighbours:
                windows[-1] = slice(windows[-1].start, stop)
            else:
                windows.append(slice(start, stop))
        before = index
    return windows


def _same(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    published = view.to(tensor.device, tensor.dtype)
    both_nan = tensor.isnan() & published.isnan()
    return bool(((tensor == published) | both_nan).all())
