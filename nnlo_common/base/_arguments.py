"""Whole numbers that people pass."""

from __future__ import annotations

import numpy as np

from nnlo_common.base._errors import ConfigurationError

__all__ = ["whole_number"]


def whole_number(name: str, value: object, least: int) -> int:
    """Return `value` as an int, or refuse what is not a whole number of at least `least`.

    NumPy's integers are taken; True is not taken for 1, nor 2.0 for 2.

    Example:
        >>> whole_number("workers", 2.5, 1)
        Traceback (most recent call last):
        nnlo_common.ConfigurationError: workers=2.5: must be a whole number of at least 1
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least:
        return int(value)
    raise ConfigurationError(f"{name}={value!r}: must be a whole number of at least {least}")
