"""Callbacks of nnlo for an ordinary `fit` on several ranks."""

from __future__ import annotations

from nnlo_keras._callbacks._checkpoint import Checkpoint
from nnlo_keras._callbacks._like_horovod import Broadcast, MetricAverage, WarmUp
from nnlo_keras._callbacks._progress import Progress
from nnlo_keras._callbacks._pruning import Pruning
from nnlo_keras._callbacks._rank_callback import RankCallback
from nnlo_keras._callbacks._report import Report

__all__ = [
    "Broadcast",
    "Checkpoint",
    "MetricAverage",
    "Progress",
    "Pruning",
    "RankCallback",
    "Report",
    "WarmUp",
]
