"""Time of importing nnlo beside its frameworks alone, and what the lightest install brings.

python benchmarks/import_times.py               # every framework that is installed
python benchmarks/import_times.py --times 9
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

#: What is imported, beside what must be there anyway.
PAIRS = [("nnlo_common", "numpy"), ("nnlo_torch", "torch"), ("nnlo_keras", "keras")]
TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def seconds(modules: str) -> float:
    """Return how long a fresh interpreter imports these."""
    env = os.environ | {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch")}
    command = [sys.executable, "-c", TIMED.format(modules)]
    return float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def compared(alone: str, ours: str, times: int) -> tuple[float, float]:
    """Return the medians without and with ours, of starts in turn; the first of each fills the caches."""
    both = [(seconds(alone), seconds(f"{alone}, {ours}")) for _ in range(times + 1)][1:]
    return statistics.median(one for one, _ in both), statistics.median(one for _, one in both)


def brought() -> Iterator[tuple[str, float]]:
    """Yield the packages of `pip install nnlo` and their sizes in MB."""
    needed = [line for line in importlib.metadata.requires("nnlo") or () if "extra ==" not in line]
    for line in needed:
        name = line.split(">")[0].strip()
        files = importlib.metadata.files(name) or ()
        paths = [file.locate() for file in files]
        yield name, sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--times", type=int, default=5)
    times = options.parse_args().times
    for ours, alone in PAIRS:
        if importlib.util.find_spec(alone) is None:
            continue
        before, after = compared(alone, ours, times)
        print(f"{alone:8} {before:6.3f} s   and {ours:12} {after:6.3f} s   {after - before:+.3f} s")
    for name, size in brought():
        print(f"pip install nnlo brings {name:14} {size:5.1f} MB")


if __name__ == "__main__":
    main()
