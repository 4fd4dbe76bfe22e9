"""Warm starts: programs of tests begin with their framework already imported.

Importing a framework is most of the life of a test's rank: three seconds of CPU for PyTorch or Keras, four
with TensorFlow, half a second for nnlo. A nursery imports them once for each process of the tests, and forks
for each program, plain or a rank under mpiexec. What the launcher starts is `stand_in.py`: it passes its
streams, its environment and signals to the fork, and ends as that does. The frameworks are imported, not
used, so that a program begins without threads or state of theirs; and without nnlo where it does not name it.
`make test` starts programs warm; `make test-all` starts them cold, as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

__all__ = ["warm_start"]

FOLDER = Path(__file__).parent
_IMPORTS = re.compile(r"^\s*(?:import|from) (?:nnlo_)?(torch|keras)\b", re.MULTILINE)
_IMPORTS_NNLO = re.compile(r"^\s*(?:import|from) nnlo_", re.MULTILINE)
#: What the frameworks read when they are imported.
_READ_AT_IMPORT = (
    *("CUDA_VISIBLE_DEVICES", "KERAS_BACKEND", "KERAS_HOME", "OMP_NUM_THREADS", "PYTHONPATH"),
    *("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS"),
)


def warm_start(
    program: str | Path, env: Mapping[str, str], framework: Literal["torch", "keras"] | None
) -> list[str | Path]:
    """Return the command that starts a program warm, up to its arguments; or cold where it cannot.

    Args:
        program: a Python file, or `-m`.
        env: the whole environment of the program.
        framework: what it runs on; None: what the file imports.
    """
    cold: list[str | Path] = [sys.executable, program]
    if os.environ.get("NNLO_TEST_STARTS") != "warm" or not hasattr(os, "pidfd_open"):
        return cold
    if framework is not None:
        used, nnlo = frozenset({framework}), True
    elif str(program).endswith(".py"):
        used, nnlo = _imports_of(program)
    else:
        return cold
    backends = ("torch",) if "torch" in used else ("torch", "tensorflow")
    if not (used or nnlo) or ("keras" in used and env.get("KERAS_BACKEND") not in backends):
        return cold
    read = tuple((name, env[name]) for name in _READ_AT_IMPORT if name in env)
    return [sys.executable, "-I", "-S", FOLDER / "stand_in.py", _nursery(used, nnlo, read), program]


@functools.cache
def _imports_of(program: str | Path) -> tuple[frozenset[str], bool]:
    text = Path(program).read_text()
    return frozenset(_IMPORTS.findall(text)), bool(_IMPORTS_NNLO.search(text))


@functools.cache
def _nursery(frameworks: frozenset[str], nnlo: bool, read: tuple[tuple[str, str], ...]) -> Path:
    """Start a nursery, and return its socket; it ends when this process does."""
    folder = tempfile.TemporaryDirectory(prefix="nnlo-")
    address = Path(folder.name, "nursery")
    process = subprocess.Popen(
        [sys.executable, FOLDER / "nursery.py", address, *sorted(frameworks), *(["nnlo"] if nnlo else [])],
        env={**os.environ, **dict(read)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def end() -> None:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.stdout.close()
        folder.cleanup()

    atexit.register(end)
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the nursery of programs did not start: status {process.wait(10)}")
    return address
