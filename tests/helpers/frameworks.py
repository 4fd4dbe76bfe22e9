"""Frameworks that tests compare with, as `NNLO_TEST_FRAMEWORKS` names them."""

from __future__ import annotations

import os

__all__ = ["FRAMEWORKS"]

# Which frameworks must be compared with, e.g. "torch,keras" (the Makefile sets it). A name in it whose
# package is missing fails, so that no suite can silently skip the comparisons.
FRAMEWORKS = {name for name in os.environ.get("NNLO_TEST_FRAMEWORKS", "").split(",") if name}
