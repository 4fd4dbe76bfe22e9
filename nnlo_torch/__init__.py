"""The plug-in for PyTorch: optimizer wrappers and a sampler. Still empty; the core is `nnlo_common`."""

from __future__ import annotations

__all__: list[str] = []
