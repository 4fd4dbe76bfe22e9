"""Plan of a training: the facts of each rank, and the check that all ranks agree.

Ranks with different models or algorithms would deadlock or corrupt the centre.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._found import ALGORITHMS
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector, Layout
from nnlo_common.base._limited_formats import table_of
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.protocol import Moving
from nnlo_common.training._rank_options import RANK_OPTIONS, RankOptions

__all__ = ["TrainingPlan", "agree", "readable"]

# -- options of an algorithm as its user wrote them, for people; ranks compare the whole line -----------

_CALL = re.compile(r"\b([A-Z]\w*)\(([^()]*)\)")


def readable(line: str) -> str:
    """Return a line with the options of its algorithms that are not their defaults.

    Options that another stands for are told as that: Downpour's n_push, n_fetch and schedule as `every`.

    Args:
        line: has `Algorithm.describe()`, or the like.

    Example:
        >>> readable("Downpour(lag=0, n_push=4, n_fetch=4, schedule='aligned', warm_start=0), servers=1")
        'Downpour(every=4), servers=1'
        >>> readable("Downpour(lag=1, n_push=4, n_fetch=2, schedule='dean')")
        'Downpour(lag=1, n_push=4, n_fetch=2)'
    """
    return _CALL.sub(_shortened, line)


def _shortened(call: re.Match[str]) -> str:
    kind = ALGORITHMS.get(call[1].lower())
    options = dict(one.partition("=")[::2] for one in call[2].split(", ")) if call[2] else {}
    if kind is None or kind.__name__ != call[1] or not options.keys() <= {one.name for one in fields(kind)}:
        return call[0]
    return f"{call[1]}({', '.join(f'{name}={value}' for name, value in kind.shortened(options).items())})"


# -- plan of a training: the facts of each rank, and the check that all ranks agree ---------------------

#: What a framework may add to the facts that must be equal on all ranks, and how errors state it.
SAME: Mapping[str, str] = {
    "optimizer": "the optimizer is {}",
    "epochs": "epochs={}",
    "meetings": "{} take part",
}
# Facts that must be equal on all ranks, in the order of comparison, and how errors state rank 0's value.
_SAME = {
    "algorithm": "the algorithm is {}",
    **{name: f"{name}={{!r}}" for name in RANK_OPTIONS},
    **SAME,
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Plan of one rank; equal on all ranks except for the numbers in the vectors.

    Attributes:
        algorithm: how workers and centre exchange.
        parameters: the model's parameters.
        gradient: the vector that holds gradients.
        own_parameters: a worker's parameters if the model holds a point ahead of them.
        given_sums: a gradient is the sum over all steps since the last contribution.
        ranks: what the user says of the ranks.
        center_optimizer: makes the optimizer of the given part of the centre; returns None if the algorithm
            steps it by itself.
        local_optimizer: moves a worker's parameters; None if something else does.
        alone_optimizer: moves the parameters without a server; None if something else does.
        buffers: averaged and never stepped by an optimizer, e.g. running statistics.
        moving: the places of statistics in `buffers` that each batch moves.
        updates: earlier updates of each of these.
        options: the number of float32 numbers in an optimizer's options, if workers send them.
        same: what else must be equal on all ranks, of `SAME`.
        record: keep the order of all requests.
    """

    algorithm: Algorithm
    parameters: FlatVector
    gradient: FlatVector
    own_parameters: FlatVector | None = None
    given_sums: bool = False
    ranks: RankOptions = field(default_factory=RankOptions)
    center_optimizer: Callable[[slice], VectorOptimizer | None] = lambda place: None
    local_optimizer: VectorOptimizer | None = None
    alone_optimizer: VectorOptimizer | None = None
    buffers: FlatVector | None = None
    moving: Sequence[Moving] = ()
    updates: npt.NDArray[np.float64] | None = None
    options: int = 0
    same: Mapping[str, Any] = field(default_factory=dict)
    record: bool = False


def agree(world: RankWorld, plan: TrainingPlan) -> None:
    """Check that all ranks have the same model and algorithm (collective).

    Raises:
        ConfigurationError: a rank differs from rank 0; raised on all ranks.
        ProtocolError: what a rank has sent is malformed.
    """
    mine = _facts(world, plan)
    names = mine.keys() - {"start"}  # some servers have it
    everyone = [
        table_of(text, names, f"the plan of rank {rank}")
        for rank, text in enumerate(world.gather_text(json.dumps(mine)))
    ]
    for rank, other in enumerate(everyone):
        if problem := _difference(everyone[0], other):
            raise ConfigurationError(
                f"{problem}, on rank {rank} (host {other['host']}); run the same script on all {world.size} "
                "ranks"
            )


def _facts(world: RankWorld, plan: TrainingPlan) -> dict[str, Any]:
    facts = {
        "host": world.host,
        "algorithm": plan.algorithm.describe(),
        **{name: getattr(plan.ranks, name) for name in RANK_OPTIONS},
        **{name: plan.same.get(name) for name in SAME},
        "layout": plan.parameters.layout.to_json(),
        "buffers": None if plan.buffers is None else [plan.buffers.layout.to_json(), str(plan.moving)],
    }
    if world.rank < plan.ranks.servers > 1:  # their shards must come from the same initial parameters
        facts["start"] = hashlib.blake2b(plan.parameters.vector.data, digest_size=8).hexdigest()
    return facts


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how another rank differs; empty if it does not."""
    for name, said in _SAME.items():
        if other[name] != first[name]:
            shown = repr if "!r" in said else str
            return readable(f"{said.format(first[name])} on rank 0 but {shown(other[name])}")
    if other["layout"] != first["layout"]:
        difference = Layout.from_json(first["layout"]).difference(Layout.from_json(other["layout"]))
        return f"the model differs (here: rank 0, there: that rank): {difference}"
    if other["buffers"] != first["buffers"]:
        return "the model's buffers (running statistics and the like) differ from those on rank 0"
    if other.get("start") not in (None, first.get("start")):
        return (
            "the initial parameters differ from rank 0's, but each server holds a part of them (use one seed "
            "on all ranks before making the model, or load the same file)"
        )
    return ""
