"""Numbers with their noun."""

from __future__ import annotations

__all__ = ["plural"]


def plural(number: int, noun: str) -> str:
    """Return a number and a noun in the form that goes with it.

    Example:
        >>> plural(1, "worker"), plural(3, "worker"), plural(2, "batch")
        ('1 worker', '3 workers', '2 batches')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'x', 'tch', 'sh')) else 's'}"
