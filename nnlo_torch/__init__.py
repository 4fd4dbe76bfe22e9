"""Distributed training in an ordinary PyTorch loop: wrap the optimizer, shard the sampler.

optimizer = nnlo_torch.Downpour(torch.optim.Adam(model.parameters(), lr=1e-3))
loader = DataLoader(dataset, batch_size=100, sampler=nnlo_torch.ShardSampler(dataset))

Started with `python` it is the plain loop; with `mpiexec -n 3` one rank serves and two ranks train.
"""

from __future__ import annotations

from importlib import import_module

from nnlo_common import EarlyStopping, MissingExtraError, Target

try:
    import_module("torch")
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise MissingExtraError("nnlo_torch", "torch", "torch") from None

from nnlo_common.plugin import epochs_per_rank, optimize, say_public_module, scale_lr
from nnlo_torch import _wrappers
from nnlo_torch._advise import advise
from nnlo_torch._checkpoint import Checkpoint
from nnlo_torch._ema import EMA
from nnlo_torch._gpu import device
from nnlo_torch._hdf5 import Batches, H5Batches, H5Dataset, Samples, nested
from nnlo_torch._inference import infer_tiles, predict
from nnlo_torch._iterable import ShardIterable
from nnlo_torch._lars import LARC, LARS
from nnlo_torch._progress_lines import Progress
from nnlo_torch._report import Report
from nnlo_torch._sampler import ShardSampler
from nnlo_torch._wrapper import Wrapper
from nnlo_torch._wrappers import *  # noqa: F403 - a wrapper for each algorithm

__all__ = [
    "Batches",
    "Checkpoint",
    "EMA",
    "EarlyStopping",
    "H5Batches",
    "H5Dataset",
    "LARC",
    "LARS",
    "Progress",
    "Report",
    "Samples",
    "ShardIterable",
    "ShardSampler",
    "Target",
    "Wrapper",
    "advise",
    "device",
    "epochs_per_rank",
    "infer_tiles",
    "nested",
    "optimize",
    "predict",
    "scale_lr",
]
__all__ += _wrappers.__all__
__all__[:] = sorted(__all__)

say_public_module(__name__, __all__)
