"""Pictures of the documentation: where they are, how they look, and how a program is run to get one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
# Of Okabe and Ito: told apart by everybody.
COLOURS = ("#222222", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")


def run(ranks: int, program: str, *arguments: str) -> str:
    """Run a Python program of the repository on so many ranks, and return what it prints."""
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, program, *arguments]
    print(*command, flush=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def save(figure: go.Figure, name: str, height: int = 380, **layout: Any) -> None:
    """Write a figure as a picture of the documentation."""
    figure.update_layout(
        template="plotly_white",
        colorway=COLOURS,
        width=820,
        height=height,
        margin={"t": 40, "b": 60, "l": 70, "r": 20},
        **layout,
    )
    figure.write_image(PICTURES / name)
    print(PICTURES / name)
