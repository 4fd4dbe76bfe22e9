"""Joining of a torch model and optimizer to a training of several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch

from nnlo_common.plugin import GroupRank, RankWorld, Session, Trained
from nnlo_torch._batch_statistics import FlatBuffers
from nnlo_torch._center import TorchCenterOptimizer
from nnlo_torch._device_sums import DeviceSum
from nnlo_torch._flat_model import FlatModel, named_parameters
from nnlo_torch._group_gradients import GroupGradients
from nnlo_torch._group_options import GroupOptions
from nnlo_torch._joint import JointTraining
from nnlo_torch._modules import buffers_of
from nnlo_torch._stretches import GroupOptimizer

__all__ = ["join_team", "kinds_of"]


def kinds_of(optimizer: torch.optim.Optimizer, local: torch.optim.Optimizer | None) -> str:
    """Return the optimizers' class names, which must agree between ranks and with checkpoints."""
    return ", local ".join(type(one).__name__ for one in (optimizer, local) if one is not None)


def join_team(
    joint: JointTraining, world: RankWorld, modules: Sequence[torch.nn.Module]
) -> tuple[Session, FlatModel]:
    """Tie the models to flat vectors and join the training (collective).

    Args:
        joint: the training; its wrappers have the same options.
        world: the ranks.
        modules: owners of the parameters, for their buffers and names.
    """
    members, algorithm = joint.members, joint.members[0].algorithm
    optimizers = [one.optimizer for one in members]
    runs = algorithm.optimizer_runs_at(joint.ranks.servers)
    flat_model = FlatModel(
        [pair for one in optimizers for pair in named_parameters(one, modules)],
        gradients=joint.ranks.grouped or runs != "worker",
        lag=0 if runs == "worker" else algorithm.lag,
        catches=len(members) == 1,
    )
    buffers = buffers_of(modules)
    steps = optimizers if runs == "worker" else [one.local for one in members]

    def center_optimizer(place: slice) -> TorchCenterOptimizer | GroupOptimizer:
        if not joint.ranks.servers:
            return GroupOptimizer(optimizers[0], flat_model)
        joint.centers[:] = [TorchCenterOptimizer(optimizers, flat_model, place)]
        return joint.centers[0]

    turn = weakref.ref(joint)  # which holds the session

    def local_step() -> None:
        training = turn()
        assert training is not None  # its wrapper makes the step
        one = steps[training.active]
        if one is not None:
            one.step()

    trained = Trained(
        model=flat_model,
        buffers=FlatBuffers(buffers, modules) if buffers else None,
        options=GroupOptions(*optimizers),
        center_optimizer=center_optimizer,
        local_step=local_step if any(one is not None for one in steps) else None,
    )
    optimizer = " and ".join(kinds_of(one.optimizer, one.local) for one in members)
    team = Session(algorithm, world, joint.ranks, trained, {"optimizer": optimizer})
    if len(members) == 1 and flat_model.all_are_blocks and not team.serves:
        team.sum_by(partial(DeviceSum, flat_model))
    if team.member.group is not None:
        joint.group_gradients = _group_gradients(joint, team.member.group, flat_model)
    if team.member.threads is not None:
        torch.set_num_threads(team.member.threads)
    return team, flat_model


def _group_gradients(joint: JointTraining, group: GroupRank, flat_model: FlatModel) -> GroupGradients:
    held = weakref.ref(joint)  # which holds the gradients

    def weight() -> float:
        training = held()
        assert training is not None  # its wrapper runs the loop
        samples = training.step_weights.gradient()
        set_by_user = (float(one.weight) for one in training.members if one.weight is not None)
        return next(set_by_user, samples)

    def samples() -> int:
        training = held()
        return 0 if training is None else training.samples

    return GroupGradients(group, flat_model, weight, samples)
