"""Warnings without one of our source lines, which mean nothing to a user."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["warn"]

#: Warnings already shown: each text is shown once, unless filters say otherwise.
_SHOWN: dict[str | tuple[Any, ...], int] = {}


def warn(text: str) -> None:
    """Warn of a problem that does not stop the training.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warn("the disk is full")
        >>> str(seen[0].message), seen[0].filename
        ('the disk is full', 'nnlo')
    """
    warnings.warn_explicit(text, RuntimeWarning, "nnlo", 0, registry=_SHOWN)
