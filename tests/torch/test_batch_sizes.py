"""The number of samples in batches of every kind, and epochs without a loader."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, UserDict, namedtuple

import numpy as np
import pytest

from nnlo_common import ConfigurationError

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch._evaluation import samples_in  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = pytest.mark.framework("torch")

X, Y = cases.data()


class Graph:
    """As `torch_geometric.data.Data`: attributes, of which its length is the number."""

    def __init__(self, **attributes):
        self.store = {"x": torch.zeros(7, 3), "edge_index": torch.zeros(2, 9, dtype=torch.long), **attributes}

    def __getattr__(self, name):
        try:
            return self.__dict__["store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self):
        return len(self.store)


class Tensors(UserDict):
    """As a TensorDict: a mapping with a size."""

    def __init__(self, size):
        super().__init__(a=torch.zeros(*size, 2))
        self.batch_size = torch.Size(size)


@dataclasses.dataclass
class Record:
    rate: torch.Tensor
    inputs: torch.Tensor
    name: str = "record"


@dataclasses.dataclass
class Sized:
    """As a tensorclass, which is no mapping."""

    batch_size: torch.Size


Named = namedtuple("Named", ["mask", "x"])  # noqa: PYI024 - as users write them


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says PyTorch
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3), torch.zeros(1)], layout=layout)


BATCHES = {
    "tensor": (torch.zeros(4, 2), 4),
    "array": (np.zeros((3, 2)), 3),
    "number": (torch.tensor(1.0), 1),
    "pair": ((torch.zeros(5, 2), torch.zeros(5)), 5),
    "nested": (nested(torch.strided), 3),
    "jagged": (nested(torch.jagged), 3),
    "dict": ({"lr": torch.tensor(0.1), "x": torch.zeros(4, 2)}, 4),
    "empty first": ([[], torch.zeros(6)], 6),
    "batch encoding": (UserDict(input_ids=torch.zeros(2, 9)), 2),
    "model output": (OrderedDict(loss=torch.tensor(1.0), logits=torch.zeros(3, 2)), 3),
    "dataclass": (Record(torch.tensor(0.1), torch.zeros(8, 2)), 8),
    "named tuple": (Named(None, torch.zeros(2, 2)), 2),
    "packed": (torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]), 2),
    "packed, with labels": (
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]), torch.zeros(2)),
        2,
    ),
    "texts": (["one", "two", "three"], 3),
    "texts and labels": ((["one", "two"], torch.zeros(2)), 2),
    "texts by name": ({"text": ["one", "two"], "number": 7}, 2),
    "graphs": (Graph(num_graphs=5, batch=torch.zeros(35)), 5),
    "one graph": (Graph(), 1),
    "a neighbourhood": (Graph(batch_size=3), 3),
    "graphs in a pair": ((Graph(num_graphs=4), torch.zeros(4)), 4),
    "tensor dict": (Tensors([4, 5]), 4),
    "tensor dict without a size": (Tensors([]), 2),
    "tensor class": (Sized(torch.Size([6, 2])), 6),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_samples_of_a_batch_are_counted(name):
    batch, expected = BATCHES[name]
    assert samples_in(batch) == expected


UNKNOWN = [None, 3, "text", object(), [], {}, [1, 2], Sized(torch.Size([]))]


@pytest.mark.parametrize("batch", UNKNOWN, ids=lambda one: type(one).__name__)
def test_an_unknown_number_is_refused_by_evaluate_and_is_one_in_an_epoch(batch):
    optimizer = nt.Downpour(torch.optim.SGD(cases.model_of().parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=r"samples in a batch of type .* is unknown.*pass samples="):
        optimizer.evaluate(lambda batch: {"x": 1.0}, [batch])
    assert list(optimizer.epoch([batch])) == [batch]
    assert optimizer.report().samples == 1


def test_the_caller_may_say_how_many_samples_a_batch_has():
    optimizer = nt.Downpour(torch.optim.SGD(cases.model_of().parameters(), lr=0.1))
    batches = [{"kind": 1, "rows": 10}, {"kind": 4, "rows": 30}]
    means = optimizer.evaluate(lambda one: {"kind": one["kind"]}, batches, samples=lambda one: one["rows"])
    assert means == {"kind": (1 * 10 + 4 * 30) / 40}
    for _ in optimizer.epoch(batches, samples=lambda one: one["rows"]):
        pass
    assert optimizer.report().samples == 40


def test_graphs_weigh_a_mean_by_their_number():
    """Not by their nodes, nor by the number of their attributes."""

    def program(world):
        model = cases.model_of()  # which must live, or a rank may not find the names of its parameters
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        mine = [Graph(num_graphs=world.rank + 1, y=float(world.rank))]
        means = optimizer.evaluate(lambda graph: {"y": graph.y}, mine)
        optimizer.close()
        return means

    assert on_ranks(3, program) == [{"y": pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)}] * 3


# -- epochs without a loader ----------------------------------------------------------------------------


def episodes(world, name, count):
    """A loop that makes its own data, as in reinforcement learning."""
    model = cases.model_of()
    optimizer = getattr(nt, name)(torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    seen = []
    for _ in range(2):
        for index in optimizer.epoch(range(count)):
            seen.append(index)
            optimizer.zero_grad()
            cases.loss_of(model, X[6 * index :][:6], Y[6 * index :][:6]).backward()
            optimizer.step()
    optimizer.close()
    return cases.values(model), seen, optimizer.report()


def test_an_epoch_of_n_batches_needs_no_loader():
    plain = cases.model_of()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for index in range(5):
            optimizer.zero_grad()
            cases.loss_of(plain, X[6 * index :][:6], Y[6 * index :][:6]).backward()
            optimizer.step()
    alone = episodes(None, "Downpour", 5)
    server, worker = on_ranks(2, lambda world: episodes(world, "Downpour", 5))
    for values, *_ in (alone, server, worker):
        assert cases.same(values, cases.values(plain))
    assert (alone[1], server[1], worker[1]) == ([*range(5)] * 2, [], [*range(5)] * 2)
    # Two workers with the same batches: their mean gradient is that of each.
    center, *_ = on_ranks(3, lambda world: episodes(world, "Synchronous", 5))
    torch.testing.assert_close(center[0], cases.values(plain), rtol=1e-5, atol=1e-6)
    assert center[2].samples == 2 * 2 * 5
