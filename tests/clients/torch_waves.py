"""A recurrent network that continues sine waves; by Adam, as LBFGS, the usual choice, is refused."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt


def waves(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    start = 6.3 * torch.rand(count, 1, generator=generator)
    return (start + 0.4 * torch.arange(30)).sin()


class Continued(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = torch.nn.LSTMCell(1, 24), torch.nn.Linear(24, 1)

    def forward(self, x, more: int = 0):
        state, outputs = None, []
        for number in range(x.shape[1] + more):
            value = x[:, number, None] if number < x.shape[1] else outputs[-1]
            state = self.cell(value, state)
            outputs.append(self.last(state[0]))
        return torch.cat(outputs, dim=1)


def main() -> None:
    model = Continued()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = waves(512, 0)
    if WRAPPED:
        optimizer = nt.Synchronous(optimizer)
        loader = DataLoader(data, batch_size=16, sampler=nt.ShardSampler(data))
    else:
        loader = DataLoader(data, batch_size=16, shuffle=True)

    for _epoch in range(12):
        for batch in loader:
            optimizer.zero_grad()
            functional.mse_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
            optimizer.step()

    if WRAPPED:
        optimizer.close()
    held_out = waves(128, 1)
    with torch.no_grad():
        told = model(held_out[:, :20], more=9)
    finish(optimizer, loss=functional.mse_loss(told, held_out[:, 1:]))


if __name__ == "__main__":
    main()
