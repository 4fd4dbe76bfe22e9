"""Distributed training in an ordinary Keras `fit`: wrap the optimizer, add a callback, shard the data.

model.compile(optimizer=nnlo_keras.Downpour(keras.optimizers.Adam(1e-3)), loss=...)
model.fit(*nnlo_keras.shard(x, y), callbacks=[nnlo_keras.Distribute()])

Started with `python` it is the plain `fit`; with `mpiexec -n 3` one rank serves and two ranks train.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nnlo_common import MissingExtraError
from nnlo_keras._back_end import told_too_late, unknown_back_end, without_back_end

try:
    _keras = import_module("keras")
except ModuleNotFoundError as missing:
    if missing.name == "keras":
        raise MissingExtraError("nnlo_keras", "keras", "keras") from None
    if (problem := without_back_end(missing.name)) is not None:
        raise problem from None
    raise
except ValueError:
    if (problem := unknown_back_end()) is not None:
        raise problem from None
    raise

from nnlo_common.plugin import epochs_per_rank, optimize, say_public_module, scale_lr, warn
from nnlo_keras import _wrappers
from nnlo_keras._advise import advise
from nnlo_keras._callbacks import (
    Broadcast,
    Checkpoint,
    MetricAverage,
    Progress,
    Pruning,
    Report,
    WarmUp,
)
from nnlo_keras._distribute import Distribute
from nnlo_keras._gpu import use_gpu
from nnlo_keras._hdf5 import Batches, H5Sequence
from nnlo_keras._inference import infer_tiles, predict
from nnlo_keras._lars import LARC, LARS
from nnlo_keras._shard import shard
from nnlo_keras._wrapper import Wrapper
from nnlo_keras._wrappers import *  # noqa: F403 - a wrapper for each algorithm

if TYPE_CHECKING:
    from nnlo_keras.tune import MPITuner as MPITuner

__all__ = [
    "Batches",
    "Broadcast",
    "Checkpoint",
    "Distribute",
    "H5Sequence",
    "LARC",
    "LARS",
    "MPITuner",
    "MetricAverage",
    "Progress",
    "Pruning",
    "Report",
    "WarmUp",
    "Wrapper",
    "advise",
    "epochs_per_rank",
    "infer_tiles",
    "optimize",
    "predict",
    "scale_lr",
    "shard",
    "use_gpu",
]
__all__ += _wrappers.__all__
__all__[:] = sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import MPITuner on first access: nothing else needs keras-tuner."""
    if name != "MPITuner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from nnlo_keras.tune import MPITuner
    except ImportError as error:
        package = {"keras_tuner": "keras-tuner", "optuna": "optuna"}.get(getattr(error, "name", None) or "")
        if package is None:
            raise
        raise MissingExtraError(name, package, "tune") from None
    return MPITuner


def __dir__() -> list[str]:
    """List what is public, and not what this module imports for itself."""
    return sorted(__all__)


say_public_module(__name__, __all__)
if late := told_too_late(_keras.backend.backend()):
    warn(late)
if find_spec("keras_tuner") is None or find_spec("optuna") is None:
    del __all__[__all__.index("MPITuner")]  # so that `from nnlo_keras import *` works without them
