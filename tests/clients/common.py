"""Parts shared by the client scripts: what they are called with, and the line that they end with.

A script is called `python SCRIPT plain` for the loop of its framework alone, and otherwise with `python` or
`mpiexec -n N python` for the same loop with nnlo. Its last line is JSON: the metrics that are compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nnlo_common.plugin import launched

__all__ = ["WRAPPED", "blobs", "finish", "first", "run_cases"]

WRAPPED = "plain" not in sys.argv[1:]

torch.set_num_threads(1)
torch.manual_seed(0)


def finish(speaks: bool | torch.optim.Optimizer, **metrics: float) -> None:
    """Print the last line, on the rank that has the centre.

    Args:
        speaks: whether this rank prints; or the optimizer, whose wrapper knows.
        metrics: what is compared.
    """
    if isinstance(speaks, torch.optim.Optimizer):
        speaks = getattr(speaks, "role", "alone") in ("alone", "server 0")
    if speaks:
        print(json.dumps({name: round(float(value), 6) for name, value in metrics.items()}), flush=True)


def first() -> bool:
    """Return whether this rank is the only one or the first of all, which alone speaks after a search."""
    world = launched()
    return world is None or world.rank == 0


def blobs(samples: int = 1024, features: int = 8, classes: int = 4, seed: int = 0):
    """Return samples around one centre for each class, as inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(samples) % classes
    noise = torch.randn(samples, features, generator=generator)
    return centres[labels] + 0.8 * noise, labels


def run_cases(cases: Mapping[str, Callable[[Path], tuple[dict[str, Any], Any]]]) -> None:
    """Run the cases that the first argument names, and print this rank's account of each.

    Args:
        cases: by name; each gets a new folder, the same on all ranks.
    """
    for name in sys.argv[1].split(","):
        world, own = launched(), tempfile.mkdtemp()
        folder = Path(own if world is None else world.gather_text(own)[0])
        account, seen = cases[name](folder)
        print("account " + json.dumps({"case": name, **account, "own": seen}, sort_keys=True), flush=True)
