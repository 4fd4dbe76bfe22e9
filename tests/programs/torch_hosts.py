"""A synchronous training of PyTorch; each rank prints its host, and the first what was trained."""

import hashlib

import torch

import nnlo_torch

SAMPLES = 240


class Net(torch.nn.Module):
    """A small network that counts how often it was trained with each sample."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.register_buffer("times", torch.zeros(SAMPLES))

    def forward(self, inputs, numbers):
        self.times += torch.bincount(numbers, minlength=SAMPLES)
        return self.layers(inputs)


torch.manual_seed(1)
model = Net()
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 3), torch.arange(SAMPLES))
optimizer = nnlo_torch.Synchronous(torch.optim.Adam(model.parameters(), lr=0.01))
sampler = nnlo_torch.ShardSampler(data, shuffle=True, seed=2)
loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=sampler)
for _ in range(3):
    for inputs, numbers in loader:
        model(inputs, numbers).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
own = model.times.clone()
report = optimizer.report()
optimizer.close()
bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"\nsamples {own.sum():.0f} {hashlib.sha256(bits).hexdigest()} {sorted(own.tolist())}", flush=True)
