"""The plug-in for Keras 3: optimizer wrappers and callbacks. Still empty; the core is `nnlo_common`."""

from __future__ import annotations

__all__: list[str] = []
