"""Keras-tuner over blocks of ranks; needs keras-tuner and Optuna."""

from __future__ import annotations

from nnlo_keras.tune._oracle import SamplerOracle
from nnlo_keras.tune._tuner import MPITuner

__all__ = ["MPITuner", "SamplerOracle"]
