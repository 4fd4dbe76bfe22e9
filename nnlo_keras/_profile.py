"""Profilers of Keras's back ends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from nnlo_common.plugin import begin_torch_profile

__all__ = ["begin_profile"]


def begin_profile(folder: Path) -> Callable[[], object]:
    """Begin to profile with the profiler of the back end, and return what ends that.

    Args:
        folder: gets a trace.json from torch, and files for TensorBoard from TensorFlow and JAX.
    """
    backend = keras.backend.backend()
    framework: Any = importlib.import_module(backend)
    if backend == "torch":
        return begin_torch_profile(framework, folder)
    if backend == "tensorflow":
        framework.profiler.experimental.start(str(folder))
        stop: Callable[[], object] = framework.profiler.experimental.stop
        return stop
    framework.profiler.start_trace(str(folder))
    end: Callable[[], object] = framework.profiler.stop_trace
    return end
