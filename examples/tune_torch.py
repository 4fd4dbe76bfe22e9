"""A network for Fashion-MNIST, PyTorch, and what `nnlo tune` is to search; see `fashion_files.py`."""

from __future__ import annotations

import torch


def get_model(width=64, depth=1, dropout=0.0):
    layers, size = [], 784
    for _ in range(depth):
        layers += [torch.nn.Linear(size, width), torch.nn.ReLU(), torch.nn.Dropout(dropout)]
        size = width
    return torch.nn.Sequential(*layers, torch.nn.Linear(size, 10))


def get_space():
    return {
        "width": {"low": 16, "high": 128, "log": True},
        "depth": [1, 2],
        "dropout": (0.0, 0.5),
        "learning_rate": {"low": 1e-4, "high": 3e-2, "log": True},
    }
