"""Metrics that the client scripts reach on any number of ranks."""

from __future__ import annotations

import json

__all__ = ["AIMS", "check", "last_line"]

#: For each script the metric, and what it must be at least, or at most.
AIMS = {
    "lightning_fit": ("accuracy", 0.95, None),
    "huggingface_bert": ("accuracy", 0.97, None),
    "accelerate_loop": ("accuracy", 0.95, None),
    "geometric": ("accuracy", 0.8, None),
    "geometric_nodes": ("accuracy", 0.7, None),
    "torch_digits": ("accuracy", 0.74, None),
    "torch_vae": ("bound", None, 290.0),
    "torch_adversarial": ("off_ring", None, 0.6),
    "torch_actor": ("reward", 0.85, None),
    "torch_waves": ("loss", None, 0.05),
}


def last_line(run):
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.strip().splitlines()[-1])


def check(script, found):
    name, least, most = AIMS[script]
    assert least is None or found[name] >= least, found
    assert most is None or found[name] <= most, found
