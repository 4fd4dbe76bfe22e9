"""Plan of a training: the facts that every rank brings, and the check that all bring the same.

Ranks that train another model, or by another rule, would wait for each other for ever or spoil the centre.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector
from nnlo_common.base._layout import Layout
from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.protocol import Moving

__all__ = ["TrainingPlan", "agree"]

# What is to be the same on all ranks, in the order in which it is compared; what is said of the first rank's.
_SAME = {
    "algorithm": "the algorithm is {}",
    "servers": "servers={}",
    "optimizer": "the optimizer is {}",
    "epochs": "epochs={}",
    "meetings": "{} take part",
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a rank brings along; equal on all ranks but for the numbers in the vectors.

    Attributes:
        algorithm: how workers and centre exchange.
        parameters: the model.
        gradient: where gradients are put.
        own_parameters: where a worker keeps its parameters if the model has others: a point ahead of them.
        given_sums: a gradient is the sum over all steps since the last contribution.
        servers: how many ranks share the serving of the centre.
        center_optimizer: makes what steps the given part of the centre; None where the algorithm knows.
        local_optimizer: what moves a worker's parameters; None where something else does.
        buffers: what is averaged and never goes through an optimizer, e.g. running statistics.
        moving: the layers whose statistics among them are moved by each batch.
        updates: how often each of these has moved them before.
        options: how many numbers describe an optimizer's options, where workers send them.
        optimizer: what kind of optimizer it is, where all ranks are to have the same.
        epochs: how many the training is to have, where that is known before.
        meetings: what else all ranks meet in, by name.
        stall_timeout_s: after how long a silent worker is given up; None: never.
        record: keep the order of all requests.
    """

    algorithm: Algorithm
    parameters: FlatVector
    gradient: FlatVector
    own_parameters: FlatVector | None = None
    given_sums: bool = False
    servers: int = 1
    center_optimizer: Callable[[slice], VectorOptimizer | None] = lambda place: None
    local_optimizer: VectorOptimizer | None = None
    buffers: FlatVector | None = None
    moving: Sequence[Moving] = ()
    updates: npt.NDArray[np.float64] | None = None
    options: int = 0
    optimizer: str = ""
    epochs: int = 0
    meetings: Sequence[str] = ()
    stall_timeout_s: float | None = None
    record: bool = False


def agree(world: RankWorld, plan: TrainingPlan) -> None:
    """Refuse, on all ranks alike, to train different models or algorithms together (collective).

    Raises:
        ConfigurationError: in what a rank differs from the first.
    """
    everyone = [json.loads(text) for text in world.gather_text(json.dumps(_facts(world, plan)))]
    for rank, other in enumerate(everyone):
        if problem := _difference(everyone[0], other):
            raise ConfigurationError(
                f"{problem}, on rank {rank} (host {other['host']}); give all {world.size} ranks the same "
                "script"
            )


def _facts(world: RankWorld, plan: TrainingPlan) -> dict[str, Any]:
    facts = {
        "host": world.host,
        "algorithm": plan.algorithm.describe(),
        "servers": plan.servers,
        "optimizer": plan.optimizer,
        "epochs": plan.epochs,
        "meetings": list(plan.meetings),
        "layout": plan.parameters.layout.to_json(),
        "buffers": None if plan.buffers is None else [plan.buffers.layout.to_json(), str(plan.moving)],
    }
    if world.rank < plan.servers > 1:  # each holds a part of one start
        facts["start"] = hashlib.blake2b(plan.parameters.vector.data, digest_size=8).hexdigest()
    return facts


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What is different on another rank; nothing if all is the same."""
    for name, said in _SAME.items():
        if other[name] != first[name]:
            return f"{said.format(first[name])} on rank 0 but {other[name]}"
    if other["layout"] != first["layout"]:
        difference = Layout.from_json(first["layout"]).difference(Layout.from_json(other["layout"]))
        return f"the model differs (here: rank 0, there: that rank): {difference}"
    if other["buffers"] != first["buffers"]:
        return "the model's buffers (running statistics and the like) differ from those on rank 0"
    if other.get("start") not in (None, first.get("start")):
        return (
            "the initial parameters, of which each server holds a part, are others than on rank 0 (seed "
            "all ranks alike before the model is made, or load the same file)"
        )
    return ""
