"""The framework-free heart of nnlo: flat vectors, algorithms, protocol, transports, topology.

Importing it loads numpy and the standard library only; MPI starts when a training does.
"""

from __future__ import annotations

from nnlo_common._errors import (
    ConfigurationError,
    DivergedError,
    MissingExtraError,
    NNLOError,
    PeerLostError,
    ProtocolError,
    StartupError,
)
from nnlo_common._flat import FlatVector, Frame
from nnlo_common._lars import LARS
from nnlo_common._layout import Layout, Segment
from nnlo_common._noise_scale import NoiseScale
from nnlo_common._optimizer import VectorOptimizer
from nnlo_common._optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    LookaheadMomentum,
    RMSprop,
)
from nnlo_common._participant import Participant
from nnlo_common._roles import Report
from nnlo_common._startup import guard_launched
from nnlo_common._stopping import EarlyStopping, Target
from nnlo_common._topology import Arrangement, Topology
from nnlo_common.algorithms import (
    AGN,
    EAMSGD,
    EASGD,
    GEM,
    DiLoCo,
    Downpour,
    DynSGD,
    LocalSGD,
    Synchronous,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AGN",
    "Arrangement",
    "ConfigurationError",
    "DiLoCo",
    "DivergedError",
    "Downpour",
    "DynSGD",
    "EAMSGD",
    "EarlyStopping",
    "EASGD",
    "FlatVector",
    "Frame",
    "GEM",
    "LARS",
    "Layout",
    "LocalSGD",
    "LookaheadMomentum",
    "MissingExtraError",
    "NNLOError",
    "NoiseScale",
    "Participant",
    "PeerLostError",
    "ProtocolError",
    "Report",
    "RMSprop",
    "Segment",
    "SGD",
    "StartupError",
    "Synchronous",
    "Target",
    "Topology",
    "VectorOptimizer",
]

guard_launched()
