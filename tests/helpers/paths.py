"""The folders of the repository that tests look at."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BENCHMARKS", "DOCS", "EXAMPLES", "ONE_BACKEND", "PROGRAMS", "ROOT"]

ROOT = Path(__file__).parents[2]
BENCHMARKS, DOCS, EXAMPLES = ROOT / "benchmarks", ROOT / "docs", ROOT / "examples"
#: What tests start under mpiexec.
PROGRAMS = ROOT / "tests" / "programs"
#: On the search path of what tests start; see the module in it.
ONE_BACKEND = ROOT / "tests" / "helpers" / "one_backend"
