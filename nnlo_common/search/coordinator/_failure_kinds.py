"""Kinds of failure: tells out-of-memory and divergence from all other errors."""

from __future__ import annotations

from nnlo_common.base._errors import DivergedError, is_out_of_memory

__all__ = ["kind_of"]


def kind_of(error: BaseException) -> str:
    """Return "out of memory", "diverged" or "error".

    Example:
        >>> kind_of(MemoryError()), kind_of(RuntimeError("CUDA error: out of memory")), kind_of(ValueError())
        ('out of memory', 'out of memory', 'error')
    """
    if is_out_of_memory(error):
        return "out of memory"
    return "diverged" if isinstance(error, DivergedError) else "error"
