"""Network of the PyTorch examples, and its accuracy and loss."""

from __future__ import annotations

import torch


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(784, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def measure(model, x, y):
    """Return accuracy and loss, as means over one batch."""
    scores = model(x)
    accuracy = (scores.argmax(dim=1) == y).float().mean()
    return {"accuracy": accuracy, "loss": torch.nn.functional.cross_entropy(scores, y)}
