"""Two servers and two workers train together a network whose gradient has several parts; prints its bits.

Argument: 1 to send gradients while they are made, or 0. Steps are left out and clipped now and then.
"""

import hashlib
import itertools
import sys

import torch

import nnlo_torch as nt

torch.manual_seed(0)
sizes = [300, 700, 700, 777, 10]
layers = [torch.nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]
model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
optimizer = nt.Synchronous(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), servers=2, overlap=sys.argv[1] == "1"
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
data = torch.utils.data.TensorDataset(torch.randn(240, 300), torch.randint(0, 10, (240,)))
loader = torch.utils.data.DataLoader(data, batch_size=20, sampler=nt.ShardSampler(data))
for _ in range(2):
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        if number % 3 == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 5 != 3:
            optimizer.step()
            schedule.step()
optimizer.close()
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
optimizer.say(digest.hexdigest())
