"""Names of the samplers; `_engines`, which needs Optuna, describes them."""

from __future__ import annotations

__all__ = ["IN_SEQUENCE", "SAMPLERS", "quoted_samplers"]

SAMPLERS = ("bayesian", "evolutionary", "random", "grid", "qmc", "tpe", "gp", "cmaes", "nsgaii")
#: Samplers that continue from their last choice, so that several ranks would choose the same.
IN_SEQUENCE = ("grid", "qmc", "cmaes")


def quoted_samplers() -> str:
    """Return the names, joined for a sentence.

    Example:
        >>> quoted_samplers().endswith('"cmaes" or "nsgaii"')
        True
    """
    *names, last = (f'"{name}"' for name in SAMPLERS)
    return f"{', '.join(names)} or {last}"
