"""A torch model's place among several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nnlo_common.plugin import Algorithm, RankWorld, Session
from nnlo_torch._center import TorchCenterOptimizer
from nnlo_torch._flat_buffers import FlatBuffers
from nnlo_torch._flat_model import FlatModel, named_parameters
from nnlo_torch._group_options import GroupOptions
from nnlo_torch._modules import buffers_of

__all__ = ["join_team", "kinds_of"]


def kinds_of(optimizer: torch.optim.Optimizer, local: torch.optim.Optimizer | None) -> str:
    """Return what ranks, and checkpoints, are to agree on of the optimizers."""
    return ", local ".join(type(one).__name__ for one in (optimizer, local) if one is not None)


def join_team(
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    world: RankWorld,
    *,
    servers: int,
    modules: Sequence[torch.nn.Module],
    local: torch.optim.Optimizer | None,
    stall_timeout_s: float | None,
) -> tuple[Session, FlatModel]:
    """Tie the model to flat vectors and take up this rank's part (collective).

    Args:
        optimizer: the user's.
        algorithm: how it is exchanged.
        world: the ranks.
        servers: how many of them serve.
        modules: what the parameters belong to, for the buffers and the names.
        local: what moves a worker's weights, where the user's optimizer does not.
        stall_timeout_s: after how long a silent worker is given up; None: never.
    """
    named = named_parameters(optimizer, modules)
    flat_model = FlatModel(named, gradients=algorithm.optimizer_runs != "worker", lag=algorithm.lag)
    buffers = buffers_of(modules)
    steps = optimizer if algorithm.optimizer_runs == "worker" else local
    team = Session(
        algorithm,
        world,
        model=flat_model,
        buffers=FlatBuffers(buffers, modules) if buffers else None,
        options=GroupOptions(optimizer),
        center_optimizer=lambda place: TorchCenterOptimizer(optimizer, flat_model, place),
        local_step=None if steps is None else steps.step,
        optimizer=kinds_of(optimizer, local),
        servers=servers,
        stall_timeout_s=stall_timeout_s,
    )
    if team.member.threads is not None:
        torch.set_num_threads(team.member.threads)
    return team, flat_model
