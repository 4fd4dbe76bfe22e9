"""A variational autoencoder of images; the loss is summed over a batch."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from examples.fashion_data import load
from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt


class Autoencoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU())
        self.mean, self.spread = torch.nn.Linear(128, 8), torch.nn.Linear(128, 8)
        self.decoder = torch.nn.Sequential(
            torch.nn.Linear(8, 128), torch.nn.ReLU(), torch.nn.Linear(128, 784)
        )

    def forward(self, x):
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        noise = torch.randn_like(mean) if self.training else 0.0
        return self.decoder(mean + noise * (0.5 * spread).exp()), mean, spread


def bound(outputs, x):
    """Return the evidence bound of a batch, with its sign changed."""
    pictures, mean, spread = outputs
    divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum()
    return functional.binary_cross_entropy_with_logits(pictures, x, reduction="sum") + divergence


def main() -> None:
    data = load()
    x, x_test = torch.from_numpy(data.x_train), torch.from_numpy(data.x_test)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if WRAPPED:
        optimizer = nt.Downpour(optimizer)
        loader = DataLoader(x, batch_size=32, sampler=nt.ShardSampler(x))
    else:
        loader = DataLoader(x, batch_size=32, shuffle=True)

    for _epoch in range(10):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            bound(model(batch), batch).backward()
            optimizer.step()

    if WRAPPED:
        optimizer.close()
    model.eval()
    with torch.no_grad():
        finish(optimizer, bound=bound(model(x_test), x_test) / len(x_test))


if __name__ == "__main__":
    main()
