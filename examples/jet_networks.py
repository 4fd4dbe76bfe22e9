"""JEDI-net in PyTorch, for the jet examples."""

from __future__ import annotations

from itertools import pairwise

import torch

CLASSES = 5


def mlp(*sizes: int) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU(inplace=True)]
    return torch.nn.Sequential(*layers[:-1])


class JEDINet(torch.nn.Module):
    """An interaction network: it computes the effect of every particle on every other (arXiv 1908.05318).

    f_R takes each ordered pair of particles, f_O each particle with the mean of its pairs, f_C the mean of
    the particles. So it has 33 821 parameters for any number of particles. (The paper sums, and in its
    largest network, of 33 625 parameters, f_C takes all particles one by one.)

    The paper gathers pairs by matrices with a column for each, 22350 of them for 150 particles. They are not
    needed: the first layer of f_R is linear, so it is a sum of one term for the receiver and one for the
    sender, and one broadcast addition makes all pairs.
    """

    def __init__(self, features: int = 16, effects: int = 8, found: int = 32) -> None:
        super().__init__()
        self.receiver = torch.nn.Linear(features, 32)
        self.sender = torch.nn.Linear(features, 32, bias=False)
        self.relation = torch.nn.Sequential(
            torch.nn.ReLU(inplace=True), mlp(32, 16, effects), torch.nn.ReLU(inplace=True)
        )
        self.particle = torch.nn.Sequential(
            mlp(features + effects, 128, 64, found), torch.nn.ReLU(inplace=True)
        )
        self.jet = mlp(found, 160, 80, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes for (jets, particles, features)."""
        pairs = self.relation(self.receiver(x)[:, :, None] + self.sender(x)[:, None])
        others = 1 - torch.eye(x.shape[1], device=x.device)  # no pair of a particle with itself
        effects = torch.einsum("brse,rs->bre", pairs, others) / x.shape[1]
        return self.jet(self.particle(torch.cat([x, effects], dim=-1)).mean(dim=1))
