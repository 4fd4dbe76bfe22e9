"""Algorithms, one file each with the worker's and the centre's half; and the vector optimizers.

An algorithm is a frozen dataclass of options (`Downpour`, `EASGD`, ...) that makes both halves. They compute
on flat float32 vectors only, so the virtual cluster tests the very code that runs over MPI. May import:
`base`. Must not know: MPI, clocks, threads, files, frameworks.
"""

from __future__ import annotations

from nnlo_common.algorithms._agn import AGN
from nnlo_common.algorithms._diloco import DiLoCo
from nnlo_common.algorithms._downpour import Downpour
from nnlo_common.algorithms._dynsgd import DynSGD
from nnlo_common.algorithms._easgd import EAMSGD, EASGD
from nnlo_common.algorithms._gem import GEM
from nnlo_common.algorithms._localsgd import LocalSGD
from nnlo_common.algorithms._rule import Algorithm, Ask, CenterRule, Contribution, GainReport, WorkerRule
from nnlo_common.algorithms._steady import Steady
from nnlo_common.algorithms._synchronous import Synchronous

__all__ = [
    "AGN",
    "Algorithm",
    "Ask",
    "CenterRule",
    "Contribution",
    "DiLoCo",
    "Downpour",
    "DynSGD",
    "EAMSGD",
    "EASGD",
    "GEM",
    "GainReport",
    "LocalSGD",
    "Steady",
    "Synchronous",
    "WorkerRule",
]
