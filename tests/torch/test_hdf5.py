"""HDF5 files in PyTorch loops: samples for a sampler, or batches that are read in long slices."""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections import Counter

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.data.formats import _hdf5
from nnlo_common.testing import InjectedFault
from tests.helpers.paths import PROGRAMS

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import h5py  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import nnlo_torch as nt  # noqa: E402
from tests.helpers.jobs import mpiexec  # noqa: E402
from tests.helpers.threads import no_new_threads, on_ranks  # noqa: E402
from tests.helpers.torch_cases import trained_epoch  # noqa: E402

pytestmark = pytest.mark.framework("torch")

SAMPLES = 23
ASSIGNMENTS = ["static", "dynamic"]


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
        with pytest.raises(IndexError, match=f"sample .{index}. is out of range: the files have 23"):
            data[index]
    asked = [3, 22, 4, 3, 9, 8, 5]
    assert [int(y) for _, y in data.__getitems__(asked)] == asked
    assert data.__getitems__([]) == []


def test_what_lies_in_a_row_is_read_at_once(files, monkeypatch):
    data, slices = nt.H5Dataset(files, features="x"), []
    read = _hdf5._ByLibrary.read

    def watched(rows, first, last, out):
        slices.append((first, last))
        read(rows, first, last, out)

    monkeypatch.setattr(_hdf5._ByLibrary, "read", watched)
    data.__getitems__([5, 3, 4, 12, 10, 11, 20])
    assert slices == [(3, 6), (1, 4), (11, 12)]


def test_groups_and_adaptors_make_structures(files):
    data = nt.H5Dataset(
        files, features="inputs", labels="y", adapt_labels=lambda y: {"number": y, "parity": y % 2}
    )
    ((first, second), labels), *_ = DataLoader(data, batch_size=4)
    assert (first.shape, second.shape) == ((4, 1), (4, 2))
    assert labels["parity"].tolist() == [0, 1, 0, 1]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_of_a_loader_open_the_files_by_themselves(files, method):
    data = nt.H5Dataset(files, features="x", labels="y")
    _ = data[0]  # they are open here
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        assert [number for x, y in loader for number in check(x, y)] == list(range(SAMPLES))


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_sampler_deals_its_samples_out(files, assignment):
    def program(world):
        optimizer, data = optimizer_of(world), nt.H5Dataset(files, features="x", labels="y")
        sampler = nt.ShardSampler(data, assignment=assignment, unit=2, optimizer=optimizer)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        seen = [[number for x, y in loader for number in check(x, y)] for _ in range(2)]
        optimizer.close()
        return seen

    server, *workers = on_ranks(3, program)
    assert server == [[], []]
    for epoch in range(2):
        assert sorted(workers[0][epoch] + workers[1][epoch]) == list(range(SAMPLES))


def test_leases_of_samples_that_are_not_shuffled_are_read_in_a_row(files, monkeypatch):
    """A lease is a range of the order, which is that of the files here."""
    slices = []
    read = _hdf5._ByLibrary.read

    def watched(rows, first, last, out):
        slices.append((rows._dataset.file.filename[-4], first, last))
        read(rows, first, last, out)

    def program(world):
        optimizer, data = optimizer_of(world), nt.H5Dataset(files, features="x")
        sampler = nt.ShardSampler(data, shuffle=False, assignment="dynamic", unit=4, optimizer=optimizer)
        for _ in DataLoader(data, batch_size=4, sampler=sampler):
            pass
        optimizer.close()

    monkeypatch.setattr(_hdf5._ByLibrary, "read", watched)
    on_ranks(2, program)
    first, second = [("a", 0, 4), ("a", 4, 8), ("a", 8, 9)], [("b", 0, 3), ("b", 3, 7), ("b", 7, 11)]
    assert slices == [*first, *second, ("b", 11, 14)]


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


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_each_sample_is_trained_on_by_one_worker(files, assignment):
    def program(world):
        optimizer = optimizer_of(world)
        batches, seen = batches_of(files, assignment=assignment, optimizer=optimizer), []
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


# -- leases ------------------------------------------------------------------------------------------


def trained(batches, optimizer, stop=None, **options):
    """The samples of an epoch, with a step for each batch."""

    def backward(batch):
        x, y = batch
        optimizer._model(x).sum().backward()
        return check(x, y)

    return trained_epoch(batches, optimizer, backward, stop, **options)


def test_a_slow_worker_gets_less_and_nothing_is_lost(files):
    """Rank 2 cannot make its second step before rank 1 has taken all that is to be had."""
    done = threading.Event()

    def program(world):
        optimizer = optimizer_of(world)
        batches = nt.H5Batches(
            files, features="x", labels="y", batch_size=1, window=1, assignment="dynamic", optimizer=optimizer
        )

        def wait(seen):
            if world.rank == 2 and len(seen) == 2:
                done.wait(20)
            if world.rank == 1 and len(seen) == 12:
                done.set()

        seen = trained(batches, optimizer, before_step=wait)
        done.set()
        optimizer.close()
        return seen

    _, fast, slow = on_ranks(3, program)
    assert sorted(fast + slow) == list(range(SAMPLES))
    assert len(slow) < 11 < 12 <= len(fast)


def test_what_a_dead_worker_had_is_given_out_again(files):
    """It has used up its first window, of two batches; of the second it had begun one, and read ahead."""
    begun = threading.Event()

    def program(world):
        optimizer = optimizer_of(world)
        batches = nt.H5Batches(
            files, features="x", labels="y", batch_size=1, window=2, assignment="dynamic", optimizer=optimizer
        )

        def wait(seen):
            begun.set() if world.rank == 1 else begun.wait(20)

        epochs = [trained(batches, optimizer, before_step=wait) for _ in range(2)]
        optimizer.close()
        return epochs

    server, dead, (first, second) = on_ranks(
        3, program, prepare=lambda cluster: cluster.fail(1, "send EXCHANGE", 3)
    )
    assert isinstance(dead, InjectedFault)
    assert server == [[], []]
    assert len(set(first)) == len(first) == SAMPLES - 2
    assert sorted(second) == list(range(SAMPLES))


def test_who_breaks_off_in_mid_window_leaves_exactly_the_rest_to_others(files):
    begun = threading.Event()

    def program(world):
        optimizer = optimizer_of(world)
        batches = nt.H5Batches(
            files, features="x", labels="y", batch_size=2, window=3, assignment="dynamic", optimizer=optimizer
        )
        if world.rank == 1:
            seen = trained(batches, optimizer, stop=1, before_step=lambda seen: begun.set())
        else:
            seen = trained(batches, optimizer, before_step=lambda seen: begun.wait(20))
        optimizer.evaluate(lambda x: {"x": x.mean()}, [])  # ends the epoch
        rest = trained(batches, optimizer)
        optimizer.close()
        return seen, rest

    _, (one, _), (others, _) = ranks = on_ranks(3, program)
    assert len(one) == 2
    assert sorted(one + others) == list(range(SAMPLES))
    assert sorted(n for _, rest in ranks for n in rest) == list(range(SAMPLES))


# -- going on in mid-epoch ---------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_rest_of_an_epoch_is_what_was_missing(files, assignment, stops):
    """A whole epoch, and a part of one; all save, and a second training goes on."""
    kept = {}

    def first(world):
        optimizer = optimizer_of(world)
        batches = batches_of(files, assignment=assignment, optimizer=optimizer)
        trained(batches, optimizer)
        seen = trained(batches, optimizer, stops[world.rank - 1] if world.rank else None)
        kept[world.rank] = batches.state_dict()
        optimizer.mean({})  # now the server has read its ledger
        optimizer.close()
        return seen

    def second(world):
        optimizer = optimizer_of(world)
        batches = batches_of(files, assignment=assignment, optimizer=optimizer)
        batches.load_state_dict(kept[world.rank])
        assert batches.state_dict() == kept[world.rank]
        epochs = [trained(batches, optimizer) for _ in range(2)]
        optimizer.close()
        return epochs

    before, after = on_ranks(3, first), on_ranks(3, second)
    seen = Counter(n for part in [*before, *(rest for rest, _ in after)] for n in part)
    assert seen == Counter(range(SAMPLES))
    assert sorted(n for _, following in after for n in following) == list(range(SAMPLES))


def test_alone_it_goes_on_where_it_was(files):
    batches, again = batches_of(files), batches_of(files)
    for stop in (0, 2, 6):
        seen = [y.tolist() for _, (_, y) in zip(range(stop), batches, strict=False)]
        again.load_state_dict(batches.state_dict())
        rest = [y.tolist() for _, y in again] if stop < 6 else []
        assert sorted(n for batch in seen + rest for n in batch) == list(range(SAMPLES))
        following = again.state_dict() if stop < 6 else batches.state_dict()
        batches.load_state_dict(following)
        assert following["taken"] == 0


def test_the_state_of_another_order_is_refused_and_both_are_named(files):
    state = batches_of(files).state_dict()
    with pytest.raises(ConfigurationError, match=r"state is for .*seed 0, .* has .*seed 1, .*resume with"):
        batches_of(files, seed=1).load_state_dict(state)


@pytest.mark.parametrize("options", [{"assignment": "fair"}, {"assignment": "dynamic", "evaluation": True}])
def test_assignments_that_cannot_be_are_refused(files, options):
    with pytest.raises(ConfigurationError, match="must be 'static', or 'dynamic' for training data"):
        batches_of(files, **options)


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


# -- processes ---------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_processes_deal_each_sample_once_and_lease_less_to_the_slow(tmp_path):
    done = mpiexec(3, PROGRAMS / "torch_hdf5.py", "deals", str(tmp_path), timeout_s=90)
    assert done.returncode == 0, done.stderr
    server, fast, slow = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3))
    for assignment in ASSIGNMENTS:
        assert server[assignment] == [[], []]
        for epoch in range(2):
            assert sorted(fast[assignment][epoch] + slow[assignment][epoch]) == list(range(101))
            difference = len(fast[assignment][epoch]) - len(slow[assignment][epoch])
            assert difference in (-1, 1) if assignment == "static" else difference > 10


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("truncated", r"rank2/2\.h5 (is truncated.*|cannot be opened.*)again"),
        ("changed", r"rank2/2\.h5: samples \d+ to \d+ of /x cannot be read .*is damaged, or has changed"),
    ],
)
def test_a_bad_file_ends_the_job_with_its_rank_and_name(tmp_path, case, problem):
    done = mpiexec(3, PROGRAMS / "torch_hdf5.py", case, str(tmp_path), timeout_s=90)
    assert done.returncode != 0
    assert re.search(problem, done.stderr), done.stderr
    assert re.search(r"\brank 2\b", done.stderr), done.stderr
