"""Two networks against each other: one makes points on a ring, the other tells them from real ones.

With nnlo both are in one optimizer with two groups: a parameter without a gradient stays as it is.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt


def ring(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = 2 + 0.1 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def network(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 64), torch.nn.LeakyReLU(0.2),
        torch.nn.Linear(64, 64), torch.nn.LeakyReLU(0.2), torch.nn.Linear(64, outputs),
    )  # fmt: skip


def main() -> None:
    maker, judge = network(4, 2), network(2, 1)
    data = ring(2048, 0)
    options = {"lr": 1e-3, "betas": (0.5, 0.999)}
    if WRAPPED:
        both = [{"params": maker.parameters()}, {"params": judge.parameters()}]
        of_maker = of_judge = nt.Downpour(torch.optim.Adam(both, **options))
        loader = DataLoader(data, batch_size=64, sampler=nt.ShardSampler(data))
    else:
        of_maker, of_judge = (torch.optim.Adam(one.parameters(), **options) for one in (maker, judge))
        loader = DataLoader(data, batch_size=64, shuffle=True)

    for _epoch in range(40):
        for real in loader:
            made = maker(torch.randn(len(real), 4))
            maker.zero_grad()
            judge.zero_grad()
            told = torch.cat([judge(real), judge(made.detach())])
            true = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            functional.binary_cross_entropy_with_logits(told, true).backward()
            of_judge.step()

            made = judge(made)
            maker.zero_grad()
            judge.zero_grad()
            functional.binary_cross_entropy_with_logits(made, torch.ones_like(made)).backward()
            judge.zero_grad()
            of_maker.step()

    if WRAPPED:
        of_maker.close()
    with torch.no_grad():
        made = maker(torch.randn(2000, 4, generator=torch.Generator().manual_seed(9)))
    radius = made.norm(dim=1)
    finish(of_maker, off_ring=(radius - 2).abs().mean(), off_centre=made.mean(dim=0).norm())


if __name__ == "__main__":
    main()
