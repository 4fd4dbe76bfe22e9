"""Joining of a torch model and optimizer to a training of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nnlo_common.plugin import Algorithm, RankWorld, Session
from nnlo_torch._batch_statistics import FlatBuffers
from nnlo_torch._center import TorchCenterOptimizer
from nnlo_torch._flat_model import FlatModel, named_parameters
from nnlo_torch._group_options import GroupOptions
from nnlo_torch._modules import buffers_of

__all__ = ["join_team", "kinds_of"]


def kinds_of(optimizer: torch.optim.Optimizer, local: torch.optim.Optimizer | None) -> str:
    """Return the optimizers' class names, which must agree between ranks and with checkpoints."""
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
    """Tie the model to flat vectors and join the training (collective).

    Args:
        optimizer: the user's optimizer.
        algorithm: the algorithm that exchanges it.
        world: the ranks.
        servers: the number of servers among them.
        modules: owners of the parameters, for their buffers and names.
        local: the optimizer for local steps, if the user's optimizer runs on the centre.
        stall_timeout_s: seconds of silence after which a worker is killed or the job aborts; None: never.
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
