"""Core of nnlo, free of frameworks: flat vectors, algorithms, protocol, cluster, training, search.

Importing it loads numpy and the standard library only; a training loads MPI.
"""

from __future__ import annotations

from nnlo_common.algorithms import GainReport, _found
from nnlo_common.algorithms._found import *  # noqa: F403 - whatever algorithms there are
from nnlo_common.algorithms._lars import LARS
from nnlo_common.algorithms._noise_scale import NoiseEstimate, NoiseScale
from nnlo_common.algorithms._optimizers import SGD, Adadelta, Adagrad, Adam, LookaheadMomentum, RMSprop
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import (
    ConfigurationError,
    DivergedError,
    DroppedError,
    MissingExtraError,
    NNLOError,
    PeerLostError,
    ProtocolError,
    StartupError,
)
from nnlo_common.base._flat_vector import FlatVector, Frame, Layout, Segment
from nnlo_common.base._public_names import say_public_module
from nnlo_common.cluster._connecting import guard_launched
from nnlo_common.cluster._topology import Arrangement, Topology
from nnlo_common.inference import (
    ROC,
    Confusion,
    Figure,
    Prediction,
    PredictOptions,
    ResultOptions,
    TileOptions,
    TileResult,
)
from nnlo_common.training._early_stopping import EarlyStopping, Target
from nnlo_common.training._participant import Participant
from nnlo_common.training._rank_parts import TrainingReport

__version__ = "0.1.0"

__all__ = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "Arrangement",
    "ConfigurationError",
    "Confusion",
    "DivergedError",
    "DroppedError",
    "EarlyStopping",
    "Figure",
    "FlatVector",
    "Frame",
    "GainReport",
    "LARS",
    "Layout",
    "LookaheadMomentum",
    "MissingExtraError",
    "NNLOError",
    "NoiseEstimate",
    "NoiseScale",
    "Participant",
    "PeerLostError",
    "PredictOptions",
    "Prediction",
    "ProtocolError",
    "RMSprop",
    "ROC",
    "ResultOptions",
    "SGD",
    "Segment",
    "StartupError",
    "Target",
    "TileOptions",
    "TileResult",
    "Topology",
    "TrainingReport",
    "VectorOptimizer",
]
__all__ += _found.__all__
__all__[:] = sorted(__all__, key=str.lower)

say_public_module(__name__, __all__)
guard_launched()
