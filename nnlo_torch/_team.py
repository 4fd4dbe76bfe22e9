"""Joining of a torch model and optimizer to a training of several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nnlo_common import ConfigurationError, FlatVector
from nnlo_common.plugin import (
    GradientSum,
    GroupRank,
    Moves,
    Moving,
    RankWorld,
    Session,
    Trained,
    Vector,
    laid_out,
)
from nnlo_torch._center import TorchCenterOptimizer
from nnlo_torch._compat import BatchNorm
from nnlo_torch._flat_model import FlatModel, Storage, buffers_of, named_parameters
from nnlo_torch._group_gradients import GroupGradients
from nnlo_torch._joint import JointTraining
from nnlo_torch._schedules import GroupOptions
from nnlo_torch._stretches import GroupOptimizer

__all__ = ["DeviceSum", "FlatBuffers", "join_team", "kinds_of"]

# -- flat vector of a torch model's buffers, and how often batch normalisation has updated them --------
# A layer's `num_batches_tracked` counts the forward passes that updated its statistics. Together with
# `momentum` it gives the share of the initial values that is left (`nnlo_common.protocol.Moving`).
# Instance normalisation keeps no count: its statistics are averaged like any other buffer.


class FlatBuffers:
    """Flat vector of a model's float buffers, copied there and back when an epoch ends.

    Attributes:
        flat: the vector.
        layers: positions of the statistics of all layers that count their updates.

    Args:
        named: names and buffers.
        modules: the modules that own these buffers.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], modules: Sequence[torch.nn.Module] = ()
    ) -> None:
        self._buffers = [buffer for _, buffer in named]
        # Rounding float64 statistics to float32 does no harm: they are averages of noise.
        layout = laid_out((name, buffer.shape, "float32", id(buffer)) for name, buffer in named)
        self.flat = FlatVector(layout)
        self._views = [torch.from_numpy(view) for view in self.flat.views()]
        places = {id(buffer): one.place for buffer, one in zip(self._buffers, layout.segments, strict=True)}
        found = _counting(modules, places)
        self._layers = list(found)
        self.layers = [Moving(*found[layer]) for layer in self._layers]
        self.gather()
        self.mark()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the buffers into the vector."""
        for buffer, view in zip(self._buffers, self._views, strict=True):
            view.copy_(buffer)

    @torch.no_grad()
    def scatter(self) -> None:
        """Copy the vector into the buffers."""
        for buffer, view in zip(self._buffers, self._views, strict=True):
            buffer.copy_(view)

    def moves(self) -> Moves:
        """Return how often each layer has updated its statistics."""
        total, decay = self._totals(), self._decays()
        # A momentum schedule may already be in the next epoch. Too fast a decay does less harm.
        other = np.isnan(decay) != np.isnan(self._decay)
        decay = np.where(other, 0.0, np.minimum(decay, self._decay))
        return Moves(total - self._marked, decay, total)

    @torch.no_grad()
    def mark(self, totals: npt.NDArray[np.float64] | None = None) -> None:
        """Count from here; set the layers' counts to `totals` first, if given."""
        if totals is not None:
            for layer, total in zip(self._layers, totals, strict=True):
                _count(layer).fill_(int(total))
        self._marked, self._decay = self._totals(), self._decays()

    def set_since(self, since: npt.NDArray[np.float64]) -> None:
        """Resume with this many updates since the last `mark`."""
        self._marked, self._decay = self._totals() - since, self._decays()

    def _totals(self) -> npt.NDArray[np.float64]:
        return np.array([float(_count(layer)) for layer in self._layers], np.float64)

    def _decays(self) -> npt.NDArray[np.float64]:
        momenta = [layer.momentum for layer in self._layers]
        return np.array([np.nan if one is None else 1.0 - one for one in momenta], np.float64)


def _counting(modules: Sequence[torch.nn.Module], places: dict[int, slice]) -> dict[Any, tuple[slice, slice]]:
    """Return the layers that count updates of their statistics, and the positions of mean and variance."""
    found = {}
    for layer in dict.fromkeys(part for module in modules for part in module.modules()):
        if isinstance(layer, BatchNorm) and layer.num_batches_tracked is not None:
            mean, variance = (places.get(id(one)) for one in (layer.running_mean, layer.running_var))
            if mean is not None and variance is not None:
                found[layer] = mean, variance
    return found


def _count(layer: Any) -> torch.Tensor:
    count: torch.Tensor = layer.num_batches_tracked  # `_counting` selects only layers that have one
    return count


# -- sums of gradients on their device: between two exchanges no gradient comes to the host ------------
# With `every` above 1 a worker adds up its gradients. To add 100 million numbers on the host takes 100 ms
# a step, and their copy from a GPU 15 ms; the sum on a GPU takes less than one.


class DeviceSum(GradientSum):
    """A running sum of a model's gradients on their device, with the bits that the host would make.

    Its state is that of the sum on the host, so a training may resume with the other one.

    Args:
        flat_model: the model, whose gradients no longer come to the host by themselves.
    """

    def __init__(self, flat_model: FlatModel) -> None:
        super().__init__(0)
        self._model = flat_model
        self.total = flat_model.like_gradient()
        self._blocks = [(block, torch.zeros_like(block.gradient)) for block in flat_model.blocks]
        flat_model.fetches = False

    def add(self, gradient: Vector) -> None:
        """Add the gradients on the device; only the marks come from the host's vector."""
        marks = self._model.marks
        self.total[marks] = gradient[marks] + (self.total[marks] if self.count else 0)
        for block, total in self._blocks:
            if self.count:
                total.add_(block.gradient)
            else:
                total.copy_(block.gradient)
        self.count += 1

    def take(self) -> Vector:
        """Return the sum, valid until the next `add`, and restart from zero."""
        self._fetch()
        return super().take()

    def state(self) -> dict[str, Any]:
        """Return what the sum on the host would."""
        self._fetch()
        return super().state() | {"type": GradientSum.__name__}

    def check(self, state: object) -> None:
        """Refuse a state that `load` cannot use; change nothing."""
        same = isinstance(state, Mapping) and state.get("type") == GradientSum.__name__
        super().check(
            {**state, "type": type(self).__name__} if isinstance(state, Mapping) and same else state
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        super().load(state)
        for block, total in self._blocks:
            total.copy_(torch.from_numpy(self.total[block.start : block.start + total.numel()]))

    def _fetch(self) -> None:
        """Copy the sum to the host, but for the marks, which are there."""
        if not self.count:
            return
        there = self.total[self._model.marks].copy()
        for block, total in self._blocks:
            torch.from_numpy(self.total[block.start : block.start + total.numel()]).copy_(total)
        self.total[self._model.marks] = there


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
        catches=len(members) == 1 and not joint.ranks.overlap,
        others=[pair for module in modules for pair in module.named_parameters()],
    )
    if joint.ranks.overlap:
        _check_for_overlap(flat_model)
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
    team.let_spares_train()

    def sum_here() -> None:
        if len(members) == 1 and flat_model.all_are_blocks and not team.serves:
            team.sum_by(partial(DeviceSum, flat_model))

    sum_here()
    team.when_taking_over(sum_here)
    team.uncounted = joint.step_weights.fresh
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
        return 0 if training is None else training.step_weights.received

    return GroupGradients(group, flat_model, weight, samples)


def _check_for_overlap(flat_model: FlatModel) -> None:
    """Refuse parameters whose gradients must be copied before they can leave."""
    for name, tensor, storage in zip(flat_model.names, flat_model.tensors, flat_model.storages, strict=True):
        if storage is not Storage.VIEW:
            raise ConfigurationError(
                f"overlap=True is possible only with dense float32 parameters on the CPU, but {name} is "
                f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}; leave overlap out, or use "
                "lag=1"
            )
