"""Checks of numeric arguments and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

from nnlo_common.base._errors import ConfigurationError

__all__ = ["function_given", "is_number", "is_whole", "seconds_from", "whole_in", "whole_number"]

_MOST_DIGITS = 300  # Python refuses to read 4,301


def is_whole(value: object, least: float) -> TypeGuard[int]:
    """Return whether `value` is a whole number of at least `least`; NumPy's are, True and 2.0 are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a real number; NumPy scalars are, True is not."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def whole_number(name: str, value: object, least: int) -> int:
    """Return `value` as an int; refuse anything but a whole number of at least `least`.

    Example:
        >>> whole_number("workers", 2.5, 1)
        Traceback (most recent call last):
        nnlo_common.ConfigurationError: workers=2.5: must be a whole number of at least 1
    """
    if is_whole(value, least):
        return int(value)
    raise ConfigurationError(f"{name}={value!r}: must be a whole number of at least {least}")


def whole_in(text: str) -> int | None:
    """Return the whole number that a text of digits means; None: it is no such text, or has too many digits.

    Example:
        >>> whole_in("12"), whole_in("-1"), whole_in("9" * 5000)
        (12, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def function_given(name: str, value: Callable[..., Any] | None, *, may_miss: bool = False) -> None:
    """Refuse what cannot be called, such as the result of a function that was called by mistake.

    Args:
        name: the argument.
        value: what was given.
        may_miss: whether None stands for no function.

    Example:
        >>> function_given("loss", 5)
        Traceback (most recent call last):
        nnlo_common.ConfigurationError: loss=5 is not a function; give the function itself, without calling it
    """
    if not (callable(value) or (may_miss and value is None)):
        raise ConfigurationError(
            f"{name}={value!r:.60} is not a function; give the function itself, without calling it"
        )


def seconds_from(env: Mapping[str, str], name: str, default: float) -> float:
    """Return the seconds in an environment variable.

    Args:
        env: the environment variables.
        name: the variable.
        default: what it is where the variable is missing or empty.

    Raises:
        ConfigurationError: it is no positive number.

    Example:
        >>> seconds_from({"NNLO_START_LIMIT_S": "600"}, "NNLO_START_LIMIT_S", 300)
        600.0
    """
    text = env.get(name, "").strip() or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{name}={text!r} must be a number of seconds above 0, e.g. {name}=600")
    return seconds
