"""HDF5 files in PyTorch loops: samples for a sampler, or batches that are read in long slices."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import h5py  # noqa: E402
from in_memory import no_new_threads  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import nnlo_torch as nt  # noqa: E402

pytestmark = pytest.mark.framework("torch")

SAMPLES = 23


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def files(tmp_path):
    """Two files, of 9 and of 14 samples, which are their own numbers."""
    for name, start, stop in [("a", 0, 9), ("b", 9, SAMPLES)]:
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.stack([np.arange(start, stop)] * 2, axis=1).astype(">f4")
            file["y"] = np.arange(start, stop)
            file["inputs/1"], file["inputs/2"] = file["x"][:, :1], file["x"]
    return tmp_path / "*.h5"


def optimizer_of(world=None):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.001), model=model, world=world)


def on_ranks(size, program):
    with MemoryCluster(size) as cluster:
        return cluster.run(program, 60)


def check(x, y):
    """Each sample has the label that belongs to it."""
    assert isinstance(x, torch.Tensor)
    np.testing.assert_array_equal(x[:, 0].numpy(), y.numpy())
    return y.tolist()


# -- samples -----------------------------------------------------------------------------------------


def test_any_sample_may_be_asked_for(files):
    data = nt.H5Dataset(files, features="x", labels="y")
    assert len(data) == SAMPLES
    for index in (0, 8, 9, 22, -1):
        x, y = data[index]
        assert (x.tolist(), int(y)) == ([index % SAMPLES] * 2, index % SAMPLES)
    for index in (SAMPLES, -SAMPLES - 1):
        with pytest.raises(IndexError, match=f"sample .{index}. of 23"):
            data[index]
    asked = [3, 22, 4, 3, 9, 8, 5]
    assert [int(y) for _, y in data.__getitems__(asked)] == asked
    assert data.__getitems__([]) == []


def test_what_lies_in_a_row_is_read_at_once(files, monkeypatch):
    data, slices = nt.H5Dataset(files, features="x"), []
    read = h5py.Dataset.read_direct

    def watched(self, destination, source, into):
        slices.append((source.start, source.stop))
        return read(self, destination, source, into)

    monkeypatch.setattr(h5py.Dataset, "read_direct", watched)
    data.__getitems__([5, 3, 4, 12, 10, 11, 20])
    assert slices == [(3, 6), (1, 4), (11, 12)]


def test_groups_and_adaptors_make_structures(files):
    data = nt.H5Dataset(
        files, features="inputs", labels="y", adapt_labels=lambda y: {"number": y, "parity": y % 2}
    )
    ((first, second), labels), *_ = DataLoader(data, batch_size=4)
    assert (first.shape, second.shape) == ((4, 1), (4, 2))
    assert labels["parity"].tolist() == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_of_a_loader_open_the_files_by_themselves(files, method):
    data = nt.H5Dataset(files, features="x", labels="y")
    _ = data[0]  # they are open here
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        assert [number for x, y in loader for number in check(x, y)] == list(range(SAMPLES))


def test_a_sampler_deals_its_samples_out(files):
    def program(world):
        optimizer, data = optimizer_of(world), nt.H5Dataset(files, features="x", labels="y")
        loader = DataLoader(data, batch_size=4, sampler=nt.ShardSampler(data, optimizer=optimizer))
        seen = [[number for x, y in loader for number in check(x, y)] for _ in range(2)]
        optimizer.close()
        return seen

    server, *workers = on_ranks(3, program)
    assert server == [[], []]
    for epoch in range(2):
        assert sorted(workers[0][epoch] + workers[1][epoch]) == list(range(SAMPLES))


# -- batches -----------------------------------------------------------------------------------------


def batches_of(files, **options):
    return nt.H5Batches(files, features="x", labels="y", batch_size=4, block=3, window=2, **options)


def test_alone_each_epoch_has_all_in_an_order_of_its_own(files):
    with no_new_threads():
        batches = batches_of(files)
        epochs = [[number for x, y in batches for number in check(x, y)] for _ in range(3)]
        batches.close()
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 3
    assert len(set(map(tuple, epochs))) == 3
    batches.set_epoch(1)
    assert [number for x, y in batches for number in check(x, y)] == epochs[1]
    assert [len(y) for _, y in batches] == [4] * 5 + [3]
    assert len(batches) == 6


def test_a_loader_may_be_around_them(files):
    loader = DataLoader(batches_of(files, shuffle=False), batch_size=None)
    assert [number for x, y in loader for number in check(x, y)] == list(range(SAMPLES))
    with pytest.raises(ConfigurationError, match="use num_workers=0, or H5Dataset"):
        next(iter(DataLoader(batches_of(files), batch_size=None, num_workers=1)))


def test_each_sample_is_trained_on_by_one_worker(files):
    def program(world):
        optimizer = optimizer_of(world)
        batches, seen = batches_of(files, optimizer=optimizer), []
        for _ in range(3):
            seen.append([])
            for x, y in batches:
                optimizer.zero_grad()
                optimizer._model(x).sum().backward()
                optimizer.step()
                seen[-1] += check(x, y)
        optimizer.close()
        return seen, optimizer.report().samples, len(batches)

    (nothing, total, length), *workers = on_ranks(4, program)
    assert nothing == [[], [], []]
    assert total == 3 * SAMPLES
    assert [count for _, count, _ in workers] == [sum(map(len, seen)) for seen, _, _ in workers]
    assert length == 2  # of a server as of the first worker
    assert all(count == 2 for _, _, count in workers)
    for epoch in range(3):
        parts = [seen[epoch] for seen, _, _ in workers]
        assert sorted(number for part in parts for number in part) == list(range(SAMPLES))


def test_workers_without_samples_keep_nobody_waiting(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(2)

    def program(world):
        optimizer = optimizer_of(world)
        seen = [
            int(n) for (x,) in nt.H5Batches(tmp_path / "a.h5", features="x", optimizer=optimizer) for n in x
        ]
        optimizer.close()
        return seen

    assert sorted(n for seen in on_ranks(5, program) for n in seen) == [0, 1]


def test_all_ranks_evaluate_each_sample_once(files):
    def program(world):
        optimizer = optimizer_of(world)
        held_out = batches_of(files, optimizer=optimizer, evaluation=True)
        batches = batches_of(files, optimizer=optimizer)
        means = []
        for _ in range(2):
            for x, _ in batches:
                optimizer._model(x).sum().backward()
                optimizer.step()
            means.append(
                optimizer.evaluate(lambda batch: {"mean": batch[1].double().mean().item()}, held_out)["mean"]
            )
        optimizer.close()
        return means

    for means in on_ranks(3, program):
        assert means == pytest.approx([(SAMPLES - 1) / 2] * 2)


def test_a_training_that_is_stopped_gives_no_more(files):
    optimizer = optimizer_of()
    seen = 0
    for _ in batches_of(files, optimizer=optimizer):
        seen += 1
        optimizer.stop()
    assert seen == 1


def test_they_may_go_into_another_process(files):
    batches = batches_of(files)
    _ = next(iter(batches))
    copy = pickle.loads(pickle.dumps(batches))
    assert copy.epoch == 1
    assert [y.tolist() for _, y in copy] == [y.tolist() for _, y in batches]
