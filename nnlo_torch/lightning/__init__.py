"""Adapter for Lightning: `Trainer(strategy=nnlo_torch.lightning.Strategy())`.

Wrap the optimizer in `configure_optimizers`. It needs `pip install nnlo[lightning]`.
"""

from __future__ import annotations

from nnlo_common.plugin import say_public_module
from nnlo_torch.lightning._strategy import Strategy

__all__ = ["Strategy"]

say_public_module(__name__, __all__)
