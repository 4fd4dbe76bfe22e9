"""Cases, command line and clock of `overhead_torch.py` and `overhead_keras.py`."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

# Hidden layers between 784 inputs and 10 classes, by the approximate number of parameters.
SIZES = {"90k": (100, 100), "1.8M": (1000, 1000), "11M": (2900, 2900)}
BATCH = 100
HEAD = f"{'size':>5} {'every':>5} {'lag':>3} {'plain':>9} {'trained':>9} {'ratio [min, max]':>22} claim"


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    size: str
    every: int
    lag: int
    target: float | None  # the claimed ratio, if any

    def row(self, plain_s: list[float], trained_s: list[float]) -> tuple[str, bool]:
        """Return the row for the seconds per batch of each round, and whether it misses the claim."""
        ratios = [one / other for one, other in zip(plain_s, trained_s, strict=True)]
        missed = self.target is not None and median(ratios) < self.target
        verdict = "" if self.target is None else f"{self.target:.2f} {'missed' if missed else 'met'}"
        row = (
            f"{self.size:>5} {self.every:5} {self.lag:3} {BATCH / median(plain_s):7.0f}/s "
            f"{BATCH / median(trained_s):7.0f}/s {median(ratios):8.3f} "
            f"[{min(ratios):.3f}, {max(ratios):.3f}]  {verdict}"
        )
        return row, missed


def cases(options: argparse.Namespace, targets: Mapping[int, float]) -> list[Case]:
    """Return the chosen cases; the claims are for those with overlap."""
    return [
        Case(size, every, lag, targets.get(every) if lag else None)
        for size in options.sizes
        for every in options.every
        for lag in options.lags
    ]


def options(text: str | None) -> argparse.Namespace:
    """Parse the command line; `text` is the docstring of the script."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--every", nargs="+", type=int, default=[1, 10])
    parser.add_argument("--lags", nargs="+", type=int, default=[1])
    parser.add_argument("--wire", default="float32", help="how numbers travel; overlap: overlap=True")
    parser.add_argument("--optimizer", choices=["SGD", "Adam"], default="SGD", help="SGD: with momentum")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each side runs in a round")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--assert", dest="check", action="store_true", help="fail if a claim is missed")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.seconds = 5, 0.2
    return chosen


@contextmanager
def watched(parts: list[tuple[Any, str, str]], spent: Counter[str]) -> Iterator[None]:
    """Time methods, each without the timed methods it calls, by shadowing them for a while."""
    for owner, method, name in parts:
        setattr(owner, method, _timed(getattr(owner, method), name, spent))
    try:
        yield
    finally:
        for owner, method, _ in parts:
            delattr(owner, method)


def _timed(method: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        inside, start_s = sum(spent.values()), time.perf_counter()
        result = method(*args, **options)
        spent[name] += time.perf_counter() - start_s - (sum(spent.values()) - inside)
        return result

    return timed
