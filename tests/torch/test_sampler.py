"""Samplers on threads as ranks: each sample once, whoever takes it, wherever the training was interrupted."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import InjectedFault
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler  # noqa: E402

import nnlo_torch as nt  # noqa: E402

pytestmark = pytest.mark.framework("torch")

TIMEOUT_S = 180.0
#: Ranks are threads here, and what is forked in one thread inherits the locks that others hold.
PROCESSES = {"multiprocessing_context": "forkserver", "timeout": 180}
ASSIGNMENTS = ["static", "dynamic"]


def wrapped(world, wrapper="Downpour", **options):
    """An optimizer that takes part; its model is a few numbers."""
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return getattr(nt, wrapper)(plain, model=model, world=world, **options)


def step(optimizer):
    optimizer.zero_grad()
    optimizer._model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def taken(sampler, optimizer, *, train=True):
    """The elements of an epoch, with a step for each."""
    elements = []
    for element in sampler:
        if train:
            step(optimizer)
        elements.append(element)
    return elements


def once(shares, size):
    """Whether all shares together are each of `size` samples once."""
    return sorted(index for share in shares for index in share) == list(range(size))


# --- exactly once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("size", "unit"), [(0, 1), (1, 1), (2, 4), (7, 1), (7, 3), (33, 4), (40, 64)])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_each_sample_once_per_epoch(assignment, size, unit, workers):
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(size), assignment=assignment, unit=unit, optimizer=optimizer)
        epochs = [taken(sampler, optimizer, train=False) for _ in range(3)]
        optimizer.close()
        return epochs, optimizer.report().samples

    (nothing, samples), *shares = on_ranks(workers + 1, program)
    assert nothing == [[], [], []]
    assert samples == sum(count for _, count in shares) == 3 * size
    for epoch in range(3):
        assert once([epochs[epoch] for epochs, _ in shares], size)
    if size > 30:
        orders = [[index for epochs, _ in shares for index in epochs[epoch]] for epoch in range(3)]
        assert len(set(map(tuple, orders))) == 3


@pytest.mark.parametrize("wrapper", ["Downpour", "Synchronous", "LocalSGD", "EASGD", "GEM"])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_each_sample_once_while_it_is_trained_with(assignment, wrapper):
    def program(world):
        optimizer = wrapped(
            world, wrapper, **({} if wrapper in ("Downpour", "Synchronous", "GEM") else {"every": 2})
        )
        sampler = nt.ShardSampler(range(23), assignment=assignment, unit=2, optimizer=optimizer)
        epochs = [taken(sampler, optimizer) for _ in range(2)]
        optimizer.close()
        return epochs

    _, *shares = on_ranks(3, program)
    for epoch in range(2):
        assert once([epochs[epoch] for epochs in shares], 23)


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_with_several_servers_each_sample_once(assignment):
    def program(world):
        optimizer = wrapped(world, servers=2)
        sampler = nt.ShardSampler(range(11), assignment=assignment, unit=2, optimizer=optimizer)
        epochs = [taken(sampler, optimizer, train=False) for _ in range(2)]
        optimizer.close()
        return epochs

    first, second, *shares = on_ranks(4, program)
    assert first == second == [[], []]
    for epoch in range(2):
        assert once([epochs[epoch] for epochs in shares], 11)


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_samplers_made_anew_or_of_other_data_take_turns(assignment):
    """A sampler for each epoch, as in loops that make their loader inside; and two data sets in turn."""

    def program(world):
        optimizer = wrapped(world)
        other = nt.ShardSampler(range(5), assignment=assignment, unit=1, optimizer=optimizer)
        epochs = []
        for _ in range(2):
            sampler = nt.ShardSampler(range(21), assignment=assignment, unit=2, optimizer=optimizer)
            epochs.append((taken(sampler, optimizer, train=False), taken(other, optimizer, train=False)))
        optimizer.close()
        return epochs

    _, *shares = on_ranks(3, program)
    for epoch in range(2):
        assert once([epochs[epoch][0] for epochs in shares], 21)
        assert once([epochs[epoch][1] for epochs in shares], 5)


def test_alone_it_is_an_ordinary_sampler():
    for assignment in ASSIGNMENTS:
        sampler = nt.ShardSampler(range(9), assignment=assignment, unit=2, optimizer=wrapped(None))
        first, second = list(sampler), list(sampler)
        assert sorted(first) == sorted(second) == list(range(9))
        assert first != second
        assert len(sampler) == 9
        sampler.set_epoch(0)
        assert list(sampler) == first
    optimizer = wrapped(None)
    assert list(nt.ShardSampler(range(4), shuffle=False, optimizer=optimizer)) == [0, 1, 2, 3]
    assert list(nt.ShardSampler(range(4), evaluation=True, optimizer=optimizer)) == [0, 1, 2, 3]


def test_alone_a_loop_is_the_one_with_an_ordinary_sampler():
    """Stop, sample counts and the state in mid-epoch work alone, too."""
    optimizer = wrapped(None)
    sampler = nt.ShardSampler(range(10), optimizer=optimizer)
    whole = list(nt.ShardSampler(range(10), optimizer=optimizer))
    seen = []
    for index in sampler:
        seen.append(index)
        if len(seen) == 4:
            break
    again = nt.ShardSampler(range(10), optimizer=optimizer)
    again.load_state_dict(sampler.state_dict())
    assert len(again) == 6
    for index in again:
        seen.append(index)
        if len(seen) == 7:
            optimizer.stop()
    assert seen == whole[:7]
    assert optimizer.report().samples == 10 + 4 + 3


# --- orders, epochs and lengths ----------------------------------------------------------------------------


def test_the_order_is_that_of_seed_and_epoch_on_any_number_of_workers():
    def together(workers, seed, epoch):
        def program(world):
            optimizer = wrapped(world)
            sampler = nt.ShardSampler(range(20), seed=seed, optimizer=optimizer)
            sampler.set_epoch(epoch)
            share = list(sampler)
            optimizer.close()
            return share

        _, *shares = on_ranks(workers + 1, program)
        dealt = [None] * 20
        for worker, share in enumerate(shares):
            dealt[worker::workers] = share
        return dealt

    want = nt.ShardSampler(range(20), seed=4, optimizer=wrapped(None))
    want.set_epoch(2)
    assert together(1, 4, 2) == together(3, 4, 2) == list(want)
    assert together(2, 4, 3) == list(want)
    assert together(2, 5, 2) != together(2, 4, 2)


def test_set_epoch_in_a_loop_as_distributed_samplers_have_it():
    """The number given, whatever has counted up in between; 0 again begins anew."""
    sampler = nt.ShardSampler(range(12), optimizer=wrapped(None))
    counted = [list(sampler) for _ in range(3)]
    given = []
    for epoch in (0, 1, 2, 1):
        sampler.set_epoch(epoch)
        given.append(list(sampler))
    assert given == [*counted, counted[1]]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_lengths_are_those_of_the_shares(workers):
    def program(world):
        optimizer = wrapped(world)
        training = nt.ShardSampler(range(10), optimizer=optimizer)
        evaluation = nt.ShardSampler(range(10), evaluation=True, optimizer=optimizer)
        lengths = len(training), len(evaluation), len(DataLoader(range(10), 4, sampler=training))
        share, part = list(training), list(evaluation)
        optimizer.close()
        # A server, which takes none, says what the first worker does: schedulers are made from it.
        taken = -(-10 // workers) if optimizer.serves else len(share)
        assert lengths == (taken, len(part), -(-taken // 4))
        return part

    parts = on_ranks(workers + 1, program)
    assert once(parts, 10)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"assignment": "fair"}, "must be 'static', or 'dynamic' for training data"),
        ({"assignment": "dynamic", "evaluation": True}, "'dynamic' for training data"),
        ({"unit": 0}, "unit=0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, problem):
    with pytest.raises(ConfigurationError, match=problem):
        nt.ShardSampler(range(4), **options)


# --- loaders and other samplers ----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_loader_makes_batches_of_a_share(assignment, drop_last):
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(30), assignment=assignment, unit=4, optimizer=optimizer)
        loader = DataLoader(list(range(30)), batch_size=4, sampler=sampler, drop_last=drop_last)
        batches = [batch.tolist() for batch in loader]
        optimizer.close()
        return batches

    nothing, *shares = on_ranks(3, program)
    assert nothing == []
    seen = [index for batches in shares for batch in batches for index in batch]
    assert len(seen) == len(set(seen))
    if drop_last:
        assert all(len(batch) == 4 for batches in shares for batch in batches)
    else:
        assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_whole_batches_of_another_sampler_are_dealt_out(assignment):
    def batches_of(optimizer):
        inner = BatchSampler(RandomSampler(range(30)), 4, drop_last=False)
        return nt.ShardSampler(inner, assignment=assignment, unit=1, optimizer=optimizer)

    def program(world):
        optimizer = wrapped(world)
        sampler = batches_of(optimizer)
        # A loader draws a number, too: from a state of its own, as these ranks, threads, share torch's.
        loader = DataLoader(list(range(30)), batch_sampler=sampler, generator=torch.Generator())
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        optimizer.close()
        return epochs, optimizer.report().samples

    (_, samples), *shares = on_ranks(4, program)
    assert samples == 60
    alone = batches_of(wrapped(None))
    for epoch in range(2):
        dealt = [tuple(batch) for epochs, _ in shares for batch in epochs[epoch]]
        assert sorted(dealt) == sorted(map(tuple, alone))
        assert sorted(index for batch in dealt for index in batch) == list(range(30))


@pytest.mark.parametrize(
    ("element", "samples"),
    [([1, 2, 3], 3), (torch.arange(3), 3), (torch.tensor(7), 1), (7, 1), ("image_07", 1), (b"07", 1)],
    ids=str,
)
def test_a_step_weighs_as_many_samples_as_an_element_has(element, samples):
    optimizer = wrapped(None)
    list(nt.ShardSampler(Listed([element]), optimizer=optimizer))
    assert optimizer.report().samples == samples


class Listed(torch.utils.data.Sampler):
    """Yields the elements of a list, and says that it has another number of them."""

    def __init__(self, elements, size=None):
        self._elements, self._size = elements, size

    def __len__(self):
        return len(self._elements) if self._size is None else self._size

    def __iter__(self):
        return iter(self._elements)


@pytest.mark.parametrize("size", [9, 12])
def test_leases_of_a_sampler_that_is_not_as_long_as_it_said_are_refused(size):
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(Listed(range(10), size), assignment="dynamic", optimizer=optimizer)
        return taken(sampler, optimizer)

    told = f"Listed has yielded 10 elements, but its length was {size}.* assignment='static'"
    with pytest.raises(ConfigurationError, match=told):
        on_ranks(3, program)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(24)),
        lambda: RandomSampler(range(24), replacement=True, num_samples=17),
        lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 25),
    ],
    ids=["random", "replacement", "weighted"],
)
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_elements_of_a_random_sampler_are_the_same_on_all_ranks(assignment, make):
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(make(), seed=2, assignment=assignment, unit=2, optimizer=optimizer)
        epochs = [list(sampler) for _ in range(2)]
        optimizer.close()
        return epochs

    _, *shares = on_ranks(4, program)
    alone = nt.ShardSampler(make(), seed=2, optimizer=wrapped(None))
    epochs = [list(alone) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in range(2):
        assert sum((Counter(epochs[epoch]) for epochs in shares), Counter()) == Counter(epochs[epoch])


class Drawing(torch.utils.data.Sampler):
    """Shuffles by other random numbers than PyTorch's, or by the number of the epoch alone."""

    def __init__(self, kind):
        self._kind, self._epoch = kind, 0
        if kind == "epoch":
            self.set_epoch = lambda epoch: setattr(self, "_epoch", epoch)

    def __len__(self):
        return 24

    def __iter__(self):
        elements = list(range(24))
        if self._kind == "epoch":
            random.Random(self._epoch).shuffle(elements)
        else:
            {"python": random.shuffle, "numpy": np.random.shuffle}[self._kind](elements)
        return iter(elements)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("kind", ["python", "numpy", "epoch"])
def test_a_sampler_may_draw_other_numbers_than_those_of_torch(kind, batches):
    def program(world):
        optimizer = wrapped(world)
        inner = BatchSampler(Drawing(kind), 4, drop_last=False) if batches else Drawing(kind)
        sampler = nt.ShardSampler(inner, optimizer=optimizer)
        epochs = [list(sampler) for _ in range(2)]
        optimizer.close()
        return epochs

    random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    shares = on_ranks(3, program)[1:]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    for epoch in range(2):
        dealt = [element for share in shares for element in share[epoch]]
        assert sorted(np.ravel(dealt).tolist()) == list(range(24))
    assert shares[0][0] != shares[0][1]


def test_a_sampler_that_deals_by_itself_is_refused():
    inner = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(ConfigurationError, match=r"DistributedSampler .* 2 replicas by itself"):
        nt.ShardSampler(inner)
    with pytest.raises(ConfigurationError, match="DistributedSampler"):
        nt.ShardSampler(BatchSampler(inner, 2, drop_last=False))
    alone = torch.utils.data.DistributedSampler(range(8), num_replicas=1, rank=0)
    assert sorted(nt.ShardSampler(alone, optimizer=wrapped(None))) == list(range(8))


def test_the_users_random_state_is_untouched(monkeypatch):
    """On the CPU, and on all GPUs: the state of those cannot be put back where there is none."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs were seeded"))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    torch.random.default_generator.manual_seed(5)
    before = torch.random.get_rng_state()
    sampler = nt.ShardSampler(RandomSampler(range(9)), optimizer=wrapped(None))
    torch.random.set_rng_state(before)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_epoch_is_ordered_once_however_many_leases_it_has():
    class Counting(torch.utils.data.Sampler):
        def __init__(self):
            self.times = 0

        def __iter__(self):
            self.times += 1
            return iter(range(40))

        def __len__(self):
            return 40

    def program(world):
        optimizer = wrapped(world)
        inner = Counting()
        taken(
            nt.ShardSampler(inner, assignment="dynamic", unit=1, optimizer=optimizer), optimizer, train=False
        )
        optimizer.close()
        return inner.times

    assert on_ranks(2, program) == [0, 1]


@pytest.mark.parametrize("data", [5, None, (one for one in range(3))])
def test_what_has_no_length_is_refused_by_its_type(data):
    told = rf"of type {type(data).__name__}, which has no length; give .*nnlo_torch\.ShardIterable"
    with pytest.raises(ConfigurationError, match=told):
        nt.ShardSampler(data)


def test_shuffling_what_has_an_order_of_its_own_is_refused():
    with pytest.raises(ConfigurationError, match="shuffle=True was given with a RandomSampler"):
        nt.ShardSampler(RandomSampler(range(4)), shuffle=True)
    nt.ShardSampler(RandomSampler(range(4)), shuffle=False)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index * index


@pytest.mark.extended
@pytest.mark.slow
def test_processes_of_a_loader_fetch_what_the_rank_has_taken():
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(Squares(), assignment="dynamic", unit=2, optimizer=optimizer)
        loader = DataLoader(Squares(), 2, sampler=sampler, num_workers=2, **PROCESSES)
        epochs = []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                step(optimizer)
                epochs[-1] += batch.tolist()
        optimizer.close()
        return epochs, optimizer.report().samples

    (_, samples), (epochs, _) = on_ranks(2, program)
    assert samples == 48
    for epoch in epochs:
        assert sorted(epoch) == [index * index for index in range(24)]


# --- going on in mid-epoch ---------------------------------------------------------------------------------


def interrupted(assignment, stops, *, size=37, servers=1, workers=2):
    """Workers stop after so many samples, all ranks save; a second training goes on. Both parts, by rank."""
    kept: dict[int, Any] = {}

    def sampler_of(optimizer):
        return nt.ShardSampler(range(size), assignment=assignment, unit=3, seed=1, optimizer=optimizer)

    def first(world):
        optimizer = wrapped(world, servers=servers)
        sampler, seen = sampler_of(optimizer), []
        if stops[0] == "before":
            kept[world.rank] = sampler.state_dict()
        else:
            taken(sampler, optimizer, train=False)  # a whole epoch
            stop = stops[world.rank - servers] if world.rank >= servers else None
            for index in sampler:
                if len(seen) == stop:
                    break
                seen.append(index)
                if len(seen) == stop:
                    break
            kept[world.rank] = sampler.state_dict()
        optimizer.mean({})  # now the server has read its ledger
        optimizer.close()
        return seen

    def second(world):
        optimizer = wrapped(world, servers=servers)
        sampler = sampler_of(optimizer)
        sampler.load_state_dict(kept[world.rank])
        kept[world.rank] = sampler.state_dict()  # which is the same
        sampler.load_state_dict(kept[world.rank])
        length, rest = len(sampler), taken(sampler, optimizer, train=False)
        if assignment == "static" and not optimizer.serves:
            assert length == len(rest)
        after = taken(sampler, optimizer, train=False)
        optimizer.close()
        return rest, after

    return on_ranks(workers + servers, first), on_ranks(workers + servers, second)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("stops", [(1, 1), (4, 9), (3, 12), (7, 1), (18, 2)], ids=str)
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_rest_of_an_epoch_is_what_was_missing(assignment, stops, servers):
    before, after = interrupted(assignment, stops, servers=servers)
    parts = [*before, *(rest for rest, _ in after)]
    assert [len(part) for part in before[servers:]] == list(stops)
    assert once(parts, 37)
    assert once([following for _, following in after], 37)
    one = nt.ShardSampler(range(37), seed=1, optimizer=wrapped(None))
    one.set_epoch(2)
    dealt = [None] * 37
    for worker, (_, following) in enumerate(after[servers:]):
        dealt[worker::2] = following if assignment == "static" else [None] * len(dealt[worker::2])
    if assignment == "static":
        assert dealt == list(one)


def test_what_is_saved_before_an_epoch_is_the_whole_of_it():
    for assignment in ASSIGNMENTS:
        _, after = interrupted(assignment, ("before",))
        assert once([rest for rest, _ in after], 37)


def test_a_worker_that_is_first_gets_no_lease_before_the_book_is_there():
    """Rank 2 joins only when rank 1 has gone on, so the server is still waiting for all to join then."""
    kept: dict[int, Any] = {}
    gates = []

    def program(world, *, resume):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(30), assignment="dynamic", unit=2, optimizer=optimizer)
        seen = []
        if resume:
            sampler.load_state_dict(kept[world.rank])
        for index in sampler:
            seen.append(index)
            if resume and world.rank == 1:
                gates[0].set()
            if not resume and len(seen) == 3:
                break
        if not resume:
            kept[world.rank] = sampler.state_dict()
            optimizer.mean({})
        optimizer.close()
        return seen

    before = on_ranks(3, lambda world: program(world, resume=False))
    after = on_ranks(
        3,
        lambda world: program(world, resume=True),
        prepare=lambda cluster: gates.append(cluster.hold(2, "send JOIN")),
    )
    assert once([*before, *after], 30)


OTHERS = {
    "size": (lambda o: nt.ShardSampler(range(11), optimizer=o), "'size': 10", "'size': 11"),
    "seed": (lambda o: nt.ShardSampler(range(10), seed=3, optimizer=o), "'seed': 0", "'seed': 3"),
    "shuffle": (lambda o: nt.ShardSampler(range(10), shuffle=False, optimizer=o), "True", "False"),
    "assignment": (
        lambda o: nt.ShardSampler(range(10), assignment="dynamic", optimizer=o),
        "static",
        "dynamic",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_state_of_another_sampler_is_refused_and_both_are_named(what):
    make, *words = OTHERS[what]
    saved = nt.ShardSampler(range(10), optimizer=wrapped(None)).state_dict()
    with pytest.raises(ConfigurationError, match="resume with the same") as caught:
        make(wrapped(None)).load_state_dict(saved)
    assert all(word in str(caught.value) for word in words)


def test_the_state_of_another_number_of_workers_is_refused_and_both_are_named():
    saved = nt.ShardSampler(range(10), optimizer=wrapped(None)).state_dict()

    def program(world):
        optimizer = wrapped(world)
        with pytest.raises(ConfigurationError, match=r"'workers': 1.*'workers': 2"):
            nt.ShardSampler(range(10), optimizer=optimizer).load_state_dict(saved)
        optimizer.close()

    on_ranks(3, program)


def test_a_loader_that_is_ahead_of_the_loop_is_told_how_far_the_loop_is():
    optimizer = wrapped(None)
    sampler = nt.ShardSampler(range(20), shuffle=False, optimizer=optimizer)
    ahead = iter(sampler)
    fetched = [next(ahead) for _ in range(12)]
    assert fetched == list(range(12))
    again = nt.ShardSampler(range(20), shuffle=False, optimizer=optimizer)
    again.load_state_dict(sampler.state_dict(taken=4))
    assert list(again) == list(range(4, 20))
    again.load_state_dict(sampler.state_dict(taken=20))  # the whole of it: the next epoch
    assert list(again) == list(range(20))
    assert again.epoch == 1


def test_how_far_the_loop_is_cannot_be_told_to_the_book():
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(20), assignment="dynamic", optimizer=optimizer)
        with pytest.raises(ConfigurationError, match="taken=4 with assignment='dynamic'"):
            sampler.state_dict(taken=4)
        optimizer.close()

    on_ranks(2, program)


# --- leaving the loop, stopping, dying ---------------------------------------------------------------------


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_after_a_break_the_next_epoch_is_whole(assignment):
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(24), assignment=assignment, unit=2, optimizer=optimizer)
        for _ in sampler:
            break
        share = taken(sampler, optimizer, train=False)
        optimizer.close()
        return share

    _, *shares = on_ranks(3, program)
    assert once(shares, 24)


@pytest.mark.parametrize("wrapper", ["Downpour", "Synchronous"])
def test_a_break_in_mid_lease_holds_up_nobody_and_the_others_take_the_rest(wrapper):
    """Rank 1 breaks off after one sample and evaluates; rank 2 takes all that is left."""
    begun = threading.Event()

    def program(world):
        optimizer = wrapped(world, wrapper)
        sampler = nt.ShardSampler(range(24), assignment="dynamic", unit=4, optimizer=optimizer)
        share = []
        for index in sampler:
            share.append(index)
            if world.rank == 1:
                begun.set()
                break
            begun.wait(TIMEOUT_S)
        optimizer.evaluate(lambda x: {"x": x.mean()}, [])
        optimizer.close()
        return share

    _, one, others = on_ranks(3, program)
    assert len(one) == 1
    assert len(set(one + others)) == len(one + others)
    if wrapper == "Downpour":
        assert once([one, others], 24)


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("wrapper", ["Downpour", "Synchronous", "LocalSGD"])
def test_stopping_in_mid_epoch_ends_the_loops(wrapper, assignment):
    """The server asks for it when it has seen a few exchanges, while its loop serves."""

    def program(world):
        optimizer = wrapped(world, wrapper, **({"every": 1} if wrapper == "LocalSGD" else {}))
        sampler = nt.ShardSampler(range(1000), assignment=assignment, unit=2, optimizer=optimizer)
        if optimizer.serves:
            optimizer.watch(lambda: optimizer.report().exchanges >= 6 and optimizer.stop(), every_s=0)
        epochs = [taken(sampler, optimizer) for _ in range(2)]
        optimizer.close()
        return epochs

    _, *shares = on_ranks(3, program)
    for first, second in shares:
        assert len(first) < 100
        assert second == []


def test_a_slow_worker_gets_less_of_a_dynamic_epoch():
    """Rank 2 cannot send its second gradient before rank 1 has taken all that is to be had."""
    done = threading.Event()

    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(64), assignment="dynamic", unit=2, optimizer=optimizer)
        share = []
        for index in sampler:
            share.append(index)
            if world.rank == 2 and len(share) == 2:
                done.wait(TIMEOUT_S)
            step(optimizer)
            if world.rank == 1 and len(share) == 40:
                done.set()
        done.set()
        optimizer.close()
        return share

    _, fast, slow = on_ranks(3, program)
    assert once([fast, slow], 64)
    assert len(slow) < 24 < 40 <= len(fast)


def test_what_a_dead_worker_had_is_given_out_again():
    begun = threading.Event()

    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(40), assignment="dynamic", unit=2, optimizer=optimizer)
        share = []
        for index in sampler:
            share.append(index)
            begun.set() if world.rank == 1 else begun.wait(TIMEOUT_S)
            step(optimizer)
        following = taken(sampler, optimizer)
        optimizer.close()
        return share, following

    server, dead, (share, following) = on_ranks(
        3, program, prepare=lambda cluster: cluster.fail(1, "send EXCHANGE", 3)
    )
    assert isinstance(dead, InjectedFault)
    assert server == ([], [])
    # Rank 1 has used up its first lease, of two; what it had begun of the second is rank 2's.
    assert len(set(share)) == len(share) == 38
    assert sorted(following) == list(range(40))


@pytest.mark.parametrize("wrapper", ["Synchronous", "LocalSGD", "DiLoCo"])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_with_a_barrier_the_death_of_a_worker_holds_up_nobody(wrapper, assignment):
    def program(world):
        optimizer = wrapped(world, wrapper, **({} if wrapper == "Synchronous" else {"every": 1}))
        sampler = nt.ShardSampler(range(30), assignment=assignment, unit=2, optimizer=optimizer)
        epochs = [taken(sampler, optimizer) for _ in range(3)]
        optimizer.close()
        return epochs

    _, dead, *living = on_ranks(4, program, prepare=lambda cluster: cluster.fail(1, "send EXCHANGE", 2))
    assert isinstance(dead, InjectedFault)
    if assignment == "static":  # its share goes without
        assert all([len(epoch) for epoch in epochs] == [10, 10, 10] for epochs in living)
        return
    # What it had of the first epoch is made up for in that or a later one.
    assert set(range(30)) <= {index for epochs in living for epoch in epochs for index in epoch}
    counts = Counter(index for epochs in living for epoch in epochs for index in epoch)
    assert sum(counts.values()) == 90


# --- loops over an epoch without a sampler, and data sets that can only be looped over ---------------------


def test_an_epoch_over_a_loader_with_a_sampler_begins_once():
    def program(world):
        optimizer = wrapped(world)
        sampler = nt.ShardSampler(range(20), optimizer=optimizer)
        loader = DataLoader(list(range(20)), batch_size=3, sampler=sampler)
        epochs = [[index for batch in optimizer.epoch(loader) for index in batch.tolist()] for _ in range(3)]
        optimizer.close()
        server = optimizer._team.member.server
        ended = server and {peer.epochs for peer in server.peers.values()}
        return epochs, optimizer.report().samples, ended

    (nothing, samples, ended), *shares = on_ranks(3, program)
    assert nothing == [[], [], []]
    assert samples == 60
    assert ended == {3}
    for epoch in range(3):
        assert once([epochs[epoch] for epochs, *_ in shares], 20)


@pytest.mark.parametrize(
    "loop", [lambda optimizer, data: data, lambda optimizer, data: optimizer.epoch(data)]
)
def test_every_worker_takes_its_part_of_an_iterable(loop):
    def program(world):
        optimizer = wrapped(world)
        data = nt.ShardIterable(torch.arange(11), optimizer=optimizer)
        epochs = [[int(item) for item in loop(optimizer, data)] for _ in range(2)]
        optimizer.close()
        return epochs, optimizer.report().samples

    (nothing, samples), *shares = on_ranks(4, program)
    assert nothing == [[], []]
    assert samples == 22
    for epoch in range(2):
        assert once([epochs[epoch] for epochs, _ in shares], 11)
        assert [epochs[epoch] for epochs, _ in shares] == [list(range(w, 11, 3)) for w in range(3)]


def test_a_loader_without_processes_loops_over_an_iterable():
    def program(world):
        optimizer = wrapped(world)
        loader = DataLoader(nt.ShardIterable(range(11), optimizer=optimizer), batch_size=2)
        epochs = [[index for batch in loader for index in batch.tolist()] for _ in range(2)]
        optimizer.close()
        return epochs

    nothing, *shares = on_ranks(3, program)
    assert nothing == [[], []]
    for epoch in range(2):
        assert once([epochs[epoch] for epochs in shares], 11)


@pytest.mark.extended
@pytest.mark.slow
def test_processes_of_a_loader_take_parts_of_an_iterable_of_their_own():
    def program(world):
        optimizer = wrapped(world)
        data = nt.ShardIterable(range(13), optimizer=optimizer)
        loader = DataLoader(data, batch_size=2, num_workers=2, **PROCESSES)
        epochs = [[index for batch in optimizer.epoch(loader) for index in batch.tolist()] for _ in range(2)]
        optimizer.close()
        return epochs, optimizer.report().samples

    (nothing, samples), (epochs, _) = on_ranks(2, program)
    assert nothing == [[], []]
    assert samples == 26
    assert [sorted(epoch) for epoch in epochs] == [list(range(13))] * 2


def test_an_iterable_ends_when_the_training_does():
    optimizer = wrapped(None)
    data, seen = nt.ShardIterable(range(100), optimizer=optimizer), []
    for item in data:
        seen.append(item)
        if item == 4:
            optimizer.stop()
    assert seen == [0, 1, 2, 3, 4]
    assert list(data) == []
    assert optimizer.report().samples == 5


def test_who_breaks_out_of_an_epoch_may_begin_another():
    optimizer = wrapped(None)
    for batch in optimizer.epoch([torch.ones(3), torch.ones(2)]):
        assert batch.shape == (3,)
        break
    assert [len(batch) for batch in optimizer.epoch([torch.ones(3), torch.ones(2)])] == [3, 2]
    assert optimizer.report().samples == 8


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(3, 2), 3),
        (torch.tensor(1.0), 1),
        ((torch.ones(4, 2), torch.ones(4)), 4),
        ([torch.ones(5)], 5),
        ({"x": torch.ones(6, 2)}, 6),
        ({"inner": {"x": [torch.ones(2)]}}, 2),
        (torch.ones(7, 2).numpy(), 7),
        ((torch.ones(7, 2).numpy(), torch.ones(3)), 7),
        ({"names": ["a", "b"], "x": torch.ones(2, 3)}, 2),  # as loaders collate strings
        ((["a", "b", "c"], torch.ones(3)), 3),
        (({}, [], torch.ones(4)), 4),
    ],
    ids=["tensor", "number", "tuple", "list", "dict", "nested", "array", "arrays", "names", "texts", "empty"],
)
def test_the_samples_of_a_batch_are_counted(batch, samples):
    optimizer = wrapped(None)
    assert len(list(optimizer.epoch([batch]))) == 1
    assert optimizer.report().samples == samples


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_plain_loop_gets_every_sample_and_resumes(monkeypatch, assignment):
    """No optimizer is wrapped in this process, so there is no training to count for."""
    monkeypatch.setattr("nnlo_torch._wrapper._current", None)
    sampler = nt.ShardSampler(range(5), shuffle=False, assignment=assignment)
    batches = iter(sampler)
    assert [next(batches), next(batches), len(sampler)] == [0, 1, 5]
    state = sampler.state_dict()
    assert (state["taken"], state["workers"], state["lease"]) == (2, 1, None)
    resumed = nt.ShardSampler(range(5), shuffle=False, assignment=assignment)
    resumed.load_state_dict(state)
    assert [list(resumed), list(resumed)] == [[2, 3, 4], [0, 1, 2, 3, 4]]
    assert list(nt.ShardSampler(range(3), evaluation=True)) == [0, 1, 2]
    assert list(nt.ShardIterable(range(3))) == [0, 1, 2]
