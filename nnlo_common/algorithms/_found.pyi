# Written by `make generated` from the declarations of the algorithms; change those instead.

from collections.abc import Mapping
from typing import Final

from nnlo_common.algorithms._agn import AGN as AGN
from nnlo_common.algorithms._diloco import DiLoCo as DiLoCo
from nnlo_common.algorithms._downpour import Downpour as Downpour
from nnlo_common.algorithms._dynsgd import DynSGD as DynSGD
from nnlo_common.algorithms._easgd import EAMSGD as EAMSGD
from nnlo_common.algorithms._easgd import EASGD as EASGD
from nnlo_common.algorithms._gem import GEM as GEM
from nnlo_common.algorithms._localsgd import LocalSGD as LocalSGD
from nnlo_common.algorithms._rule import Algorithm
from nnlo_common.algorithms._steady import Steady as Steady
from nnlo_common.algorithms._synchronous import Synchronous as Synchronous

__all__ = [
    "AGN",
    "DiLoCo",
    "Downpour",
    "DynSGD",
    "EAMSGD",
    "EASGD",
    "GEM",
    "LocalSGD",
    "Steady",
    "Synchronous",
]

ALGORITHMS: Final[Mapping[str, type[Algorithm]]]
HOMES: Final[Mapping[str, str]]
