"""Names of samplers and the modules that make them, without Optuna; a new one is a line here and a module.

"bayesian"       GP where it works best, else TPE; see `BayesianSampler`
"evolutionary"   a steady-state genetic algorithm; see `EvolutionarySampler`. With several objectives
                 "nsgaii".
"random"         uniform
"grid"           each combination once, in any order; for whole numbers, choices and floats with a step
"qmc"            a Sobol sequence: covers the space evenly; choices are random
"tpe"            tree-structured Parzen estimators; any space
"gp"             a Gaussian process; smooth functions of few parameters
"cmaes"          CMA-ES: moves a normal distribution; needs many trials; numbers only, the rest is random
"nsgaii"         NSGA-II, with a population small enough to get beyond its first generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["IN_SEQUENCE", "SAMPLERS", "Wanted", "quoted_samplers"]

_HERE = "nnlo_common.search.samplers"

#: The modules, whose `make` takes a `Wanted` and returns the sampler.
SAMPLERS: Mapping[str, str] = {
    "bayesian": f"{_HERE}._bayesian",
    "evolutionary": f"{_HERE}._evolutionary",
    **dict.fromkeys(("random", "grid", "qmc", "tpe", "gp", "cmaes", "nsgaii"), f"{_HERE}._engines"),
}
#: Samplers that continue from their last choice, so that several ranks would choose the same.
IN_SEQUENCE = ("grid", "qmc", "cmaes")


class Wanted(NamedTuple):
    """A sampler that is asked for.

    Attributes:
        name: one of `SAMPLERS`.
        seed: seeds its random numbers.
        n_trials: the number of trials of the search.
        several: whether the study has several objectives.
    """

    name: str
    seed: int
    n_trials: int
    several: bool


def quoted_samplers() -> str:
    """Return the names, joined for a sentence.

    Example:
        >>> quoted_samplers().endswith('"cmaes" or "nsgaii"')
        True
    """
    *names, last = (f'"{name}"' for name in SAMPLERS)
    return f"{', '.join(names)} or {last}"
