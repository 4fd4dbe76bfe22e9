"""Leases of samples to groups: each sample goes to one rank, and the ranks of a group make as many steps."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from nnlo_common import PeerLostError
from nnlo_common.data._selection import evenly
from nnlo_common.testing import InjectedFault
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
h5py = pytest.importorskip("h5py")

import nnlo_torch as nt  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402

pytestmark = pytest.mark.framework("torch")

SIZE = 53  # neither 2 nor 3 divides it
LAYOUTS = [(5, 1, 2), (7, 1, 2), (8, 2, 3)]  # ranks, servers, ranks of a group


@pytest.fixture
def path(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(SIZE)
    return tmp_path / "a.h5"


def sampled(optimizer, _path, **options):
    """Batches of indices by a sampler, and what has the position."""
    sampler = nt.ShardSampler(range(SIZE), assignment="dynamic", unit=2, optimizer=optimizer, **options)
    return torch.utils.data.DataLoader(range(SIZE), batch_size=2, sampler=sampler), sampler


def read(optimizer, path, **options):
    """The same from a file."""
    batches = nt.H5Batches(
        str(path), features="x", batch_size=2, window=2, assignment="dynamic", optimizer=optimizer, **options
    )
    return batches, batches


def bucketed(optimizer, path, **options):
    """The same in batches of rows of like length, with weights."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    file, numbers = path.with_name(f"{optimizer.rank}.parquet"), np.arange(SIZE)
    rows = [[float(number)] * (number * 7 % 5) for number in numbers]
    pq.write_table(pa.table({"rows": rows, "n": numbers, "w": numbers / 2}), file, row_group_size=11)
    batches = nt.Batches(
        str(file),
        features="rows",
        labels="n",
        weights="w",
        pad=5,
        mask=True,
        bucket=True,
        batch_size=2,
        window=2,
        assignment="dynamic",
        optimizer=optimizer,
        **options,
    )
    return batches, batches


CLASSES = np.repeat(range(5), [11, 7, 5, 2, 1])
# Each of the five classes as often as the largest: 55 samples, which neither 2 nor 3 divides.
BALANCED = Counter(np.concatenate([*evenly(CLASSES, "balance='y'")]).tolist())


def balanced(optimizer, _path, **options):
    """The same with the samples of rare classes several times."""
    columns = {"x": np.arange(len(CLASSES)), "y": CLASSES}
    batches = nt.Batches(
        columns,
        features="x",
        balance="y",
        batch_size=2,
        window=2,
        assignment="dynamic",
        optimizer=optimizer,
        **options,
    )
    return batches, batches


SOURCES = pytest.mark.parametrize("source", [sampled, read])
ALL_SOURCES = pytest.mark.parametrize("source", [sampled, read, bucketed, balanced])


def begun(world, servers=1, group_size=2, name="Downpour"):
    torch.manual_seed(1)
    model = cases.model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.02)
    return getattr(nt, name)(plain, model=model, world=world, servers=servers, group_size=group_size)


def trained(loader, optimizer, stop=None, **options):
    """The samples of an epoch, with a step for each batch."""
    inputs = cases.data()[0]

    def backward(batch):
        rows = batch if isinstance(batch, torch.Tensor) else batch[0]
        if len(batch) == 3 and not isinstance(batch, torch.Tensor):
            (filled, mask), rows, weights = batch
            assert torch.equal(weights, rows / 2)
            assert torch.equal(mask.sum(1), rows * 7 % 5)
            assert torch.equal(filled, mask * rows[:, None])
            assert filled.shape[1] == max(1, int(mask.sum(1).max()))
        optimizer._model(inputs[rows]).square().mean().backward()
        return rows.tolist()

    return cases.trained_epoch(loader, optimizer, backward, stop, **options)


def check(shares, k, size=SIZE, expected=None):
    """Each sample once, or again in a batch without weight, and equally many batches on a group's ranks."""
    dealt = Counter(sample for one in shares for sample in one)
    expected = Counter([*dealt]) if expected is None else expected
    assert expected.total() == size
    assert not expected - dealt
    assert dealt.total() - size <= -size % k
    for lead in range(0, len(shares), k):
        assert len({(len(one) + 1) // 2 for one in shares[lead : lead + k]}) == 1


def whole_epoch(source):
    """How many samples an epoch has, and how often each comes."""
    return {"size": 55, "expected": BALANCED} if source is balanced else {"expected": Counter(range(SIZE))}


@pytest.mark.sampled(4)
@ALL_SOURCES
@pytest.mark.parametrize(("ranks", "servers", "k"), LAYOUTS)
@pytest.mark.parametrize("name", ["Downpour", "Synchronous"])
def test_each_sample_goes_to_one_rank_in_each_epoch(ranks, servers, k, source, name, path):
    def program(world):
        optimizer = begun(world, servers, k, name)
        loader, _ = source(optimizer, path)
        epochs = [trained(loader, optimizer) for _ in range(3)]
        optimizer.close()
        return epochs, torch.cat([one.detach().flatten() for one in optimizer._model.parameters()])

    found, whole = on_ranks(ranks, program), whole_epoch(source)
    for epoch in range(3):
        assert [epochs[epoch] for epochs, _ in found[:servers]] == [[]] * servers
        check([epochs[epoch] for epochs, _ in found[servers:]], k, **whole)
    assert sorted(found[-1][0][0]) != sorted(found[-1][0][1])
    for lead in range(servers, ranks, k):
        assert all(torch.equal(one, found[lead][1]) for _, one in found[lead : lead + k])


@SOURCES
def test_a_slow_group_gets_less(source, path):
    """Rank 4 cannot make its group's third step before the other group has taken most of the epoch."""
    done = threading.Event()

    def program(world):
        optimizer = begun(world)
        loader, _ = source(optimizer, path)

        def wait(seen):
            if world.rank == 4 and len(seen) == 6:
                done.wait(30)
            if world.rank == 1 and len(seen) == 14:
                done.set()

        seen = trained(loader, optimizer, before_step=wait)
        done.set()
        optimizer.close()
        return seen

    _, *shares = on_ranks(5, program)
    check(shares, 2)
    assert len(shares[0]) >= 14 > len(shares[2])


@ALL_SOURCES
@pytest.mark.parametrize("stops", [(1, 1), (3, 1), (2, 5)], ids=str)
def test_the_rest_of_an_epoch_is_what_was_missing(source, stops, path):
    """A whole epoch, and a part of one; all save, and a second training resumes."""
    kept = {}

    def first(world):
        optimizer = begun(world)
        loader, position = source(optimizer, path)
        trained(loader, optimizer)
        seen = trained(loader, optimizer, stops[(world.rank - 1) // 2] if world.rank else None)
        kept[world.rank] = position.state_dict()
        optimizer.mean({})  # now the server has read its ledger
        optimizer.close()
        return seen

    def second(world):
        optimizer = begun(world)
        loader, position = source(optimizer, path)
        position.load_state_dict(kept[world.rank])
        assert position.state_dict() == kept[world.rank]
        epochs = [trained(loader, optimizer) for _ in range(2)]
        optimizer.close()
        return epochs

    (_, *before), (_, *after) = on_ranks(5, first), on_ranks(5, second)
    check([seen + rest for seen, (rest, _) in zip(before, after, strict=True)], 2, **whole_epoch(source))
    check([following for _, following in after], 2, **whole_epoch(source))


@SOURCES
@pytest.mark.parametrize("dies", [3, 4])
def test_what_a_dead_group_had_is_given_out_again(source, dies, path):
    """It has used up its first lease; of the second it had begun a batch."""
    met = threading.Event()
    first_lease = 2 if source is sampled else 4  # samples of each rank, in batches of 2

    def program(world):
        try:
            optimizer = begun(world)
            loader, _ = source(optimizer, path)

            def wait(seen):
                met.set() if world.rank in (3, 4) else met.wait(30)

            epochs = [trained(loader, optimizer, before_step=wait) for _ in range(2)]
            optimizer.close()
        except PeerLostError:  # as a rank ends that loses another of its group
            raise InjectedFault(f"rank {world.rank} ends") from None
        return epochs

    def prepare(cluster):
        cluster.fail(dies, "add up in group", first_lease // 2 + 1)

    _, *living, third, fourth = on_ranks(5, program, prepare=prepare)
    assert isinstance(third, InjectedFault)
    assert isinstance(fourth, InjectedFault)
    check([following for _, following in living], 2)
    check([seen for seen, _ in living], 2, SIZE - 2 * first_lease)


@SOURCES
def test_a_group_that_breaks_off_leaves_the_rest_to_others(source, path):
    first = threading.Event()

    def program(world):
        optimizer = begun(world)
        loader, _ = source(optimizer, path)
        if world.rank in (1, 2):
            seen = trained(loader, optimizer, stop=1, before_step=lambda seen: first.set())
        else:
            seen = trained(loader, optimizer, before_step=lambda seen: first.wait(30))
        optimizer.evaluate(lambda x: {"x": x.mean()}, [])  # ends the epoch
        rest = trained(loader, optimizer)
        optimizer.close()
        return seen, rest

    _, *found = on_ranks(5, program)
    check([seen for seen, _ in found], 2)
    check([rest for _, rest in found], 2)
    assert [len(seen) for seen, _ in found[:2]] == [2, 2]


@SOURCES
def test_without_a_server_nothing_is_leased(source, path):
    """All ranks are one worker, so that "dynamic" is "static", also on resuming."""

    def program(world):
        optimizer = begun(world, 0, None, "Synchronous")
        loader, position = source(optimizer, path)
        seen = trained(loader, optimizer, stop=2)
        state = position.state_dict()
        position.load_state_dict(state)
        rest = trained(loader, optimizer)
        optimizer.close()
        return seen + rest

    check(on_ranks(3, program), 3)
