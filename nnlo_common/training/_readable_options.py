"""Options of an algorithm as its user wrote them, for people; ranks compare the whole line."""

from __future__ import annotations

import re
from dataclasses import fields

from nnlo_common.algorithms._found import ALGORITHMS

__all__ = ["readable"]

_CALL = re.compile(r"\b([A-Z]\w*)\(([^()]*)\)")


def readable(line: str) -> str:
    """Return a line with the options of its algorithms that are not their defaults.

    Options that another stands for are told as that: Downpour's n_push, n_fetch and schedule as `every`.

    Args:
        line: has `Algorithm.describe()`, or the like.

    Example:
        >>> readable("Downpour(lag=0, n_push=4, n_fetch=4, schedule='aligned', warm_start=0), servers=1")
        'Downpour(every=4), servers=1'
        >>> readable("Downpour(lag=1, n_push=4, n_fetch=2, schedule='dean')")
        'Downpour(lag=1, n_push=4, n_fetch=2)'
    """
    return _CALL.sub(_shortened, line)


def _shortened(call: re.Match[str]) -> str:
    kind = ALGORITHMS.get(call[1].lower())
    options = dict(one.partition("=")[::2] for one in call[2].split(", ")) if call[2] else {}
    if kind is None or kind.__name__ != call[1] or not options.keys() <= {one.name for one in fields(kind)}:
        return call[0]
    return f"{call[1]}({', '.join(f'{name}={value}' for name, value in kind.shortened(options).items())})"
