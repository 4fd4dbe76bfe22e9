"""A torch model's buffers: as a flat vector, and which of them batch normalisation moves.

`num_batches_tracked` of a layer counts the forward passes that have moved its statistics. With `momentum` it
says what a layer has made of those it began with (`nnlo_common.protocol.Moving`). Instance normalisation does
not count: its statistics are averaged as any other buffer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nnlo_common import FlatVector, Layout, Segment
from nnlo_common.plugin import Moves, Moving
from nnlo_torch._compat import BatchNorm

__all__ = ["FlatBuffers"]


class FlatBuffers:
    """A model's float buffers as a flat vector, copied there and back when an epoch ends.

    Attributes:
        flat: the vector.
        layers: where the statistics of layers lie that count how often they have moved them.

    Args:
        named: names and buffers.
        modules: whose buffers these are.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], modules: Sequence[torch.nn.Module] = ()
    ) -> None:
        self._buffers = [buffer for _, buffer in named]
        # Float64 statistics are rounded to float32 on their way: they are averages of noise.
        segments, offset = [], 0
        for name, buffer in named:
            segments.append(Segment(name, tuple(buffer.shape), "float32", offset, buffer.numel()))
            offset += buffer.numel()
        self.flat = FlatVector(Layout(tuple(segments), offset))
        self._views = [torch.from_numpy(view) for view in self.flat.views()]
        places = {id(buffer): one.place for buffer, one in zip(self._buffers, segments, strict=True)}
        found = _counting(modules, places)
        self._layers = list(found)
        self.layers = [Moving(*found[layer]) for layer in self._layers]
        self.gather()
        self.mark()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the buffers into the vector."""
        for buffer, view in zip(self._buffers, self._views, strict=True):
            view.copy_(buffer)

    @torch.no_grad()
    def scatter(self) -> None:
        """Copy the vector into the buffers."""
        for buffer, view in zip(self._buffers, self._views, strict=True):
            buffer.copy_(view)

    def moves(self) -> Moves:
        """Return how often each layer has moved its statistics."""
        total, decay = self._totals(), self._decays()
        # A schedule of momenta may have gone on to the next epoch. Too fast a decay does less harm.
        other = np.isnan(decay) != np.isnan(self._decay)
        decay = np.where(other, 0.0, np.minimum(decay, self._decay))
        return Moves(total - self._marked, decay, total)

    @torch.no_grad()
    def mark(self, totals: npt.NDArray[np.float64] | None = None) -> None:
        """Count from here, with these counts in the layers."""
        if totals is not None:
            for layer, total in zip(self._layers, totals, strict=True):
                _count(layer).fill_(int(total))
        self._marked, self._decay = self._totals(), self._decays()

    def set_since(self, since: npt.NDArray[np.float64]) -> None:
        """Go on where so many updates had been made since the last `mark`."""
        self._marked, self._decay = self._totals() - since, self._decays()

    def _totals(self) -> npt.NDArray[np.float64]:
        return np.array([float(_count(layer)) for layer in self._layers], np.float64)

    def _decays(self) -> npt.NDArray[np.float64]:
        momenta = [layer.momentum for layer in self._layers]
        return np.array([np.nan if one is None else 1.0 - one for one in momenta], np.float64)


def _counting(modules: Sequence[torch.nn.Module], places: dict[int, slice]) -> dict[Any, tuple[slice, slice]]:
    """Return the layers that count how often they move their statistics, and where these lie."""
    found = {}
    for layer in dict.fromkeys(part for module in modules for part in module.modules()):
        if isinstance(layer, BatchNorm) and layer.num_batches_tracked is not None:
            mean, variance = (places.get(id(one)) for one in (layer.running_mean, layer.running_var))
            if mean is not None and variance is not None:
                found[layer] = mean, variance
    return found


def _count(layer: Any) -> torch.Tensor:
    count: torch.Tensor = layer.num_batches_tracked  # `_counting` has seen that there is one
    return count
