"""Numbers with a suitable unit."""

from __future__ import annotations

__all__ = ["bandwidth", "seconds", "signed_seconds"]


def seconds(value: float) -> str:
    """Return a duration with three digits at most.

    Example:
        >>> seconds(1.2345e-06), seconds(0.0456), seconds(7200)
        ('1.2 µs', '46 ms', '7200 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{_short(value / size)} {unit}"
    return f"{_short(value / 1e-6)} µs"


def signed_seconds(value: float) -> str:
    """Return a duration that always shows its sign."""
    return seconds(value) if value < 0 else "+" + seconds(value)


def bandwidth(value: float) -> str:
    """Return a rate in bytes per second.

    Example:
        >>> bandwidth(3.21e9), bandwidth(45e6)
        ('3.2 GB/s', '45 MB/s')
    """
    return f"{_short(value / 1e9)} GB/s" if value >= 1e9 else f"{_short(value / 1e6)} MB/s"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"
