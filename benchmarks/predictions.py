"""Tables of predictions beside what was measured, for the benchmarks of the simulator."""

from __future__ import annotations

import os

from nnlo_common.base._cores import usable_cores

#: How far off a prediction of a pace may be.
MOST = 0.15


def begin_table(*columns: str) -> None:
    """Print the conditions, and the head of a table."""
    print(f"{usable_cores()} cores; load {os.getloadavg()[0]:.2f} before")
    print(f"| {' | '.join(columns)} |")
    print(f"|{'---|' * len(columns)}", flush=True)


def end_table(missed: int, most: float) -> None:
    """Print how many predictions are off by more than a share."""
    print(f"load {os.getloadavg()[0]:.2f} after; off by more than {100 * most:.0f} %: {missed}")
