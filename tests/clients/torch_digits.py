"""A convolutional network on images: dropout, a schedule per epoch, and a test after each epoch."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from examples.fashion_data import load
from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 12, 3, stride=2)
        self.dropout = torch.nn.Dropout(0.1)
        self.hidden, self.last = torch.nn.Linear(12 * 36, 64), torch.nn.Linear(64, 10)

    def forward(self, x):
        x = functional.max_pool2d(self.convolution(x).relu(), 2)
        return self.last(self.dropout(self.hidden(x.flatten(1)).relu()))


def main() -> None:
    data = load()
    x, y, x_test, y_test = map(torch.from_numpy, data[:4])
    training = TensorDataset(x.view(-1, 1, 28, 28), y)
    model = Network()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    if WRAPPED:
        optimizer = nt.Downpour(optimizer)
        loader = DataLoader(training, batch_size=32, sampler=nt.ShardSampler(training))
    else:
        loader = DataLoader(training, batch_size=32, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)

    for _epoch in range(8):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        schedule.step()

    if WRAPPED:
        optimizer.close()
    model.eval()
    with torch.no_grad():
        outputs = model(x_test.view(-1, 1, 28, 28))
    accuracy = (outputs.argmax(dim=1) == y_test).float().mean()
    finish(optimizer, accuracy=accuracy, loss=functional.cross_entropy(outputs, y_test))


if __name__ == "__main__":
    main()
