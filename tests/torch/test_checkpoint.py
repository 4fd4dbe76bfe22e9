"""Checkpoints of a torch loop: the same command goes on with the same bits, or is refused by name."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster
from nnlo_common.training.checkpoint import Draft, Store
from tests.helpers.jobs import mpiexec
from tests.helpers.pages import code

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch._checkpoint import packed, unpacked  # noqa: E402
from tests.programs import torch_checkpoint  # noqa: E402

pytestmark = [pytest.mark.framework("torch"), pytest.mark.sampled(2)]
PROGRAM = Path(torch_checkpoint.__file__)
BATCHES = 45  # of a whole training in one process


def straight(folder, **options):
    _, weights, done = torch_checkpoint.train(folder, **options)
    assert done == BATCHES
    return weights


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["Downpour", "EASGD", "GEM"])
@pytest.mark.parametrize("stop_at", [1, 5, 16, 31, 45])
def test_in_one_process_a_killed_training_goes_on_bit_for_bit(tmp_path, stop_at, wrapper):
    """Optimizer, scheduler, sampler, batch norm, dropout, Python's and NumPy's random numbers."""
    with pytest.raises(KeyboardInterrupt):
        torch_checkpoint.train(tmp_path / "run", wrapper, stop_at=stop_at)
    torch.rand(7), np.random.random(7)  # noqa: NPY002 - another process draws what it likes
    _, weights, done = torch_checkpoint.train(tmp_path / "run", wrapper)
    assert BATCHES - stop_at < done <= min(BATCHES, BATCHES - stop_at + 1 + 3)
    assert np.array_equal(weights, straight(tmp_path / "straight", wrapper=wrapper))


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [1, 15, 20])
def test_a_signal_saves_at_the_next_batch_boundary_and_ends_with_its_own_status(tmp_path, capsys, stop_at):
    with pytest.raises(SystemExit) as caught:
        torch_checkpoint.train(tmp_path / "run", "Downpour", stop_at=stop_at, how="signal")
    assert caught.value.code == 75
    told = f"nnlo: a signal ended the training; rerun the same command to resume from {tmp_path}/run/checkp"
    assert capsys.readouterr().out.startswith(told)
    _, weights, done = torch_checkpoint.train(tmp_path / "run", "Downpour")
    assert done == BATCHES - stop_at
    assert np.array_equal(weights, straight(tmp_path / "straight", wrapper="Downpour"))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "signal"])
@pytest.mark.parametrize("stop_at", [1, 5, 15, 16, 31])
def test_files_are_gone_on_with_where_they_were(tmp_path, stop_at, how):
    torch_checkpoint.write(tmp_path / "a.h5")
    options = {"wrapper": "Downpour", "file": tmp_path / "a.h5"}
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        torch_checkpoint.train(tmp_path / "run", stop_at=stop_at, how=how, **options)
    _, weights, done = torch_checkpoint.train(tmp_path / "run", **options)
    if how == "signal":
        assert done == BATCHES - stop_at
    assert np.array_equal(weights, straight(tmp_path / "straight", **options))


def test_a_training_that_is_over_is_not_begun_again(tmp_path):
    torch_checkpoint.train(tmp_path, "Downpour")
    assert torch_checkpoint.train(tmp_path, "Downpour")[2] == 0


def train(folder, *, width=2, wrapper=None, inner=torch.optim.SGD, samples=8, workers=0, epochs=1, **options):
    model = torch.nn.Linear(width, 1)
    optimizer = (wrapper or nt.Downpour)(inner(model.parameters(), lr=0.1), model=model)
    data = torch.arange(float(samples * width)).reshape(samples, width)
    loader = torch.utils.data.DataLoader(
        data, batch_size=3, num_workers=workers, sampler=nt.ShardSampler(data, shuffle=False)
    )
    checkpoint = nt.Checkpoint(folder, optimizer, **options)
    seen = []
    for epoch in checkpoint.epochs(epochs):
        for x in checkpoint.batches(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen.append((epoch, x[:, 0].tolist()))
            if len(seen) == options.get("keep"):  # here: how many batches to make
                return seen
    return seen


def test_what_was_used_is_not_seen_again_also_where_the_loader_is_ahead(tmp_path):
    for workers in (0, 1):
        folder = tmp_path / str(workers)
        assert train(folder, workers=workers, epochs=2, batches=1, keep=2) == [
            (0, [0.0, 2.0, 4.0]),
            (0, [6.0, 8.0, 10.0]),
        ]
        # The second batch was not followed by another, so it is not known to be done.
        rest = train(folder, workers=workers, epochs=2)
        assert rest[0] == (0, [6.0, 8.0, 10.0])
        assert [epoch for epoch, _ in rest] == [0, 0, 1, 1, 1]


def time_first(samples):
    return torch.stack(samples, 1)


def without_tensors(samples):
    return {"texts": [str(int(one[0])) for one in samples], "numbers": [float(one[0]) for one in samples]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None},
        {"batch_size": 3, "collate_fn": time_first},
        {"batch_size": 3, "collate_fn": without_tensors},
    ],
    ids=["single samples", "time first", "no tensors"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_do_not_tell_their_samples_are_gone_on_with_where_they_were(tmp_path, workers, options):
    def program(stop_at=0):
        model = torch.nn.Linear(1, 1)
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
        data = torch.arange(14.0)[:, None].expand(14, 5)
        sampler = nt.ShardSampler(data, shuffle=False)
        loader = torch.utils.data.DataLoader(data, sampler=sampler, num_workers=workers, **options)
        checkpoint, seen = nt.Checkpoint(tmp_path, optimizer, batches=1), []
        for _ in checkpoint.epochs(1):
            for batch in checkpoint.batches(loader):
                optimizer.step()
                numbers = batch["numbers"] if isinstance(batch, dict) else batch.flatten().tolist()
                seen.append(sorted({*numbers}))
                if len(seen) == stop_at:
                    return seen
        return seen

    done, rest = program(stop_at=3)[:2], program()
    assert [number for batch in done + rest for number in batch] == [*range(14)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"width": 3}, r"the model is another one: .*\[1, 3\].* here and .*\[1, 2\].* there"),
        ({"wrapper": nt.DynSGD}, r"the algorithm is Downpour\(.*\) there, but DynSGD\(.*\) here"),
        ({"inner": torch.optim.Adam}, "the optimizer is SGD there, but Adam here"),
        ({"samples": 9, "epochs": 2}, "its data set has 8 samples, but this one has 9; choose"),
        (
            {"also": {"stopping": nt.EarlyStopping()}},
            r"also=\['stopping'\] was given, but the checkpoint has \[\]",
        ),
    ],
    ids=["model", "algorithm", "optimizer", "data", "also"],
)
def test_the_checkpoint_of_another_training_is_refused_by_name(tmp_path, change, told):
    train(tmp_path)
    with pytest.raises(ConfigurationError, match=told):
        train(tmp_path, **change)


class Count:
    """Something that is to go on, too."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def on_ranks(folder, size, wrapper, epochs=2, assignment="static", counts=None, **options):
    """Train on threads as ranks; the epochs that each has seen, and how many samples it took in each."""

    def program(world):
        model = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.01), model=model, world=world, **options)
        data = torch.ones(24, 2)
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, sampler=nt.ShardSampler(data, optimizer=optimizer, assignment=assignment)
        )
        taken, epochs_seen = {}, Count()
        for epoch in nt.Checkpoint(folder, optimizer, also={"count": epochs_seen}).epochs(epochs):
            taken[epoch] = torch_checkpoint.samples_of_epoch(model, optimizer, loader)
            epochs_seen.count += 1
        if counts is not None:
            counts.append(epochs_seen.count)
        optimizer.close()
        return taken

    with MemoryCluster(size) as cluster:
        return cluster.run(program, 180)


@pytest.mark.parametrize(("before", "after"), [(3, 4), (4, 3)])
@pytest.mark.parametrize("wrapper", [nt.LocalSGD, nt.EASGD])
def test_with_another_number_of_workers_it_goes_on_where_that_is_allowed(
    tmp_path, capsys, wrapper, before, after
):
    first = on_ranks(tmp_path, before, wrapper, epochs=2, every=2)
    assert sum(sum(taken.values()) for taken in first) == 2 * 24
    again = on_ranks(tmp_path, after, wrapper, epochs=3, every=2)
    assert again == [{2: 0}, *[{2: 24 // (after - 1)}] * (after - 1)]
    told = (
        f"was saved with {before - 1} workers, but this run has {after - 1}: all workers start at the centre"
    )
    assert capsys.readouterr().out.count(told) == 1


@pytest.mark.parametrize("wrapper", [nt.Synchronous, nt.EASGD, nt.DiLoCo, nt.Downpour])
def test_who_has_no_part_in_a_checkpoint_begins_anew_and_takes_over_what_else_goes_on(
    tmp_path, capsys, wrapper
):
    """As after a worker has died."""
    on_ranks(tmp_path, 4, wrapper, epochs=2)
    store = Store(tmp_path)
    newest = store.newest()
    files = {name: newest.read(name) for name in newest.manifest.files if name != "rank2.pt"}
    assert store.save(files, newest.manifest.facts)
    counts = []
    again = on_ranks(tmp_path, 4, wrapper, epochs=3, counts=counts)
    assert again == [{2: 0}, {2: 8}, {2: 8}, {2: 8}]
    assert counts == [3, 3, 3, 3]
    assert capsys.readouterr().out.count("has no part of rank 2") == 1


def test_it_says_from_where_it_resumes_and_when_nothing_is_left(tmp_path, capsys):
    said = []
    for epochs in (2, 3, 3):
        on_ranks(tmp_path, 3, nt.Downpour, epochs=epochs)
        said.append(capsys.readouterr().out)
        store = Store(tmp_path)
        newest = store.newest()  # a worker dies at the end
        files = {name: newest.read(name) for name in newest.manifest.files if name != "rank2.pt"}
        assert store.save(files, newest.manifest.facts)
    first, other = said[1].splitlines()
    assert said[0] == ""
    assert first == f"nnlo: resumes from {tmp_path}/checkpoint-000003, after 2 of 3 epochs"
    assert other.startswith(f"nnlo: {tmp_path}/checkpoint-000003 has no part of rank 2")
    assert said[2] == (
        f"nnlo: {tmp_path} has the whole training, so nothing is left to train; ask for more epochs to "
        "continue it, or choose another folder to start anew\n"
    )


def stopped(folder, size, *, epochs=4, every=1, leaves=False, agreed=True, after=1, **options):
    """Stop a training after an epoch; the epochs that each rank has seen, and its weights at the end."""

    def program(world):
        model = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), world=world, **options)
        data = torch.ones(24, 2)
        sampler = nt.ShardSampler(data, optimizer=optimizer)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        seen, checkpoint = [], nt.Checkpoint(folder, optimizer, epochs=every)
        for epoch in checkpoint.epochs(epochs):
            seen.append(epoch)
            torch_checkpoint.samples_of_epoch(model, optimizer, checkpoint.batches(loader))
            if agreed:
                optimizer.mean({"loss": 1.0})
            if epoch == after:
                optimizer.stop()
                if leaves:
                    break
        shown = [one.tolist() for one in model.parameters()]
        with optimizer.evaluation():
            weights = [one.tolist() for one in model.parameters()]
        assert shown == weights or not optimizer.serves
        optimizer.close()
        return seen, weights

    if size == 1:
        return [program(None)]
    with MemoryCluster(size) as cluster:
        return cluster.run(program, 60)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(("size", "servers"), [(1, 1), (3, 1), (3, 0), (4, 2)])
def test_a_stopped_training_is_not_begun_again_unless_more_epochs_are_wanted(
    tmp_path, capsys, size, servers, leaves, every
):
    options = {"every": every, "leaves": leaves, "servers": servers}
    first = stopped(tmp_path, size, **options)
    assert [seen for seen, _ in first] == [[0, 1]] * size
    assert capsys.readouterr().out == ""
    again = stopped(tmp_path, size, **options)
    assert [seen for seen, _ in again] == [[]] * size
    assert [weights for _, weights in again] == [weights for _, weights in first]
    assert "nothing is left to train; ask for more epochs" in capsys.readouterr().out
    longer = stopped(tmp_path, size, **options, epochs=5, after=3)
    assert [seen for seen, _ in longer] == [[2, 3]] * size


@pytest.mark.slow
def test_a_stop_on_one_rank_alone_is_refused_where_all_were_to_save(tmp_path):
    def program(world):
        model = torch.nn.Linear(1, 1)
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1), model=model, world=world)
        for _ in nt.Checkpoint(tmp_path, optimizer, epochs=3).epochs(4):
            for _ in optimizer.epoch(range(2)):
                optimizer.step()
            optimizer.mean({"loss": 1.0})
            if optimizer.serves:
                optimizer.stop()
        optimizer.close()

    told = r"optimizer\.stop\(\), which all ranks must call"
    with MemoryCluster(3) as cluster, pytest.raises(ConfigurationError, match=told):
        cluster.run(program, 60)


@pytest.mark.slow
def test_a_training_that_its_server_has_stopped_is_not_begun_again(tmp_path):
    stopped(tmp_path, 3, agreed=False)
    assert [seen for seen, _ in stopped(tmp_path, 3, agreed=False)] == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("size", "servers"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("assignment", ["static", "dynamic"])
@pytest.mark.parametrize("when", ["after an epoch", "leaves", "in an epoch"])
def test_ranks_that_hear_of_a_stop_in_different_epochs_save_together(
    tmp_path, size, servers, assignment, when
):
    """With checkpoints after several epochs; and a longer training deals each sample once from there."""

    def program(world, epochs, after):
        model = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), world=world, servers=servers)
        sampler = nt.ShardSampler(range(24), assignment=assignment, optimizer=optimizer)
        seen, checkpoint = {}, nt.Checkpoint(tmp_path, optimizer, epochs=3)
        if when == "in an epoch":
            optimizer.watch(lambda: after in seen and optimizer.stop(), every_s=0)
        for epoch in checkpoint.epochs(epochs):
            seen[epoch] = []
            for batch in checkpoint.batches(torch.utils.data.DataLoader(range(24), 2, sampler=sampler)):
                optimizer.zero_grad()
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()
                seen[epoch] += batch.tolist()
            if optimizer.serves and epoch == after and when != "in an epoch":
                optimizer.stop()
                if when == "leaves":
                    break
        with optimizer.evaluation():
            weights = [one.tolist() for one in model.parameters()]
        optimizer.close()
        return seen, weights

    def trained(epochs, after):
        with MemoryCluster(size) as cluster:
            return cluster.run(lambda world: program(world, epochs, after), 60)

    first, again = trained(6, 1), trained(6, 1)
    assert [max(seen) < 3 for seen, _ in first] == [True] * size
    assert [seen for seen, _ in again] == [{}] * size
    assert again[0][1] == first[0][1]
    longer = trained(7, 9)
    assert [[*seen] for seen, _ in longer] == [[3, 4, 5, 6]] * size
    for epoch in (3, 4, 5, 6):
        assert sorted(index for seen, _ in longer for index in seen[epoch]) == [*range(24)]


@pytest.mark.parametrize("wrapper", [nt.Synchronous, nt.EASGD, nt.Downpour])
def test_a_group_of_which_a_rank_has_no_part_begins_anew_together(tmp_path, capsys, wrapper):
    first = on_ranks(tmp_path, 5, wrapper, epochs=2, group_size=2)
    assert first == [{0: 0, 1: 0}, *[{0: 6, 1: 6}] * 4]
    store = Store(tmp_path)
    newest = store.newest()
    assert set(newest.manifest.files) == {f"rank{rank}.pt" for rank in range(5)}
    files = {name: newest.read(name) for name in newest.manifest.files if name != "rank2.pt"}
    assert store.save(files, newest.manifest.facts)
    counts = []
    again = on_ranks(tmp_path, 5, wrapper, epochs=3, counts=counts, group_size=2)
    assert again == [{2: 0}, *[{2: 6}] * 4]
    assert counts == [3] * 5
    assert capsys.readouterr().out.count("has no part of rank 2") == 1


@pytest.mark.parametrize("after", [2, 3])
def test_without_a_server_another_number_of_ranks_goes_on_from_the_same_weights(tmp_path, capsys, after):
    first = on_ranks(tmp_path, 2, nt.Synchronous, epochs=2, servers=0)
    assert first == [{0: 12, 1: 12}] * 2
    store = Store(tmp_path)
    assert [set(one.manifest.files) for one in [store.newest()]] == [{"rank0.pt", "rank1.pt"}]
    weights = []
    for rank in range(2):
        tree = unpacked(store.newest().read(f"rank{rank}.pt"))
        weights.append(tree["team"]["part"]["parameters"])
    assert np.array_equal(*weights)
    again = on_ranks(tmp_path, after, nt.Synchronous, epochs=3, servers=0)
    assert again == [{2: 24 // after}] * after
    told = "was saved with 2 ranks in groups of 2, but this run has 3 ranks in groups of 3"
    assert capsys.readouterr().out.count(told) == (after == 3)


def test_without_a_server_a_rank_that_cannot_write_drops_the_checkpoint(tmp_path, monkeypatch):
    write, full = Draft.write, [True]

    def refused(draft, name, data):
        if name == "rank1.pt" and draft.number == 2 and full:
            full.clear()
            raise OSError(28, "No space left on device")
        write(draft, name, data)

    monkeypatch.setattr(Draft, "write", refused)
    with pytest.warns(RuntimeWarning, match="rank 1 on host .*No space left on device"):
        on_ranks(tmp_path, 2, nt.Synchronous, epochs=3, servers=0)
    # The number of the dropped one is not used again.
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-000001", "checkpoint-000003"}
    assert Store(tmp_path).newest().manifest.facts["epoch"] == 3


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_with_other_groups_it_goes_on_from_the_centre(tmp_path, capsys, before, after):
    on_ranks(tmp_path, 5, nt.EASGD, epochs=2, group_size=before)
    assert on_ranks(tmp_path, 5, nt.EASGD, epochs=3, group_size=after) == [{2: 0}, *[{2: 6}] * 4]
    words = {1: "4 workers", 2: "4 ranks in groups of 2", 4: "4 ranks in groups of 4"}
    told = f"was saved with {words[before]}, but this run has {words[after]}: all workers start at the centre"
    assert capsys.readouterr().out.count(told) == 1


ALL = [nt.Downpour, nt.DynSGD, nt.AGN, nt.Synchronous, nt.EASGD, nt.EAMSGD, nt.GEM, nt.LocalSGD, nt.DiLoCo]
ALL += [nt.Steady]
EVERY = [nt.EASGD, nt.EAMSGD, nt.LocalSGD, nt.DiLoCo]


def anywhere(folder, size, epochs, wrapper, samples=30, **options):
    """Train in one process (`size` 1) or on threads as ranks; each rank's weights, statistics and epochs."""

    def program(world):
        torch.manual_seed(0)
        model = torch_checkpoint.initialised(
            torch.nn.Sequential(
                torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)
            )
        )
        makes = torch.optim.Adam if wrapper in (nt.Downpour, nt.Synchronous, nt.LocalSGD) else torch.optim.SGD
        extra = {nt.EAMSGD: {"momentum": 0.9, "nesterov": True}, nt.GEM: {"momentum": 0.9}}.get(wrapper, {})
        inner = makes(model.parameters(), lr=0.01, **extra)
        optimizer = wrapper(inner, model=model, **({} if world is None else {"world": world}), **options)
        x = torch.linspace(-1, 1, 5 * samples).reshape(samples, 5)  # no batch has one sample
        data = torch.utils.data.TensorDataset(x, x[:, :3] ** 2)
        sampler = nt.ShardSampler(data, optimizer=optimizer, seed=3)
        loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
        begun = []
        checkpoint = nt.Checkpoint(folder, optimizer)
        for epoch in checkpoint.epochs(epochs):
            begun.append(epoch)
            for inputs, targets in checkpoint.batches(loader):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        optimizer.close()
        return np.concatenate([one.numpy().ravel() for one in model.state_dict().values()]), begun

    if size == 1:
        return [program(None)]
    with MemoryCluster(size) as cluster:
        return cluster.run(program, 180)


@pytest.mark.parametrize("wrapper", [nt.Downpour, nt.Synchronous, nt.LocalSGD, nt.Steady])
def test_from_one_process_to_a_server_and_back_the_bits_are_those_of_one_process(tmp_path, capsys, wrapper):
    """With one worker, so that the plain loop is the independent computation; Adam has a state to lose."""
    options = {"every": 1} if wrapper in EVERY else {}
    for size, epochs in ((1, 2), (2, 3), (1, 5), (2, 6)):
        found = anywhere(tmp_path / "moved", size, epochs, wrapper, **options)
        assert found[-1][1] == list(range({2: 0, 3: 2, 5: 3, 6: 5}[epochs], epochs))
    (straight, _), *_ = anywhere(tmp_path / "straight", 1, 6, wrapper, **options)
    for weights, _ in found:
        assert np.array_equal(weights, straight)
    told = capsys.readouterr().out
    assert told.count("was saved by one process, but this run has 1 worker: all workers start at the") == 2
    assert told.count("was saved with 1 worker, but this run is one process: it starts at the centre") == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.parametrize("options", [{}, {"servers": 0}, {"group_size": 2}], ids=str)
def test_all_ranks_take_over_the_weights_of_one_process_and_it_takes_over_the_centre(
    tmp_path, wrapper, options
):
    size = 5 if "group_size" in options else 3
    options = {**options, **({"every": 1} if wrapper in EVERY else {})}
    ((weights, _),) = anywhere(tmp_path, 1, 2, wrapper, **options)
    for rank, (there, begun) in enumerate(anywhere(tmp_path, size, 2, wrapper, **options)):
        assert np.array_equal(there, weights), rank
        assert begun == []
    ranks = anywhere(tmp_path, size, 3, wrapper, **options)
    center = ranks[0][0]
    assert not np.array_equal(center, weights)
    ((back, begun),) = anywhere(tmp_path, 1, 3, wrapper, **options)
    assert np.array_equal(back, center)
    assert begun == []


@pytest.mark.parametrize(("before", "after"), [(3, 4), (4, 3), (3, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("wrapper", [nt.Downpour, nt.Steady])
def test_another_data_set_is_refused_with_any_number_of_workers(tmp_path, before, after, wrapper):
    anywhere(tmp_path, before, 1, wrapper)
    newest = Store(tmp_path).last()
    with pytest.raises(ConfigurationError) as caught:
        anywhere(tmp_path, after, 2, wrapper, samples=34)
    assert str(caught.value) == (
        f"the newest checkpoint in {tmp_path} belongs to another training: its data set has 30 samples, but "
        "this one has 34; choose another folder, or delete this one to start anew"
    )
    assert caught.value.collective
    assert Store(tmp_path).last() == newest
    assert anywhere(tmp_path, after, 2, wrapper)[-1][1] == [1]


def test_a_checkpoint_that_tells_nothing_of_its_data_set_is_loaded(tmp_path):
    """As an older version has saved it."""
    anywhere(tmp_path, 3, 1, nt.Downpour)
    store = Store(tmp_path)
    newest = store.newest()
    files = {name: newest.read(name) for name in newest.manifest.files}
    facts = dict(newest.manifest.facts)
    assert facts.pop("data") == {"samples": 30}
    assert store.save(files, facts)
    assert [begun for _, begun in anywhere(tmp_path, 4, 2, nt.Downpour, samples=34)] == [[1]] * 4


def of_columns(folder, size, epochs, **columns):
    """Train in one process (`size` 1) or on threads as ranks, on batches of columns in memory."""

    def program(world):
        model = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), model=model, world=world)
        batches = nt.Batches(columns, features=[*columns], batch_size=4, optimizer=optimizer)
        checkpoint = nt.Checkpoint(folder, optimizer)
        for _ in checkpoint.epochs(epochs):
            for ((x, *_),) in checkpoint.batches(batches):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        optimizer.close()

    if size == 1:
        program(None)
    else:
        with MemoryCluster(size) as cluster:
            cluster.run(program, 60)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 4)])
def test_batches_of_other_columns_or_samples_are_refused_by_name(tmp_path, before, after):
    x, z = torch.ones(12, 2), torch.ones(12)
    of_columns(tmp_path, before, 1, x=x, z=z)
    with pytest.raises(ConfigurationError, match="its data set has 12 samples, but this one has 11; choose"):
        of_columns(tmp_path, after, 2, x=x[:11], z=z[:11])
    there = r"the columns of its data set are x float32\[2\], z float32\[\], but those of this one are x "
    for other in ({"x": x, "y": z}, {"x": x}, {"x": x, "z": z.double()}):
        with pytest.raises(ConfigurationError, match=there):
            of_columns(tmp_path, after, 2, **other)
    of_columns(tmp_path, after, 2, x=x, z=z)


def test_batches_that_another_sampler_makes_may_be_of_another_size_on_other_workers(tmp_path):
    def program(world):
        model = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), model=model, world=world)
        data, size = torch.ones(24, 2), 12 // (world.size - 1)
        drawn = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), size, drop_last=False)
        loader = torch.utils.data.DataLoader(data, batch_sampler=nt.ShardSampler(drawn, optimizer=optimizer))
        checkpoint, taken = nt.Checkpoint(tmp_path, optimizer), 0
        for _ in checkpoint.epochs(world.size - 2):
            for x in checkpoint.batches(loader):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                taken += len(x)
        optimizer.close()
        return taken

    for size in (3, 4):
        with MemoryCluster(size) as cluster:
            assert sum(cluster.run(program, 60)) == 24


def test_one_process_and_two_servers_cannot_continue_each_other(tmp_path):
    anywhere(tmp_path / "one", 1, 1, nt.Downpour)
    with pytest.raises(ConfigurationError, match="each of 2 servers a part of it; continue with servers=1"):
        anywhere(tmp_path / "one", 4, 2, nt.Downpour, servers=2)
    anywhere(tmp_path / "two", 4, 1, nt.Downpour, servers=2)
    with pytest.raises(ConfigurationError, match="each of 2 servers a part of it; continue with servers=1"):
        anywhere(tmp_path / "two", 1, 2, nt.Downpour)


def test_no_epoch_of_leased_samples_is_lost_between_two_starts(tmp_path):
    on_ranks(tmp_path, 3, nt.Downpour, epochs=1, assignment="dynamic")
    again = on_ranks(tmp_path, 3, nt.Downpour, epochs=3, assignment="dynamic")
    for epoch in (1, 2):
        assert sum(taken[epoch] for taken in again) == 24


def test_with_another_number_of_workers_it_is_refused_with_the_reason_elsewhere(tmp_path):
    on_ranks(tmp_path, 3, nt.Synchronous)
    with pytest.raises(
        ConfigurationError, match="saved with 2 workers, but this run has 3: each step is the mean"
    ):
        on_ranks(tmp_path, 4, nt.Synchronous)
    with pytest.raises(ConfigurationError, match="the number of servers is 1 there, but 2 here"):
        on_ranks(tmp_path, 4, nt.Synchronous, servers=2)


def test_what_cannot_be_saved_is_refused_before_the_training(tmp_path):
    with pytest.raises(ConfigurationError, match="neither load_state_dict nor load"):
        train(tmp_path, also={"number": 3})


class Window:
    """What a script may want to save."""

    def __init__(self, last):
        self.last = last

    def state_dict(self):
        return {"last": self.last}

    def load_state_dict(self, state):
        self.last = state["last"]


@pytest.mark.parametrize(
    "last",
    [deque([1.0]), [Path("a")], {"x": lambda: 0}, np.array([None]), threading.Lock()],
    ids=lambda last: type(last).__name__,
)
def test_what_could_not_be_read_again_is_refused_before_the_training(tmp_path, last):
    begun = []
    with pytest.raises(ConfigurationError, match=r"also\['window'\]\['last'\].* is a .*without running code"):
        begun += train(tmp_path, also={"window": Window(last)})
    assert not begun
    assert not [*tmp_path.glob("checkpoint-*")]


@pytest.mark.parametrize(
    "last",
    [
        defaultdict(float, {"a": 1.0}),
        OrderedDict(a=np.arange(3.0)),
        Counter("aab"),
        {"a": {np.int64(3): np.float32(0.5)}},
        (torch.Size([2]), torch.float16, True, None),
    ],
    ids=lambda last: type(last).__name__,
)
def test_what_can_be_saved_comes_back(tmp_path, last):
    train(tmp_path, also={"window": Window(last)})
    again = Window(None)
    train(tmp_path, also={"window": again}, epochs=2)
    assert type(again.last) is (dict if type(last) is defaultdict else type(last))
    if type(last) is OrderedDict:
        assert again.last["a"].tolist() == [0, 1, 2]
    else:
        assert again.last == last


@pytest.mark.parametrize("minutes", [-1, float("nan"), "a", True, None])
def test_impossible_minutes_are_refused(tmp_path, minutes):
    optimizer = nt.Downpour(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=r"minutes=.* must be a number of at least 0"):
        nt.Checkpoint(tmp_path, optimizer, minutes=minutes)


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(tmp_path):
    train(tmp_path, epochs=3)
    (tmp_path / "checkpoint-000003" / "rank0.pt").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match=r"rank0\.pt has 0 bytes.*from checkpoint-000002 instead"):
        assert [epoch for epoch, _ in train(tmp_path, epochs=3)] == [2, 2, 2]


def test_the_best_is_kept(tmp_path):
    model = torch.nn.Linear(1, 1)
    checkpoint = nt.Checkpoint(tmp_path, nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1)), keep=1)
    for epoch in checkpoint.epochs(4):
        checkpoint.score([3.0, 1.0, 2.0, 4.0][epoch])
    scores = [json.loads(path.read_text())["score"] for path in sorted(tmp_path.glob("*/manifest.json"))]
    assert scores == [1.0, 4.0]


@pytest.mark.parametrize(("batches", "epochs"), [(1, 1), (1, 0), (2, 2)])
def test_a_score_is_that_of_the_weights_it_was_given_for(tmp_path, batches, epochs):
    model = torch.nn.Linear(1, 1)
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.ones(5, 1)
    loader = torch.utils.data.DataLoader(data, sampler=nt.ShardSampler(data))
    checkpoint = nt.Checkpoint(tmp_path, optimizer, batches=batches, epochs=epochs, keep=1)
    scored = {}
    for epoch in checkpoint.epochs(4):
        for x in checkpoint.batches(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        score = [0.3, 0.1, 0.5, 0.6][epoch]
        scored[score] = model.weight.item()
        checkpoint.score(score)
    kept = {}
    for path in tmp_path.glob("*/manifest.json"):
        score = json.loads(path.read_text())["score"]
        if score is not None:
            (saved,) = unpacked((path.parent / "rank0.pt").read_bytes())["modules"]
            kept[score] = saved["weight"].item()
    assert kept.items() <= scored.items()
    assert (0.1 in kept) == bool(epochs)


class Stop(Exception):
    """Ends a training."""


@pytest.mark.parametrize("stop", [None, *range(1, 12, 2)])
@pytest.mark.parametrize(
    "wraps", [lambda optimizer, loader: loader, lambda optimizer, loader: optimizer.epoch(loader)]
)
def test_a_loader_that_draws_its_order_goes_on_in_it(tmp_path, stop, wraps):
    def trained(folder, stop=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=1e-3))
        data = torch.arange(12.0).reshape(12, 1)
        loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
        checkpoint = nt.Checkpoint(folder, optimizer, batches=1)
        seen = []
        try:
            for epoch in checkpoint.epochs(3):
                for x in checkpoint.batches(wraps(optimizer, loader)):
                    if len(seen) == stop:
                        raise Stop
                    seen.append((epoch, x.flatten().tolist()))
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
        except Stop:
            pass
        report = optimizer.report()
        return seen, model.weight.item(), (report.steps, report.samples)

    whole, weight, counts = trained(tmp_path / "whole")
    before = trained(tmp_path / "run", stop)[0] if stop else []
    torch.manual_seed(9)
    torch.rand(3)
    after, *found = trained(tmp_path / "run")
    assert (before + after, *found) == (whole, weight, counts)


def test_a_tree_of_tensors_and_arrays_comes_back(tmp_path):
    tree = {"a": np.arange(3, dtype=np.float32), "b": [torch.ones(2, dtype=torch.bfloat16), (1, None, "x")]}
    again = unpacked(packed(tree))
    assert again["a"].dtype == np.float32
    assert again["a"].tolist() == [0.0, 1.0, 2.0]
    assert again["b"][0].dtype == torch.bfloat16
    assert again["b"][1] == (1, None, "x")
    with pytest.raises(ConfigurationError, match="cannot be read and is probably damaged; use another"):
        unpacked(b"nonsense")


def run(tmp_path, ranks, name, *options, stop_at=0, how="raise"):
    (tmp_path / name).mkdir(exist_ok=True)
    folders = [str(tmp_path / f"run-{name}"), str(tmp_path / name)]
    return mpiexec(ranks, PROGRAM, *folders, str(stop_at), how, *options, timeout_s=100)


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how", "options"),
    [
        (3, "raise", ["wrapper=Synchronous"]),
        (3, "raise", ["wrapper=EASGD", "every=4", "group_size=2"]),
        (2, "raise", ["wrapper=Synchronous", "servers=0"]),
        (3, "raise", ["wrapper=Synchronous", "wire=int8"]),
        pytest.param(2, "signal", ["wrapper=Downpour", "wire=topk"], marks=pytest.mark.extended),
        pytest.param(
            2, "raise", ["wrapper=LocalSGD", "every=4", "wire=bfloat16"], marks=pytest.mark.extended
        ),
        pytest.param(
            3, "signal", ["wrapper=EASGD", "every=4", "wire=int8", "group_size=2"], marks=pytest.mark.extended
        ),
        pytest.param(2, "signal", ["wrapper=Synchronous", "servers=0"], marks=pytest.mark.extended),
        pytest.param(3, "raise", ["wrapper=EASGD", "servers=0", "file=a.h5"], marks=pytest.mark.extended),
        pytest.param(3, "signal", ["wrapper=Downpour", "group_size=2"], marks=pytest.mark.extended),
        pytest.param(
            3, "signal", ["wrapper=Synchronous", "group_size=2", "file=a.h5"], marks=pytest.mark.extended
        ),
        pytest.param(
            3,
            "signal",
            ["wrapper=Downpour", "group_size=2", "assignment=dynamic"],
            marks=pytest.mark.extended,
        ),
        pytest.param(
            3,
            "raise",
            ["wrapper=EASGD", "every=4", "group_size=2", "assignment=dynamic", "file=a.h5"],
            marks=pytest.mark.extended,
        ),
        pytest.param(3, "signal", ["wrapper=Synchronous"], marks=pytest.mark.extended),
        pytest.param(2, "raise", ["wrapper=Downpour"], marks=pytest.mark.extended),
        pytest.param(2, "raise", ["wrapper=EASGD", "every=4"], marks=pytest.mark.extended),
        pytest.param(2, "signal", ["wrapper=EASGD", "every=4", "file=a.h5"], marks=pytest.mark.extended),
        pytest.param(3, "raise", ["wrapper=Synchronous", "file=a.h5"], marks=pytest.mark.extended),
        pytest.param(
            2, "signal", ["wrapper=Downpour", "file=a.h5", "assignment=dynamic"], marks=pytest.mark.extended
        ),
    ],
    ids=str,
)
def test_a_training_of_several_ranks_goes_on_bit_for_bit(tmp_path, ranks, how, options):
    torch_checkpoint.write(tmp_path / "a.h5")
    options = [one.replace("a.h5", str(tmp_path / "a.h5")) for one in options]
    done = run(tmp_path, ranks, "straight", *options)
    assert done.returncode == 0, done.stderr
    stopped = run(tmp_path, ranks, "stopped", *options, stop_at=11, how=how)
    assert stopped.returncode != 0
    again = run(tmp_path, ranks, "stopped", *options)
    assert again.returncode == 0, again.stderr
    for rank in range(ranks):
        one, other = (np.load(tmp_path / name / f"rank{rank}.npz") for name in ("straight", "stopped"))
        assert np.array_equal(one["weights"], other["weights"]), rank
        assert rank == 0 or 0 < other["done"] < one["done"]


def test_the_page_about_checkpoints_runs_as_it_stands_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = code("python", "docs/checkpoint.md")
    first, second = {}, {}
    exec(compile(block, "checkpoint.md", "exec"), first)
    exec(compile(block, "checkpoint.md", "exec"), second)
    assert first["epoch"] == 4
    assert "epoch" not in second
    for one, other in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(one, other)
