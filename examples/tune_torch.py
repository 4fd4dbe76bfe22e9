"""PyTorch network for Fashion-MNIST and its search space for `nnlo tune`; see `fashion_files.py`."""

from __future__ import annotations

import torch


def get_model(width=64, depth=1):
    layers, size = [], 784
    for _ in range(depth):
        layers += [torch.nn.Linear(size, width), torch.nn.ReLU()]
        size = width
    return torch.nn.Sequential(*layers, torch.nn.Linear(size, 10))


def get_space():
    return {
        "width": {"low": 16, "high": 256, "log": True},
        "depth": [1, 2],
        "optimizer": ["sgd", "adam"],
        "learning_rate": {"low": 1e-3, "high": 1e-1, "log": True},
    }
