"""A prediction in the middle of a training: all ranks predict with the centre."""

from __future__ import annotations

import numpy as np
import torch

import nnlo_torch as nt

torch.manual_seed(0)
x = np.random.default_rng(0).standard_normal((203, 3)).astype("f4")
net = torch.nn.Linear(3, 2)
optimizer = nt.EASGD(torch.optim.SGD(net.parameters(), 0.1), every=2, beta=0.9, model=net)
data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(x[:, :2]))
loader = torch.utils.data.DataLoader(data, batch_size=20, sampler=nt.ShardSampler(data))
for _ in range(2):
    for features, labels in loader:
        optimizer.zero_grad()
        ((net(features) - labels) ** 2).mean().backward()
        optimizer.step()
    mine = net.weight.detach().clone()
    outputs = nt.predict(net, x, batch_size=10).outputs
    assert torch.equal(mine, net.weight), "each worker continues where it was"
with optimizer.evaluation():
    inside = nt.predict(net, x, batch_size=10).outputs
    with torch.no_grad():
        plain = torch.cat([net(part) for part in torch.from_numpy(x).split(10)]).numpy()
assert np.array_equal(outputs, inside)
assert np.array_equal(inside, plain)
print("the centre's", flush=True)
