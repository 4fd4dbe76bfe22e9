"""Warnings without the line of ours that has noticed it, which says nothing to a user."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["warn"]

#: Which were shown: each text is shown once, if filters do not say otherwise.
_SHOWN: dict[str | tuple[Any, ...], int] = {}


def warn(text: str) -> None:
    """Warn of what a training goes on in spite of.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warn("the disk is full")
        >>> str(seen[0].message), seen[0].filename
        ('the disk is full', 'nnlo')
    """
    warnings.warn_explicit(text, RuntimeWarning, "nnlo", 0, registry=_SHOWN)
