"""A graph network on the nodes of one graph: batches of nodes, each with its neighbours.

`NodeLoader` is what PyTorch Geometric's `NeighborLoader` is made of, which needs compiled packages to draw
the neighbours; here a few lines of Python take them all.
"""

from __future__ import annotations

import warnings

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import BaseSampler, SamplerOutput
from torch_geometric.utils import k_hop_subgraph

from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt

warnings.filterwarnings("ignore", module="torch_geometric")

NODES, CLASSES, HOPS = 600, 3, 2


def graph() -> Data:
    """Nodes of three groups, mostly joined within a group, with features that tell little of it."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(NODES) % CLASSES
    first = torch.randint(NODES, (8 * NODES,), generator=generator)
    other = torch.randint(NODES, (8 * NODES,), generator=generator)
    joined = (group[first] == group[other]) | (torch.rand(8 * NODES, generator=generator) < 0.1)
    edges = torch.stack([first[joined], other[joined]])
    features = 0.5 * torch.nn.functional.one_hot(group, CLASSES) + torch.randn(
        NODES, CLASSES, generator=generator
    )
    return Data(x=features, y=group, edge_index=torch.cat([edges, edges.flip(0)], dim=1))


class AllNeighbours(BaseSampler):
    """Takes the nodes around those of a batch, which come first."""

    def __init__(self, data: Data) -> None:
        self.edges = data.edge_index

    def sample_from_nodes(self, index, **kwargs):
        seeds = index.node
        nodes, _, _, _ = k_hop_subgraph(seeds, HOPS, self.edges, num_nodes=NODES)
        nodes = torch.cat([seeds, nodes[~torch.isin(nodes, seeds)]])
        place = torch.full((NODES,), -1)
        place[nodes] = torch.arange(len(nodes))
        inside = (place[self.edges] >= 0).all(dim=0)
        row, col = place[self.edges[:, inside]]
        edge = inside.nonzero().squeeze(1)
        return SamplerOutput(node=nodes, row=row, col=col, edge=edge, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(CLASSES, 16), SAGEConv(16, CLASSES)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def main() -> None:
    data, model = graph(), Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    training = torch.arange(0, NODES, 2)
    options = {"node_sampler": AllNeighbours(data), "input_nodes": training, "batch_size": 16}
    if WRAPPED:
        optimizer = nt.Downpour(optimizer)
        loader = NodeLoader(data, sampler=nt.ShardSampler(training), **options)
    else:
        loader = NodeLoader(data, shuffle=True, **options)

    for _epoch in range(8):
        for batch in loader:
            optimizer.zero_grad()
            outputs = model(batch.x, batch.edge_index)[: batch.batch_size]
            torch.nn.functional.cross_entropy(outputs, batch.y[: batch.batch_size]).backward()
            optimizer.step()

    if WRAPPED:
        optimizer.close()
    with torch.no_grad():
        outputs = model(data.x, data.edge_index)[1::2]
    accuracy = (outputs.argmax(dim=1) == data.y[1::2]).float().mean()
    finish(optimizer, accuracy=accuracy, loss=torch.nn.functional.cross_entropy(outputs, data.y[1::2]))


if __name__ == "__main__":
    main()
