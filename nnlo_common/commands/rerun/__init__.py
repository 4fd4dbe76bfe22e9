"""`nnlo rerun`: start a job again by itself when a rank has died, from its newest checkpoint."""

from __future__ import annotations

__all__: list[str] = []
