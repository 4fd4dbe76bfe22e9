"""Checks of what a checkpoint holds, made before any of it is used.

Checksums show only that a file is as it was written. Somebody else may have written it, or a training whose
weights had already become NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nnlo_common.base._arguments import is_whole
from nnlo_common.training.checkpoint._identity import IDENTITY
from nnlo_common.training.checkpoint._manifest import DamagedError

__all__ = [
    "check_entries",
    "check_facts",
    "check_place_in_data",
    "check_team",
    "check_weights",
    "checked_count",
]

#: Epochs, and batches of an epoch; a billionth one is never reached.
_MOST = 10**9
_BLOCK = 1 << 22  # numbers that are checked at once
#: Entries of a session's state, by name: counts, with the numbers that they never reach; and weights.
_COUNTS = {"epochs": _MOST, "steps": 2**53, "samples": 2**53, "clock": 2**53}
_WEIGHTS = ("parameters", "center")
_LEASE = 3  # numbers in a lease: epoch, start, stop


def checked_count(what: str, value: object, most: int = _MOST) -> int:
    """Return a count from a checkpoint.

    Raises:
        DamagedError: it is no whole number from 0, or is as large as `most`.

    Example:
        >>> checked_count("the epoch", -5)
        Traceback (most recent call last):
        nnlo_common.training.checkpoint._manifest.DamagedError: the epoch is -5, not a count
    """
    if not is_whole(value, 0) or value >= most:
        raise DamagedError(f"{what} is {value!r:.60}, not a count")
    return int(value)


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse the facts of a checkpoint that no training has written.

    Raises:
        DamagedError: one is missing or of the wrong type.
    """
    for name in ("servers", "workers", "epoch"):
        checked_count(f"{name} in its facts", facts.get(name))
    checked_count("group_size in its facts", facts.get("group_size", 1))
    for name in IDENTITY[:2]:
        if not isinstance(facts.get(name), str):
            raise DamagedError(f"{name} in its facts is {facts.get(name)!r:.60}, not a text")


def check_entries(tree: object, names: Iterable[str]) -> None:
    """Refuse a state without these entries.

    Raises:
        DamagedError: one is missing.
    """
    missing = sorted(set(names) - set(tree)) if isinstance(tree, Mapping) else ["everything"]
    if missing:
        raise DamagedError(f"it has no {', '.join(missing)}")


def check_place_in_data(state: Mapping[str, Any]) -> None:
    """Refuse a position in the samples, of a sampler or a sequence, that none of them returns.

    Raises:
        DamagedError: it is none.
    """
    check_entries(state, ("epoch", "taken"))
    for name in ("epoch", "taken"):
        checked_count(f"{name} of its samples", state[name])
    lease = state.get("lease")
    leases = [*([] if lease is None else [lease]), *(state.get("leases") or [])]
    for one in leases:
        if not isinstance(one, list | tuple) or len(one) != _LEASE:
            raise DamagedError(f"it leases {one!r:.60}")
        for number in one:
            checked_count("a number of a lease", number, 2**53)


def check_team(state: Any) -> None:
    """Refuse the state of a session with impossible counts, or with weights that are NaN.

    Raises:
        DamagedError: there is one.
    """
    waiting = [state]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            for name, value in one.items():
                if name in _COUNTS and isinstance(value, int):
                    checked_count(f"{name} of the training", value, _COUNTS[name])
                elif name in _WEIGHTS and isinstance(value, np.ndarray):
                    check_weights("its weights", [value])
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def check_weights(what: str, arrays: Iterable[Any]) -> None:
    """Refuse weights that are NaN: a training would never recover from them.

    Raises:
        DamagedError: one is.
    """
    for array in arrays:
        flat = np.asarray(array).reshape(-1)
        if flat.dtype.kind not in "fc":
            continue
        for start in range(0, flat.size, _BLOCK):
            if np.isnan(flat[start : start + _BLOCK]).any():
                raise DamagedError(f"{what} are NaN")
