"""Prints how many trainings agree with the equations, and the largest differences.

`python -m tests.equations.report` compares with PyTorch, and with Keras on the back end that KERAS_BACKEND
names; `--all` takes the long trainings of Keras, too, and a word only those whose description has it
("torch:", "GEM").
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable

os.environ.setdefault("KERAS_BACKEND", "torch")

from tests.equations.compared import Case, compare, tally
from tests.equations.matrix import of_keras, of_torch


def compared(cases: Iterable[Case], run: Callable[[Case], object], *, keras: bool) -> list[str]:
    """Compare all; return the names of those that differ."""
    failed = []
    for case in cases:
        try:
            compare(case, run(case), keras=keras)  # type: ignore[arg-type]
        except AssertionError as difference:
            print("differs:", difference)
            failed.append(str(case))
        except Exception as error:
            print(f"fails: {case}\n  {traceback.format_exception_only(error)[0].strip()}")
            failed.append(str(case))
    return failed


def report(title: str, cases: list[Case], run: Callable[[Case], object], *, keras: bool) -> bool:
    """Print the table of a package; return whether all agree."""
    tally.clear()
    start_s = time.monotonic()
    failed = compared(cases, run, keras=keras)
    print(f"\n{title}: {len(cases)} trainings in {time.monotonic() - start_s:.0f} s, {len(failed)} differ")
    for wrapper, (count, worst) in sorted(tally.items()):
        differing = sum(name.startswith(f"{wrapper}(") for name in failed)
        print(f"  {wrapper:12} {count:4} trainings  worst {worst:.1e}  {differing} differ")
    return not failed


def main(words: list[str]) -> int:
    """Report on both packages."""
    whole, words = "--all" in words, [word for word in words if word != "--all"]

    def wanted(cases: Iterable[Case]) -> list[Case]:
        return [case for case in cases if all(word in f"{title}: {case}" for word in words)]

    fine = True
    title = "torch"
    if cases := wanted(of_torch()):
        import torch

        from tests.equations import torch_runs

        torch.set_num_threads(1)
        fine &= report("nnlo_torch", cases, torch_runs.run, keras=False)
    backend = os.environ["KERAS_BACKEND"]
    title = "keras"
    if cases := wanted(case for case, long in of_keras(backend) if whole or not long):
        from tests.equations import keras_runs

        fine &= report(f"nnlo_keras on {backend}", cases, keras_runs.run, keras=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
