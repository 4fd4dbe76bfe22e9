"""Search for parameters over blocks of ranks, each of which trains one trial; needs Optuna."""

from __future__ import annotations

from nnlo_common.tune._optimize import optimize

__all__ = ["optimize"]
