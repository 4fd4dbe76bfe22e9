"""Groups: k ranks are one worker on batches k times as large; all ranks may be one group without a server."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import SGD, Adam, ConfigurationError, Downpour, Participant, Steady, Synchronous
from nnlo_common.testing import InjectedFault
from nnlo_common.training._group_rank import GroupRank, Meeting
from nnlo_common.training._joining import join
from tests.helpers.group_cases import GROUPED, IN_STEP, SIZES, batches_of, close, merged, train_grouped
from tests.helpers.numpy_cases import CASES, initial
from tests.helpers.threads import flat, on_ranks, ranks

TIMEOUT_S = 180.0


def grouped(name, sizes, size, **options):
    return on_ranks(size, lambda world: train_grouped(name, sizes, world=world, **options))


def large(name, sizes, size, k, **options):
    """The same samples in the same order, in one rank's batches for each group's."""

    def program(world):
        return train_grouped(name, merged(sizes, k), world=world, **options)

    return on_ranks(size, program)


# --- the same numbers as one rank with the large batch ---------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("name", GROUPED)
def test_one_group_is_one_rank_with_the_large_batch(name, k, servers):
    found = grouped(name, SIZES, servers + k, servers=servers, group_size=k)
    expected = large(name, SIZES, servers + 1, k, servers=servers)
    assert expected[-1][2] > 0
    assert not close(expected[-1][0], flat(initial()))
    for rank in range(servers):
        assert close(found[rank][0], expected[rank][0])
    for parameters, _, steps in found[servers:]:
        assert close(parameters, expected[-1][0])
        assert steps == expected[-1][2]


@pytest.mark.parametrize("name", IN_STEP)
def test_two_groups_are_two_ranks_with_large_batches(name):
    """Of the algorithms whose numbers do not depend on who comes first."""
    found = grouped(name, SIZES, 5, group_size=2)
    expected = large(name, SIZES, 3, 2)
    for rank, alike in enumerate([0, 1, 1, 2, 2]):
        assert close(found[rank][0], expected[alike][0])


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("name", GROUPED)
def test_without_a_server_a_group_is_one_process_with_the_large_batch(name, k):
    found = grouped(name, SIZES, k, servers=0)
    expected, _, steps = train_grouped(name, merged(SIZES, k))
    for parameters, _, made in found:
        assert close(parameters, expected)
        assert made == steps
        assert np.array_equal(parameters, found[0][0])


@pytest.mark.parametrize("name", GROUPED)
def test_members_stay_equal_bit_for_bit(name):
    """On five ranks: one server, two groups of two."""
    found = grouped(name, SIZES, 5, group_size=2)
    for lead in (1, 3):
        assert np.array_equal(found[lead][0], found[lead + 1][0])
        assert found[lead][2] == found[lead + 1][2]
    assert not np.array_equal(found[1][0], flat(initial()))


# --- the data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "k"), [(5, 2), (7, 3), (7, 2), (4, 3)])
def test_each_batch_goes_to_one_rank_and_all_ranks_of_a_group_make_as_many_steps(size, k):
    found = grouped("downpour", SIZES, size, group_size=k, epochs=1)
    seen = [sample for _, samples, _ in found for sample in samples]
    dealt = [one.tolist() for one in batches_of(SIZES, 0)]
    # The ranks for which nothing is left have the last batch, too, without weight.
    again = dealt[-1] * (-len(SIZES) % k)
    assert sorted(seen) == sorted([*(sample for one in dealt for sample in one), *again])
    for lead in range(1, size, k):
        assert len({found[rank][2] for rank in range(lead, lead + k)}) == 1


def test_a_group_takes_batches_in_a_row():
    def program(world):
        with Participant(
            Downpour(), [np.zeros(1, "f4")], optimizer=SGD(0.1), group_size=2, world=world
        ) as me:
            taken = ""
            for batch in me.batches("abcdefghijk"):
                taken += batch
                me.step()
        return me.role, taken

    assert on_ranks(5, program) == [
        ("server 0", ""),
        ("worker 0", "aei"),
        ("worker 0, member 1", "bfj"),
        ("worker 1", "cgk"),
        ("worker 1, member 1", "dhk"),
    ]


# --- one group without a server --------------------------------------------------------------------------


def ones(size=3):
    return [np.ones(size, "f4")]


def test_without_a_server_the_lead_speaks_and_its_parameters_are_the_start(capsys):
    def program(world):
        start = [np.full(2, world.rank + 1, "f4")]
        with Participant(Synchronous(), start, optimizer=SGD(0.5), servers=0, world=world) as me:
            me.say("begun")
            for _ in me.batches(range(4)):
                me.gradients[0][:] = me.point[0]
                me.step()
        return me.role, me.parameters[0].tolist(), me.report().steps

    expected = [0.25, 0.25], 2
    assert on_ranks(2, program) == [("lead", *expected), ("worker 0, member 1", *expected)]
    assert capsys.readouterr().out == "begun\n"


@pytest.mark.parametrize("stopper", [0, 1])
def test_without_a_server_the_lead_stops_all_at_the_same_step(stopper):
    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), servers=0, world=world) as me:
            for index, _ in enumerate(me.batches(range(20))):
                if index == 3 and world.rank == stopper:
                    me.stop()
                me.step()
        return me.report().steps

    assert on_ranks(2, program) == ([4, 4] if stopper == 0 else [10, 10])


def test_a_server_stops_both_ranks_of_a_group_at_the_same_step():
    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), group_size=2, world=world) as me:
            for _ in range(3):
                for _ in me.batches(range(6)):
                    me.step()
                me.stop()
        return me.report().steps

    _, lead, member = on_ranks(3, program)
    assert lead == member < 9


# --- what goes wrong is named ----------------------------------------------------------------------------


def test_ranks_that_make_different_steps_are_named():
    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), group_size=2, world=world) as me:
            for index, _ in enumerate(me.batches(range(8))):
                if index == 2 and world.rank == 2:
                    break
                me.step()

    with pytest.raises(ConfigurationError, match="rank 1 brings a gradient after 2 steps, but rank 2 ends"):
        on_ranks(3, program)


@pytest.mark.parametrize("servers", [0, 1])
def test_parameters_changed_on_one_rank_are_named(servers):
    def program(world):
        with Participant(
            CASES["easgd"].algorithm, ones(), optimizer=SGD(0.1), servers=servers, group_size=2, world=world
        ) as me:
            for index, _ in enumerate(me.batches(range(8))):
                if index == 2 and world.rank == servers + 1:
                    me.parameters[0][1] += 1
                me.step()

    text = f"parameters of rank {servers + 1} differ from those of rank {servers} of the same group after 4"
    with pytest.raises(ConfigurationError, match=text):
        on_ranks(servers + 2, program)


@pytest.mark.parametrize("all_reduce", ["mpi", "shared"])
def test_nan_on_one_rank_reaches_all_of_its_group_and_is_named(all_reduce):
    def program(world):
        options = {"servers": 0, "all_reduce": all_reduce, "world": world}
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), **options) as me:
            for step, _ in enumerate(me.batches(range(9))):
                me.gradients[0][:] = np.nan if world.rank == step == 1 else 1
                me.step()
        return np.isnan(me.parameters[0]).tolist()

    with pytest.warns(
        RuntimeWarning, match=r"of rank 1 is not finite \(NaN or infinity\) in step 2,"
    ) as seen:
        assert on_ranks(3, program) == [[True] * 3] * 3
    assert len(seen) == 1


def test_whose_nan_a_parameter_holds_is_no_divergence():
    """A sum of two NaNs has the bits of the first, and ranks add in different orders."""

    def program(world):
        group = GroupRank(world.group(range(2), naps=False))
        vector = np.array([0x3F800000, (0x7FC00000, 0xFFC00001)[world.rank]], np.uint32).view("f4")
        group.meet_alike(Meeting.END_EPOCH, vector)
        return vector.tobytes()

    first, second = on_ranks(2, program)
    assert first != second


def test_a_rank_without_weight_counts_nothing_even_if_it_is_nan():
    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), servers=0, world=world) as me:
            for _ in me.batches(range(2)):
                me.gradients[0][:] = np.nan if world.rank else 1
                me.step(0 if world.rank else 2)
        return me.parameters[0].tolist()

    assert on_ranks(2, program) == [[np.float32(0.9)] * 3] * 2


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan"), 0.0])
def test_weights_that_make_no_mean_are_refused(weight):
    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), servers=0, world=world) as me:
            for _ in me.batches(range(2)):
                me.step(weight)

    with pytest.raises(ConfigurationError, match=r"weights of a step in the group of ranks \[0, 1\]"):
        on_ranks(2, program)


@pytest.mark.parametrize("point", ["gather in group", "add up in group", "broadcast in group"])
@pytest.mark.parametrize("occurrence", [2, 5])
@pytest.mark.parametrize("dead", [1, 2, 3])
def test_a_group_goes_on_without_any_but_its_first_rank(dead, point, occurrence):
    """A server, a group of ranks 1 and 2, and a group of ranks 3 and 4; the other group always goes on."""

    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), group_size=2, world=world) as me:
            for _epoch in range(2):
                for _ in me.batches(range(16)):
                    me.gradients[0][:] = me.point[0]
                    me.step()
        return me.role, me.report().steps, len(me.report().lost), me.parameters[0].tolist()

    with ranks(5) as cluster:
        cluster.fail(dead, point, occurrence)
        found = cluster.run(program, TIMEOUT_S)
    ended = [rank for rank, one in enumerate(found) if isinstance(one, InjectedFault)]
    assert ended == ([dead] if dead == 2 else [dead, dead + 1])
    told = [one[:3] for one in found if not isinstance(one, InjectedFault)]
    if dead == 2:
        assert told == [
            ("server 0", 0, 0),
            ("worker 0", 8, 1),
            ("worker 1", 8, 0),
            ("worker 1, member 1", 8, 0),
        ]
    else:
        assert [one[1:] for one in told] == [(0, 1), (8, 0), (8, 0)]
    assert np.isfinite(found[0][3]).all()


@pytest.mark.parametrize(
    ("options", "size", "text"),
    [
        ({"servers": 0, "group_size": 2}, 4, "makes 2 workers without a server"),
        ({"servers": 0, "group_size": 3}, 4, "not a multiple of group_size=3"),
        ({"group_size": 2}, 4, "3 worker ranks, which is not a multiple of group_size=2"),
        ({"group_size": 0}, 3, "group_size=0 is not possible"),
        ({"group_size": 1.5}, 3, "group_size=1.5 is not possible"),
        ({"servers": -1}, 3, "servers=-1 is not possible"),
    ],
)
def test_numbers_that_make_no_groups_are_refused(options, size, text):
    with pytest.raises(ConfigurationError, match=text):
        on_ranks(size, lambda world: train_grouped("downpour", [1], world=world, **options))


def test_ranks_with_other_groups_are_named():
    def program(world):
        return train_grouped("downpour", [1], world=world, group_size=2 if world.rank else 1)

    with pytest.raises(ConfigurationError, match="group_size=1 on rank 0 but 2, on rank 1"):
        on_ranks(3, program)


def test_another_number_of_ranks_goes_on_with_the_progress_of_the_optimizer():
    def member(world):
        optimizer = Adam(0.1)
        me = Participant(Steady(), [np.ones(3, "f4")], optimizer=optimizer, servers=0, world=world)
        return me, join(world, me._plan(optimizer)).part

    def before(world):
        me, part = member(world)
        part.start()
        for step in range(5):
            me.gradients[0][:] = np.arange(3) + world.rank + step
            part._group.mean(me._gradient.vector, 8.0)
            part.step(8.0)
        return part.state()

    def after(world):
        _, part = member(world)
        part.load_for_others(saved)
        return part.state()

    saved, *_ = on_ranks(3, before)
    assert saved["rule"]["work"][1] > 4
    for state in on_ranks(2, after):
        for name in ("rule", "optimizer", "parameters", "progress_before"):
            np.testing.assert_equal(state[name], saved[name])
