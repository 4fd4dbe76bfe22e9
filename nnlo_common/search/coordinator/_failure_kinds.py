"""Kinds of failure: tells out-of-memory and divergence from all other errors."""

from __future__ import annotations

from nnlo_common.base._errors import DivergedError

__all__ = ["kind_of"]

# Names of torch's and tensorflow's errors, because no framework is imported here.
_OUT_OF_MEMORY = {"OutOfMemoryError", "ResourceExhaustedError"}
# Texts in JAX's generic error, and in torch's error for host memory.
_SAID = ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")


def kind_of(error: BaseException) -> str:
    """Return "out of memory", "diverged" or "error".

    Example:
        >>> kind_of(MemoryError()), kind_of(RuntimeError("CUDA error: out of memory")), kind_of(ValueError())
        ('out of memory', 'out of memory', 'error')
    """
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY & {kind.__name__ for kind in type(error).__mro__}:
        return "out of memory"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID):
        return "out of memory"
    return "diverged" if isinstance(error, DivergedError) else "error"
