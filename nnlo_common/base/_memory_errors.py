"""Errors that say that memory is used up, whichever library raises them."""

from __future__ import annotations

import errno

__all__ = ["is_out_of_memory"]

# Names of torch's and tensorflow's errors, because no framework is imported here.
_OUT_OF_MEMORY = {"OutOfMemoryError", "ResourceExhaustedError"}
# Texts in JAX's generic error, and in torch's error for host memory.
_SAID = ("RESOURCE_EXHAUSTED", "out of memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or the one that it replaced, says that memory is used up.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        (True, True)
        >>> is_out_of_memory(ValueError())
        False
    """
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY & {kind.__name__ for kind in type(error).__mro__}:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID):
        return True
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return earlier is not None and is_out_of_memory(earlier)
