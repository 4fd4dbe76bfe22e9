"""Time to read Keras variables into a flat vector and to write them back.

    KERAS_BACKEND=tensorflow python benchmarks/keras_flat_variables.py

Times are ratios to np.copyto of a vector of that size, timed in turn with them, so that drift of the machine
cancels. Other work on the machine only lengthens times: the minimum is the speed of the code, the median its
speed on this machine. The table also has `get_weights` and `set_weights`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy read it
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import keras
import numpy as np

from nnlo_common import FlatVector
from nnlo_keras._flat_variables import flat_variables
from nnlo_keras._variable_layout import layout_of

# Total size and number of variables: few large ones, and many of which most are small.
CASES = [(1_000_000, 10), (1_000_000, 160), (25_000_000, 10), (25_000_000, 160)]


def main() -> None:
    """Measure every case and print a row for each way."""
    options = _options()
    print(
        f"keras {keras.__version__} on {keras.backend.backend()}; {options.rounds} rounds at 1M, a fifth of "
        f"them at 25M; load {os.getloadavg()[0]:.2f} before\n"
        f"{'numbers':>10} {'variables':>9} {'way':<12} {'min us':>8} {'ratio':>6} {'median us':>9} "
        f"{'ratio':>6} {'quartiles us':>19}"
    )
    for total, count in CASES[: 2 if options.quick else None]:
        _measure(total, count, options.rounds if total < 5_000_000 else max(3, options.rounds // 5))
    print(f"load {os.getloadavg()[0]:.2f} after")


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--quick", action="store_true", help="1M only")
    return options.parse_args()


def _variables(total: int, count: int) -> list[keras.Variable]:
    """Make variables of half to one and a half times the mean size."""
    generator = np.random.default_rng(1)
    sizes = [int(total / count * factor) for factor in generator.uniform(0.5, 1.5, count)]
    return [keras.Variable(generator.standard_normal(size, np.float32)) for size in sizes]


def _measure(total: int, count: int, rounds: int) -> None:
    variables = _variables(total, count)
    flat = FlatVector(layout_of(variables))
    way = flat_variables(variables, flat)
    other, apart = FlatVector(flat.layout), flat.vector.copy()
    other.vector[:] = 1  # touch the pages, so that the system allocates them
    arrays = other.views()
    ways: dict[str, Callable[[], object]] = {
        "np.copyto": lambda: np.copyto(other.vector, apart),
        "read": way.read,
        "write": way.write,
        "get_weights": lambda: [variable.numpy() for variable in variables],
        "set_weights": lambda: [v.assign(np.array(a)) for v, a in zip(variables, arrays, strict=True)],
    }
    if way.aliased:
        # `set_weights` copies into the same memory; `read` and `write` only check.
        ways["+ copyto"] = lambda: (np.copyto(flat.vector, apart), way.write())
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            start_s = time.perf_counter()
            call()
            times_s[name].append(time.perf_counter() - start_s)
    for name, times in times_s.items():
        print(_row(total, count, name, times, times_s["np.copyto"]), flush=True)


def _row(total: int, count: int, name: str, times_s: list[float], copies_s: list[float]) -> str:
    low, _, high = quantiles(times_s, n=4)
    return (
        f"{total:10} {count:9} {name:<12} {1e6 * min(times_s):8.0f} {min(times_s) / min(copies_s):6.2f} "
        f"{1e6 * median(times_s):9.0f} {median(times_s) / median(copies_s):6.2f} "
        f"{f'[{1e6 * low:.0f}, {1e6 * high:.0f}]':>19}"
    )


if __name__ == "__main__":
    main()
