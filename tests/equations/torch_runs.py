"""The trainings with nnlo_torch, in which ranks are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import nnlo_torch as nt
from nnlo_common.testing import MemoryCluster, MemoryWorld
from tests.equations.compared import RATES, Case, Recording
from tests.equations.network import SHAPES, Array, Batch, cut, initial
from tests.equations.turns import Turns

__all__ = ["Network", "gradient", "run"]


class Network(torch.nn.Module):
    """The network of `network.py`."""

    def __init__(self) -> None:
        super().__init__()
        values = cut(initial())
        self.pieces = torch.nn.ParameterList([torch.tensor(value) for value in values])
        assert [tuple(piece.shape) for piece in self.pieces] == list(SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, bias, second, offset = self.pieces
        return torch.tanh(x @ first + bias) @ second + offset

    def weights(self) -> Array:
        """Return a copy of all parameters as one vector."""
        with torch.no_grad():
            return torch.cat([piece.flatten() for piece in self.pieces]).numpy().astype(np.float64)


def loss_of(model: Network, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(batch.x), torch.from_numpy(batch.y)


def gradient(batch: Batch) -> Array:
    """Return PyTorch's gradient at the initial weights."""
    model = Network()
    loss_of(model, tensors(batch)).backward()
    return torch.cat([piece.grad.flatten() for piece in model.pieces]).numpy().astype(np.float64)


def optimizer_of(name: str, model: Network) -> torch.optim.Optimizer:
    rate, momentum = RATES[name]
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=name == "nesterov")


def run(case: Case) -> Recording:
    """Train, and return what was seen."""
    turns = Turns(case.servers, case.workers, case.pattern, case.epochs)
    seen: list[list[Array]] = [[] for _ in range(case.workers)]
    after: list[list[Array]] = [[] for _ in range(case.workers)]

    def program(world: MemoryWorld) -> tuple[Any, list[Array], Array]:
        with turns.taken(world):
            return train(case, world, seen, after)

    with turns.watched(), MemoryCluster(case.servers + case.workers) as cluster:
        layout, epochs, final = cluster.run(program, timeout_s=40)[0]
    return Recording(
        order=turns.order,
        seen=seen,
        after=after,
        commits=turns.centre(layout),
        epochs=epochs,
        final=[final],
    )


def train(
    case: Case, world: MemoryWorld, seen: list[list[Array]], after: list[list[Array]]
) -> tuple[Any, list[Array], Array]:
    """Make one rank's part: the plain loop."""
    model, options = Network(), dict(case.options)
    if case.wrapper == "Steady":
        options["passes"] = "fixed"  # as many steps as there are batches
    if isinstance(options.get("local"), str):
        options["local"] = optimizer_of(options["local"], model)
    optimizer = getattr(nt, case.wrapper)(
        optimizer_of(case.optimizer, model), model=model, servers=case.servers, world=world, **options
    )
    worker = world.rank - case.servers
    if case.weights and worker >= 0:
        optimizer.weight = case.weights[worker]
    batches = [tensors(batch) for batch in case.data(worker)] if worker >= 0 else []
    epochs = []
    for _ in range(case.epochs):
        for batch in optimizer.epoch(batches):
            seen[worker].append(model.weights())
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            after[worker].append(model.weights())
        epochs.append(model.weights())
    optimizer.close()
    return optimizer._team.model.parameters.layout, epochs, model.weights()
