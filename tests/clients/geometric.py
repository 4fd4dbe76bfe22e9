"""A graph network of PyTorch Geometric: whole graphs, many in a batch."""

from __future__ import annotations

import warnings

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt

warnings.filterwarnings("ignore", module="torch_geometric")


def graphs(count: int, seed: int) -> list[Data]:
    """Paths and stars of 5 to 12 nodes, whose features are the number of neighbours, and noise."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        nodes = int(torch.randint(5, 13, (1,), generator=generator))
        first, last = torch.arange(nodes - 1), torch.arange(1, nodes)
        if number % 2:
            first = torch.zeros(nodes - 1, dtype=torch.long)
        edges = torch.cat([torch.stack([first, last]), torch.stack([last, first])], dim=1)
        neighbours = torch.bincount(edges[0], minlength=nodes).float().unsqueeze(1)
        features = torch.cat([neighbours, torch.randn(nodes, 3, generator=generator)], dim=1)
        made.append(Data(x=features, edge_index=edges, y=torch.tensor([number % 2])))
    return made


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 16), GCNConv(16, 16)
        self.last = torch.nn.Linear(16, 2)

    def forward(self, batch):
        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return self.last(global_mean_pool(x, batch.batch))


def main() -> None:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = graphs(400, 0)
    if WRAPPED:
        optimizer = nt.Downpour(optimizer)
        loader = DataLoader(data, batch_size=16, sampler=nt.ShardSampler(data))
    else:
        loader = DataLoader(data, batch_size=16, shuffle=True)

    for _epoch in range(20):
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), batch.y).backward()
            optimizer.step()

    if WRAPPED:
        optimizer.close()
    with torch.no_grad():
        (batch,) = DataLoader(graphs(400, 1), batch_size=400)
        outputs = model(batch)
    accuracy = (outputs.argmax(dim=1) == batch.y).float().mean()
    loss = torch.nn.functional.cross_entropy(outputs, batch.y)
    finish(optimizer, accuracy=accuracy, loss=loss)


if __name__ == "__main__":
    main()
