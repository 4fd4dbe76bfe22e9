"""Groups that go on when ranks die: whoever dies wherever, those that live have the same results."""

from __future__ import annotations

import itertools
import re
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import SGD, Adam, Downpour, Participant, Steady, Synchronous
from nnlo_common.cluster.transport._endpoint import MemberLostError
from nnlo_common.testing import InjectedFault, MemoryCluster
from nnlo_common.training._group_rank import GroupRank, Meeting

TIMEOUT_S = 60.0


# -- a group in which an operation may end with an error on some ranks and not on others, as with MPI -------


class Fabric:
    """What the threads of a test share.

    Args:
        deaths: of each rank that dies, the number of its operation, and whether it has brought its part.
        misses: of a rank and an operation, whether the rank misses its result when another has died by then.
    """

    def __init__(self, deaths, misses):
        self.changed = threading.Condition()
        self.deaths, self.misses = dict(deaths), misses
        self.gone, self.brought, self.revoked = set(), {}, set()


class UnsureGroup:
    """The ranks of a group, as one of them sees it."""

    def __init__(self, fabric, rank, ranks, name=()):
        self.fabric, self.rank, self.ranks, self.name = fabric, rank, tuple(ranks), name
        self.index, self.turn, self.made = self.ranks.index(rank), 0, [0]

    def gather(self, numbers):
        return np.stack(self.all_of(numbers.copy()))

    def gather_bytes(self, data):
        return self.all_of(data)

    def add_up(self, vector):
        np.copyto(vector, np.sum(self.all_of(vector.copy()), axis=0))

    def broadcast(self, data):
        np.copyto(data, self.all_of(data.copy())[0])
        return self

    def wait(self):
        return True

    def barrier(self):
        self.all_of(None)

    def close(self):
        pass

    def all_of(self, item):
        fabric, self.turn = self.fabric, self.turn + 1
        key = self.name, self.ranks, self.turn
        self.made[0] += 1
        with fabric.changed:
            number, brings = fabric.deaths.get(self.rank, (-1, False))
            dies = number == self.made[0]
            if brings or not dies:
                fabric.brought.setdefault(key, {})[self.rank] = item
            if dies:
                fabric.gone.add(self.rank)
            fabric.changed.notify_all()
            if dies:
                raise InjectedFault(f"rank {self.rank} dies")
            here = fabric.brought[key]
            while len(here) < len(self.ranks):
                if (self.name, self.ranks) in fabric.revoked or fabric.gone & set(self.ranks) - here.keys():
                    raise MemberLostError(-1, "has died")
                assert fabric.changed.wait(TIMEOUT_S), "the group hangs"
            if fabric.gone & set(self.ranks) and fabric.misses(self.rank, key):
                raise MemberLostError(-1, "has died")
            return [here[rank] for rank in self.ranks]

    def end(self, dead):
        raise InjectedFault(f"rank {self.rank} ends, because rank {dead} has died")

    def without_dead(self):
        fabric, key = self.fabric, ("living", self.name, self.ranks)
        with fabric.changed:
            fabric.revoked.add((self.name, self.ranks))
            here = fabric.brought.setdefault(key, {})
            here[self.rank] = None
            fabric.changed.notify_all()
            while not set(self.ranks) <= here.keys() | fabric.gone:
                assert fabric.changed.wait(TIMEOUT_S), "the living do not meet"
            left = [rank for rank in self.ranks if rank in here]
        found = UnsureGroup(fabric, self.rank, left, key)
        found.made = self.made
        return found


def together(size, deaths, misses, program):
    """Run a program on all ranks; return what each has, or its death."""
    fabric, results = Fabric(deaths, misses), [None] * size

    def run(rank):
        group = GroupRank(UnsureGroup(fabric, rank, range(size)), lasting="any")
        try:
            results[rank] = program(rank, group)
        except BaseException as error:
            results[rank] = error
        with fabric.changed:
            fabric.gone.add(rank)
            fabric.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    return results


def gradient(rank, step):
    return np.random.default_rng([rank, step]).integers(-50, 50, 5).astype("f4")


def talk(rank, group, rounds=5):
    """Call everything in turn; return all that it has returned, without the last, which some may miss."""
    found = []
    for step in range(rounds):
        mine = gradient(rank, step)
        group.mean(mine, 2.0 if step % 2 else 1.0 + rank)
        found.append(("mean", step, mine.tobytes(), group.weight))
        found.append(("meet", *group.meet(Meeting.STEP, rank)[:, 0].tolist()))
        told = group.gather_bytes(b"x" * (rank + step))
        found.append(("bytes", *told))
        numbers = np.full(3, rank, "f4")
        group.copy_from_lead(numbers)
        found.append(("lead", *numbers.tolist()))
        found.append(("living", group.group.ranks, group.leads))
    group.meet(Meeting.LEAVE)
    return found


@st.composite
def deaths_in(draw, size):
    dead = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    return {rank: (draw(st.integers(1, 45)), draw(st.booleans())) for rank in dead}


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_all_that_live_get_the_same_whoever_dies_wherever(data):
    size = data.draw(st.integers(2, 5))
    deaths = data.draw(deaths_in(size))
    coins = data.draw(st.lists(st.booleans(), min_size=1, max_size=40))

    def misses(rank, operation):
        return coins[zlib.crc32(repr((rank, operation)).encode()) % len(coins)]

    results = together(size, deaths, misses, talk)
    left = [rank for rank in range(size) if not isinstance(results[rank], InjectedFault)]
    assert left
    for rank in left:
        assert isinstance(results[rank], list), results[rank]
    first = results[left[0]]
    for rank in left[1:]:
        for one, other in zip(first[:-1], results[rank][:-1], strict=True):
            assert one[:2] == other[:2] if one[0] == "living" else one == other
    for what, *told in first[:-1]:
        if what == "mean":
            assert told_mean_is_right(told, size, left)


def told_mean_is_right(told, size, left):
    """Whether a mean is that of some ranks, among them all that have lived to the end."""
    step, mean, weight = told
    others = [rank for rank in range(size) if rank not in left]
    for count in range(len(others) + 1):
        for some in itertools.combinations(others, count):
            ranks = sorted([*left, *some])
            weights = np.array([2.0 if step % 2 else 1.0 + rank for rank in ranks])
            wanted = np.average([gradient(rank, step) for rank in ranks], axis=0, weights=weights)
            if weight == weights.sum() and np.allclose(np.frombuffer(mean, "f4"), wanted, atol=1e-4):
                return True
    return False


def test_ranks_that_are_ahead_give_the_result_to_those_that_missed_it():
    """The third operation has the part of the dead rank, but one of the others has not got the result."""

    def program(rank, group):
        return [group.gather_bytes(bytes([rank, turn])) for turn in range(4)]

    def misses(rank, operation):
        return rank == 1 and operation == ((), (0, 1, 2), 3)

    results = together(3, {2: (3, True)}, misses, program)
    assert results[0][:3] == results[1][:3]  # who has the last one leaves
    assert [len(one) for one in results[0]] == [3, 3, 3, 2]


# -- trainings without a server ---------------------------------------------------------------------------

ALGORITHMS = {
    "synchronous": (Synchronous(), SGD(0.1, momentum=0.5)),
    "adam": (Downpour(), Adam(0.05)),
    "steady": (Steady(), SGD(0.1)),
}
POINTS = [
    ("gather in group", 1),
    ("gather in group", 2),
    ("gather in group", 3),
    ("gather in group", 8),
    ("gather in group", 17),
    ("add up in group", 1),
    ("add up in group", 4),
    ("broadcast in group", 1),
]


def train(name, faults, *, size=4, epochs=2, steps=12):
    """Train all ranks as one group on a problem whose solution is 1, 2, 3."""
    algorithm, optimizer = ALGORITHMS[name]
    target = np.array([1, 2, 3], "f4")

    def program(world):
        roles = []
        me = Participant(algorithm, [np.zeros(3, "f4")], optimizer=optimizer, world=world, servers=0)
        with me:
            for _ in range(epochs):
                for number in me.batches(range(size * steps)):
                    me.gradients[0][:] = me.point[0] - target + 0.01 * (number % 5)
                    me.step()
                roles.append(me.role)
        return me.parameters[0].copy(), roles, me.report()

    with MemoryCluster(size) as cluster:
        for rank, point, occurrence in faults:
            cluster.fail(rank, point, occurrence)
        return cluster.run(program, TIMEOUT_S)


@pytest.mark.parametrize(("point", "occurrence"), POINTS)
@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_others_train_on_alike(name, dead, point, occurrence):
    results = train(name, [(dead, point, occurrence)])
    assert isinstance(results[dead], InjectedFault)
    left = [one for rank, one in enumerate(results) if rank != dead]
    first = left[0][0]
    assert np.abs(first - [1, 2, 3]).max() < 2.5
    for parameters, _, report in left:
        assert parameters.tobytes() == first.tobytes()
        assert report.steps == left[0][2].steps >= 24
        (line,) = report.lost
        assert re.match(rf"rank {dead} on \S+ has died; the others go on, at \d", line)
    roles = [one[1][-1] for one in left]
    assert roles.count("lead") == 1
    assert roles[0] == "lead"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_last_rank_trains_on_alone(name):
    faults = [(0, "add up in group", 3), (3, "add up in group", 5), (1, "gather in group", 20)]
    results = train(name, faults)
    assert [isinstance(one, InjectedFault) for one in results] == [True, True, False, True]
    parameters, roles, report = results[2]
    assert np.abs(parameters - [1, 2, 3]).max() < 2.5
    assert roles[-1] == "lead"
    assert len(report.lost) == 3


def test_the_trajectory_is_that_of_the_ranks_that_lived():
    """Bit for bit: three ranks until a death in step 5, two from then on."""
    results = train("synchronous", [(1, "add up in group", 5)], size=3)
    x, velocity = np.zeros(3, "f4"), np.zeros(3, "f4")
    target = np.array([1, 2, 3], "f4")
    for step in range(24):
        numbers = [3 * (step % 12) + rank for rank in (0, 1, 2) if rank != 1 or step < 4]
        parts = [(x - target + 0.01 * (number % 5)).astype("f4") for number in numbers]
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        mean = total / np.float32(len(parts))
        velocity = np.float32(0.5) * velocity + mean
        x = x - np.float32(0.1) * velocity
    assert results[0][0].tobytes() == results[2][0].tobytes()
    assert np.allclose(results[0][0], x, atol=1e-6)
