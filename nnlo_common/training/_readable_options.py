"""Options of an algorithm as its user wrote them, for people; ranks compare the whole line."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass

import nnlo_common.algorithms

__all__ = ["readable"]

_CALL = re.compile(r"\b([A-Z]\w*)\(([^()]*)\)")


def readable(line: str) -> str:
    """Return a line with the options of its algorithms that are not their defaults.

    Downpour's n_push, n_fetch and schedule become `every`, where they are what `every` stands for.

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
    kind = getattr(nnlo_common.algorithms, call[1], None)
    options = dict(one.partition("=")[::2] for one in call[2].split(", ")) if call[2] else {}
    if not isinstance(kind, type) or not is_dataclass(kind):
        return call[0]
    defaults = {one.name: repr(one.default) for one in fields(kind) if one.default is not MISSING}
    if not options.keys() <= {one.name for one in fields(kind)}:
        return call[0]
    every = options.get("n_push")
    if every is not None and options.get("n_fetch") == every and _is_every(options):
        options = {"every": every} | {k: v for k, v in options.items() if k not in _OF_EVERY}
        defaults["every"] = "1"
    told = [f"{name}={value}" for name, value in options.items() if defaults.get(name) != value]
    return f"{call[1]}({', '.join(told)})"


_OF_EVERY = ("n_push", "n_fetch", "schedule")


def _is_every(options: dict[str, str]) -> bool:
    return options["n_push"] == "1" or options.get("schedule") == "'aligned'"
