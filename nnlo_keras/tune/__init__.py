"""Keras-tuner over blocks of ranks; needs keras-tuner and Optuna."""

from __future__ import annotations

from nnlo_common.plugin import say_public_module
from nnlo_keras.tune._oracle import SamplerOracle
from nnlo_keras.tune._tuner import MPITuner as MPITuner

__all__ = ["SamplerOracle"]

say_public_module(__name__, __all__)
say_public_module(__name__, ["MPITuner"], "nnlo_keras")
