"""A model, data and optimizers for trainings that are compared bit for bit."""

import torch

SAMPLES = 60

OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": m[0].parameters(), "lr": 0.2},
            {"params": m[2].parameters(), "weight_decay": 0.1, "momentum": 0.5},
        ],
        lr=0.05,
    ),
}
#: The wrappers, with options under which they exchange in a training as short as those of tests.
WRAPPERS = {
    "Downpour": {},
    "Synchronous": {},
    "EASGD": {"every": 2},
    "GEM": {},
    "AGN": {"every": 2},
    "DynSGD": {},
    "LocalSGD": {"every": 2},
    "DiLoCo": {"every": 3},
}


def initialised(model):
    """The model with weights that do not depend on the state of anything else."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw))
    return model


def model_of(width=16):
    layers = torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    return initialised(torch.nn.Sequential(*layers))


def data():
    draw = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, 5, generator=draw), torch.randint(0, 3, (SAMPLES,), generator=draw)


def loss_of(model, inputs, targets):
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def same(first, second):
    """Whether two nests of containers hold equal things, and tensors of equal bits."""
    if torch.is_tensor(first):
        return torch.is_tensor(second) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and first == second


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def trained_epoch(batches, optimizer, backward, stop=None, before_step=lambda seen: None):
    """The samples of an epoch, with a step for each batch, up to so many batches.

    Args:
        batches: those of this rank.
        optimizer: the wrapper.
        backward: makes the gradient of a batch, and returns its samples.
        stop: the number of batches; None: all.
        before_step: called with the samples so far.
    """
    seen = []
    for count, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        seen += backward(batch)
        before_step(seen)
        optimizer.step()
        if count == stop:
            break
    return seen
