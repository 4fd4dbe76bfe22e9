"""`nnlo rechunk`: rewrite files of samples as HDF5 files that read fast."""

from __future__ import annotations

__all__: list[str] = []
