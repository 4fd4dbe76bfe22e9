"""Data that a script gives to `fit`: warnings if all workers have the same, or every rank splits it."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common.plugin import Session, all_same, as_values, mark_of, speaks, warn
from nnlo_keras._compat import arguments_of_fit, parts_of_dataset
from nnlo_keras._hdf5 import Batches

__all__ = ["VALIDATE", "warn_of_data"]

#: The lines to write instead of `validation_split=`.
VALIDATE = (
    "set samples apart before you share the others out: "
    "fit(*nnlo_keras.shard(x[:n], y[:n]), validation_data=(x[n:], y[n:]), ...)"
)


def warn_of_data(team: Session) -> None:
    """Warn, once and on one rank, of data that all workers have, and of a split on each rank (collective).

    Args:
        team: this rank's session; it has joined and not started.
    """
    given = arguments_of_fit()
    mark = 0 if team.serves else _mark(given.get("x"), given.get("y"))
    seen = team.agree(as_values(mark), weight=0.0 if team.serves else 1.0)
    if not speaks(team.member.role):
        return
    workers = team.share[1]
    if workers > 1 and all_same(seen):
        warn(
            f"fit() was given the same data on all {workers} workers, so each trains on all samples, and an "
            f"epoch has each {workers} times; give each worker its share: fit(*nnlo_keras.shard(x, y), ...)"
        )
    validates = "a server" if team.member.servers else "the first rank"
    if split := given.get("validation_split"):
        warn(
            f"validation_split={split}: every rank sets its own samples apart, but only {validates} "
            f"validates, with its own; {VALIDATE}"
        )


def _mark(*data: Any) -> int:
    """Return a number that is the same for the same data; 0: its contents cannot be seen."""
    if any(isinstance(one, Batches) for one in data):
        return 0  # it shares itself out
    return mark_of(*data, parts=parts_of_dataset, on_host=_on_host)


def _on_host(rows: Any) -> Any:
    return keras.ops.convert_to_numpy(rows) if keras.ops.is_tensor(rows) else rows
