"""Algorithms, one file each with the worker's and the centre's half; and the vector optimizers.

An algorithm is a frozen dataclass of options (`Downpour`, `EASGD`, ...) that makes both halves. They compute
on flat float32 vectors only, so the virtual cluster tests the very code that runs over MPI. May import:
`base`. Must not know: MPI, clocks, threads, files, frameworks.
"""

from __future__ import annotations

from nnlo_common.algorithms import _found
from nnlo_common.algorithms._found import *  # noqa: F403 - whatever algorithms there are
from nnlo_common.algorithms._rule import Algorithm, Ask, CenterRule, Contribution, GainReport, WorkerRule
from nnlo_common.base._options import option

__all__ = ["Algorithm", "Ask", "CenterRule", "Contribution", "GainReport", "WorkerRule", "option"]
__all__ += _found.__all__
__all__[:] = sorted(__all__, key=str.lower)
