"""Flat vector of a torch model's buffers, and how often batch normalisation has updated them.

A layer's `num_batches_tracked` counts the forward passes that updated its statistics. Together with
`momentum` it gives the share of the initial values that is left (`nnlo_common.protocol.Moving`). Instance
normalisation keeps no count: its statistics are averaged like any other buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nnlo_common import FlatVector
from nnlo_common.plugin import Moves, Moving, laid_out
from nnlo_torch._compat import BatchNorm

__all__ = ["FlatBuffers"]


class FlatBuffers:
    """Flat vector of a model's float buffers, copied there and back when an epoch ends.

    Attributes:
        flat: the vector.
        layers: positions of the statistics of all layers that count their updates.

    Args:
        named: names and buffers.
        modules: the modules that own these buffers.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], modules: Sequence[torch.nn.Module] = ()
    ) -> None:
        self._buffers = [buffer for _, buffer in named]
        # Rounding float64 statistics to float32 does no harm: they are averages of noise.
        layout = laid_out((name, buffer.shape, "float32", id(buffer)) for name, buffer in named)
        self.flat = FlatVector(layout)
        self._views = [torch.from_numpy(view) for view in self.flat.views()]
        places = {id(buffer): one.place for buffer, one in zip(self._buffers, layout.segments, strict=True)}
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
        """Return how often each layer has updated its statistics."""
        total, decay = self._totals(), self._decays()
        # A momentum schedule may already be in the next epoch. Too fast a decay does less harm.
        other = np.isnan(decay) != np.isnan(self._decay)
        decay = np.where(other, 0.0, np.minimum(decay, self._decay))
        return Moves(total - self._marked, decay, total)

    @torch.no_grad()
    def mark(self, totals: npt.NDArray[np.float64] | None = None) -> None:
        """Count from here; set the layers' counts to `totals` first, if given."""
        if totals is not None:
            for layer, total in zip(self._layers, totals, strict=True):
                _count(layer).fill_(int(total))
        self._marked, self._decay = self._totals(), self._decays()

    def set_since(self, since: npt.NDArray[np.float64]) -> None:
        """Resume with this many updates since the last `mark`."""
        self._marked, self._decay = self._totals() - since, self._decays()

    def _totals(self) -> npt.NDArray[np.float64]:
        return np.array([float(_count(layer)) for layer in self._layers], np.float64)

    def _decays(self) -> npt.NDArray[np.float64]:
        momenta = [layer.momentum for layer in self._layers]
        return np.array([np.nan if one is None else 1.0 - one for one in momenta], np.float64)


def _counting(modules: Sequence[torch.nn.Module], places: dict[int, slice]) -> dict[Any, tuple[slice, slice]]:
    """Return the layers that count updates of their statistics, and the positions of mean and variance."""
    found = {}
    for layer in dict.fromkeys(part for module in modules for part in module.modules()):
        if isinstance(layer, BatchNorm) and layer.num_batches_tracked is not None:
            mean, variance = (places.get(id(one)) for one in (layer.running_mean, layer.running_var))
            if mean is not None and variance is not None:
                found[layer] = mean, variance
    return found


def _count(layer: Any) -> torch.Tensor:
    count: torch.Tensor = layer.num_batches_tracked  # `_counting` selects only layers that have one
    return count
