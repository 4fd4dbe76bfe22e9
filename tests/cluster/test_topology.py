"""Topology: every rank gets exactly one role, or the layout is refused with its arithmetic."""

from __future__ import annotations

import doctest
import re
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster import _topology
from nnlo_common.cluster._hosts import Place, locate
from nnlo_common.cluster._topology import Arrangement, Assignment, Cell, Role, Topology

ARRANGEMENTS = st.builds(
    Arrangement,
    servers=st.integers(0, 4),
    group_size=st.integers(1, 4),
    folds=st.integers(1, 4),
    blocks=st.integers(0, 4),
)


def possible(size: int, arrangement: Arrangement) -> bool:
    """The definition, by trying every number of groups."""
    coordinator = 1 if arrangement.blocks else 0
    cells = max(arrangement.blocks, 1) * arrangement.folds
    sizes = [
        coordinator + cells * (arrangement.servers + groups * arrangement.group_size)
        for groups in range(1, size + 1)
    ]
    return size in sizes or (size == 1 and arrangement == Arrangement())


def places_on(hosts: str, gpus: int) -> tuple[Place, ...]:
    return locate([{"host": host, "cores": 64, "gpus": gpus} for host in hosts])


def test_the_examples_run() -> None:
    assert doctest.testmod(_topology).failed == 0
    assert doctest.testmod(_topology).failed == 0


class TestArrangement:
    @pytest.mark.parametrize(
        ("field", "value", "least"),
        [
            ("servers", 0, None),
            ("servers", 1, None),
            ("servers", -1, 0),
            ("servers", 1.0, 0),
            ("servers", True, 0),
            ("servers", "1", 0),
            ("servers", None, 0),
            ("group_size", 1, None),
            ("group_size", 0, 1),
            ("group_size", -2, 1),
            ("folds", 1, None),
            ("folds", 0, 1),
            ("blocks", 0, None),
            ("blocks", 1, None),
            ("blocks", -1, 0),
        ],
    )
    def test_options(self, field: str, value: object, least: int | None) -> None:
        if least is None:
            assert getattr(Arrangement(**{field: value}), field) == value  # type: ignore[arg-type]
        else:
            problem = f"{field}={value!r}: must be a whole number of at least {least}"
            with pytest.raises(ConfigurationError, match=f"^{re.escape(problem)}$"):
                Arrangement(**{field: value})  # type: ignore[arg-type]

    def test_it_is_frozen_and_keyword_only(self) -> None:
        with pytest.raises(FrozenInstanceError):
            Arrangement().servers = 2  # type: ignore[misc]
        with pytest.raises(TypeError):
            Arrangement(2)  # type: ignore[call-arg]

    @given(size=st.integers(-2, 64), arrangement=ARRANGEMENTS)
    def test_fits_is_the_definition(self, size: int, arrangement: Arrangement) -> None:
        assert arrangement.fits(size) == possible(size, arrangement)


# size, arrangement, and either the servers and groups of every cell or the whole message
PLANS: list[tuple[int, Arrangement, object]] = [
    (1, Arrangement(), [((), ((0,),))]),
    (2, Arrangement(), [((0,), ((1,),))]),
    (4, Arrangement(), [((0,), ((1,), (2,), (3,)))]),
    (5, Arrangement(servers=2), [((0, 1), ((2,), (3,), (4,)))]),
    (3, Arrangement(servers=0), [((), ((0,), (1,), (2,)))]),
    (4, Arrangement(servers=0, group_size=2), [((), ((0, 1), (2, 3)))]),
    (5, Arrangement(group_size=2), [((0,), ((1, 2), (3, 4)))]),
    (4, Arrangement(folds=2), [((0,), ((1,),)), ((2,), ((3,),))]),
    (3, Arrangement(blocks=1), [((1,), ((2,),))]),
    (
        13,
        Arrangement(blocks=2),
        [((1,), ((2,), (3,), (4,), (5,), (6,))), ((7,), ((8,), (9,), (10,), (11,), (12,)))],
    ),
    (9, Arrangement(blocks=2, folds=2), [((i,), ((i + 1,),)) for i in (1, 3, 5, 7)]),
    (
        13,
        Arrangement(blocks=2, group_size=2),
        (
            "13 ranks cannot be laid out as blocks=2, folds=1, servers=1, group_size=2: "
            "13 - 1 coordinator = 12 ranks; 12 / 2 blocks = 6 ranks a cell; 6 - 1 server = 5 worker ranks, "
            "which is not a multiple of group_size=2. "
            "Start 11 or 15 ranks, or keep 13 ranks with servers=2 or group_size=1 or blocks=4."
        ),
    ),
    (
        14,
        Arrangement(blocks=2, folds=3),
        (
            "14 ranks cannot be laid out as blocks=2, folds=3, servers=1, group_size=1: "
            "14 - 1 coordinator = 13 ranks, which is not a multiple of (2 blocks x 3 folds). "
            "Start 13 or 19 ranks."
        ),
    ),
    (
        5,
        Arrangement(folds=2),
        (
            "5 ranks cannot be laid out as blocks=0, folds=2, servers=1, group_size=1: "
            "5 ranks, which is not a multiple of 2 folds. Start 4 or 6 ranks, or keep 5 ranks with folds=1."
        ),
    ),
    (
        1,
        Arrangement(servers=2),
        (
            "1 rank cannot be laid out as blocks=0, folds=1, servers=2, group_size=1: "
            "1 - 2 servers = -1 worker ranks, fewer than group_size=1. "
            "Start 3 ranks, or keep 1 rank with servers=1."
        ),
    ),
    (
        2,
        Arrangement(blocks=2),
        (
            "2 ranks cannot be laid out as blocks=2, folds=1, servers=1, group_size=1: "
            "2 - 1 coordinator = 1 rank, which is not a multiple of 2 blocks. Start 5 ranks."
        ),
    ),
    (
        1,
        Arrangement(servers=0, group_size=3),
        (
            "1 rank cannot be laid out as blocks=0, folds=1, servers=0, group_size=3: "
            "1 rank, fewer than group_size=3. Start 3 ranks, or keep 1 rank with group_size=1."
        ),
    ),
    (0, Arrangement(), "size=0: must be a whole number of at least 1"),
    (-3, Arrangement(), "size=-3: must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("size", "arrangement", "expected"), PLANS)
def test_plans(size: int, arrangement: Arrangement, expected: object) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError) as caught:
            Topology.plan(size, arrangement)
        assert str(caught.value) == expected
    else:
        topology = Topology.plan(size, arrangement)
        topology.validate()
        assert [(cell.servers, cell.groups) for cell in topology.cells] == expected


class TestEveryPlan:
    @given(size=st.integers(1, 64), arrangement=ARRANGEMENTS)
    @settings(max_examples=200)
    def test_is_valid_or_refused_with_offers_that_hold(self, size: int, arrangement: Arrangement) -> None:
        if possible(size, arrangement):
            check_plan(Topology.plan(size, arrangement), size, arrangement)
        else:
            with pytest.raises(ConfigurationError) as caught:
                Topology.plan(size, arrangement)
            check_refusal(str(caught.value), size, arrangement)

    @given(arrangement=ARRANGEMENTS, groups=st.integers(1, 4))
    def test_of_a_possible_size_is_valid(self, arrangement: Arrangement, groups: int) -> None:
        cell = arrangement.servers + groups * arrangement.group_size
        size = (arrangement.blocks > 0) + arrangement.cells * cell
        check_plan(Topology.plan(size, arrangement), size, arrangement)


def check_plan(topology: Topology, size: int, arrangement: Arrangement) -> None:
    topology.validate()
    assignments = topology.assignments
    assert [assignment.rank for assignment in assignments] == list(range(size))
    roles = [assignment.role for assignment in assignments]
    cells = max(arrangement.blocks, 1) * arrangement.folds
    trainers = roles.count(Role.WORKER) + roles.count(Role.MEMBER)
    assert roles.count(Role.COORDINATOR) == (arrangement.blocks > 0)
    assert roles.count(Role.SERVER) == (0 if size == 1 else cells * arrangement.servers)
    assert trainers == roles.count(Role.WORKER) * arrangement.group_size > 0
    for assignment in assignments:
        if assignment.role is Role.COORDINATOR:
            assert assignment == Assignment(rank=0, role=Role.COORDINATOR)
            continue
        cell = topology.cell_of(assignment.rank)
        assert assignment.rank in cell.ranks
        assert (assignment.block, assignment.fold) == (cell.block, cell.fold)
        if assignment.shard is not None:
            assert cell.holders[assignment.shard] == assignment.rank
        if assignment.worker is not None:
            assert cell.groups[assignment.worker][assignment.member or 0] == assignment.rank
        assert (assignment.role is Role.SERVER) == (assignment.rank in cell.servers)
        assert (assignment.role is Role.WORKER) == (assignment.rank in cell.workers)
    for cell in topology.cells:
        assert list(cell.ranks) == list(range(cell.ranks[0], cell.ranks[0] + len(cell.ranks)))


def check_refusal(message: str, size: int, arrangement: Arrangement) -> None:
    head, _, offers = message.partition(". Start ")
    assert head.startswith(f"{size} rank")
    assert f"laid out as {arrangement}: " in head
    assert re.search(r"which is not a multiple of|fewer than", head)
    arithmetic = head.split(": ", 1)[1]
    steps = re.findall(r"(-?\d+) ([-/]) (\(.*?\)|\d+ \w+) = (-?\d+)", arithmetic)
    for left, sign, right, result in steps:
        if sign == "-":
            assert int(left) - int(right.split()[0]) == int(result)
        else:
            assert int(left) == int(result) * arrangement.cells
    assert arithmetic.startswith(f"{size} ")

    sizes_text, _, changes_text = offers.partition(", or keep ")
    sizes = [int(number) for number in re.findall(r"\d+", sizes_text)]
    assert sizes == sorted(nearest(size, arrangement))
    for name, value in re.findall(r"(\w+)=(\d+)", changes_text):
        assert possible(size, replace(arrangement, **{name: int(value)}))


def nearest(size: int, arrangement: Arrangement) -> list[int]:
    """The largest possible number of ranks below and the smallest above."""
    below = [number for number in range(size - 1, 0, -1) if possible(number, arrangement)]
    above = next(number for number in range(size + 1, 1000) if possible(number, arrangement))
    return [*below[:1], above]


class TestQueries:
    def test_assignments_say_block_fold_and_place_in_the_cell(self) -> None:
        topology = Topology.plan(21, Arrangement(blocks=2, folds=2, servers=1, group_size=2))
        assert topology.coordinator == 0
        assert topology.assignment(0) == Assignment(rank=0, role=Role.COORDINATOR)
        assert topology.assignment(11) == Assignment(rank=11, role=Role.SERVER, block=1, fold=0, shard=0)
        assert topology.assignment(19) == Assignment(
            rank=19, role=Role.WORKER, block=1, fold=1, worker=1, member=0
        )
        assert topology.assignment(20) == Assignment(
            rank=20, role=Role.MEMBER, block=1, fold=1, worker=1, member=1
        )
        assert topology.cell_of(20) == Cell(
            index=3, block=1, fold=1, servers=(16,), groups=((17, 18), (19, 20))
        )

    def test_a_cell_tells_its_ranks(self) -> None:
        cell = Topology.plan(6, Arrangement(servers=2, group_size=2)).cell_of(5)
        assert (cell.workers, cell.ranks, cell.holders, cell.alone) == (
            (2, 4),
            (0, 1, 2, 3, 4, 5),
            (0, 1),
            False,
        )

    def test_without_servers_the_workers_hold_the_shards(self) -> None:
        topology = Topology.plan(4, Arrangement(servers=0, group_size=2))
        assert topology.cells[0].holders == topology.cells[0].workers == (0, 2)
        assert [assignment.shard for assignment in topology.assignments] == [0, None, 1, None]

    def test_a_world_of_one_is_a_worker_without_a_server(self) -> None:
        topology = Topology.plan(1)
        assert topology.assignment(0).role is Role.WORKER
        assert topology.cells[0].alone
        assert topology.cells[0].servers == ()
        assert topology.coordinator is None

    @pytest.mark.parametrize("rank", [-1, 3, 100])
    def test_ranks_that_do_not_exist_are_refused(self, rank: int) -> None:
        with pytest.raises(ConfigurationError, match=f"^rank={rank}: must be from 0 to 2$"):
            Topology.plan(3).assignment(rank)

    def test_the_coordinator_is_in_no_cell(self) -> None:
        with pytest.raises(ConfigurationError, match="rank=0: is the coordinator, which is in no cell"):
            Topology.plan(3, Arrangement(blocks=1)).cell_of(0)

    def test_equal_questions_have_equal_answers(self) -> None:
        assert Topology.plan(3) == Topology.plan(3, Arrangement())
        assert hash(Topology.plan(3)) == hash(Topology.plan(3))


class TestGPUs:
    @pytest.mark.parametrize(
        ("hosts", "gpus", "arrangement", "devices"),
        [
            ("aaa", 0, Arrangement(), [None, None, None]),
            ("aaa", 1, Arrangement(), [0, 0, 0]),
            ("a", 4, Arrangement(), [0]),
            # The server stands aside: by local rank alone the workers would have got 1 and 0.
            ("aaa", 2, Arrangement(), [0, 0, 1]),
            ("aaaaa", 4, Arrangement(), [0, 0, 1, 2, 3]),
            ("aaaa", 4, Arrangement(), [3, 0, 1, 2]),
            ("aaaaa", 4, Arrangement(servers=2), [3, 0, 0, 1, 2]),
            ("aaaaaa", 4, Arrangement(), [1, 0, 1, 2, 3, 0]),
            ("aaaa", 2, Arrangement(servers=0), [0, 1, 0, 1]),
            ("aaaaa", 4, Arrangement(group_size=2), [0, 0, 1, 2, 3]),
            ("aaaaa", 4, Arrangement(blocks=2), [None, 2, 0, 3, 1]),
            ("aabb", 2, Arrangement(), [1, 0, 0, 1]),
            ("abab", 2, Arrangement(), [1, 0, 0, 1]),
        ],
    )
    def test_workers_first_then_servers(
        self, hosts: str, gpus: int, arrangement: Arrangement, devices: list[int | None]
    ) -> None:
        topology = Topology.plan(len(hosts), arrangement)
        assert list(topology.gpus(places_on(hosts, gpus))) == devices

    def test_a_rank_that_sees_another_number_keeps_to_its_own(self) -> None:
        reports = [{"host": "a", "cores": 9, "gpus": count} for count in (0, 4, 1, 2)]
        assert Topology.plan(4).gpus(locate(reports)) == (None, 0, 0, 0)

    @given(workers=st.integers(1, 12), servers=st.integers(1, 3), gpus=st.integers(1, 8))
    def test_workers_are_spread_evenly_whatever_the_servers(
        self, workers: int, servers: int, gpus: int
    ) -> None:
        topology = Topology.plan(workers + servers, Arrangement(servers=servers))
        devices = topology.gpus(places_on("a" * (workers + servers), gpus))
        used = [devices[rank] for rank in topology.cells[0].workers]
        loads = [used.count(device) for device in range(gpus)]
        assert max(loads) - min(loads) <= 1

    @pytest.mark.parametrize(("hosts", "kept"), [("aa", 2), ("aaaa", 4), ("aaa", 2)])
    def test_places_must_be_those_of_all_ranks_in_order(self, hosts: str, kept: int) -> None:
        places = places_on(hosts, 1)[-kept:]
        with pytest.raises(ConfigurationError, match="pass those of ranks 0 to 2, in order"):
            Topology.plan(3).gpus(places)


TABLES = [
    (
        Topology.plan(1),
        None,
        """\
rank  role
   0  worker 0, alone""",
    ),
    (
        Topology.plan(4, Arrangement(servers=2)),
        places_on("abab", 2),
        """\
rank  host  local rank  GPU  role
   0  a              0    1  server 0 of 2
   1  b              0    1  server 1 of 2
   2  a              1    0  worker 0
   3  b              1    0  worker 1""",
    ),
    (
        Topology.plan(4, Arrangement(servers=0, group_size=2)),
        None,
        """\
rank  role
   0  worker 0, shard 0 of 2
   1  worker 0, member 1 of 2
   2  worker 1, shard 1 of 2
   3  worker 1, member 1 of 2""",
    ),
    (
        Topology.plan(4, Arrangement(folds=2)),
        None,
        """\
rank  fold  role
   0     0  server 0 of 1
   1     0  worker 0
   2     1  server 0 of 1
   3     1  worker 0""",
    ),
    (
        Topology.plan(13, Arrangement(blocks=2, folds=2, group_size=2)),
        places_on("aaaaaaabbbbbb", 4),
        """\
rank  host  local rank  GPU  block  fold  role
   0  a              0    -      -     -  coordinator
   1  a              1    0      0     0  server 0 of 1
   2  a              2    0      0     0  worker 0
   3  a              3    1      0     0  worker 0, member 1 of 2
   4  a              4    1      0     1  server 0 of 1
   5  a              5    2      0     1  worker 0
   6  a              6    3      0     1  worker 0, member 1 of 2
   7  b              0    0      1     0  server 0 of 1
   8  b              1    0      1     0  worker 0
   9  b              2    1      1     0  worker 0, member 1 of 2
  10  b              3    1      1     1  server 0 of 1
  11  b              4    2      1     1  worker 0
  12  b              5    3      1     1  worker 0, member 1 of 2""",
    ),
]


@pytest.mark.parametrize(("topology", "places", "text"), TABLES)
def test_tables(topology: Topology, places: tuple[Place, ...] | None, text: str) -> None:
    assert topology.table(places) == text


GOOD = Topology.plan(10, Arrangement(folds=2, servers=2, group_size=3))
FIRST, SECOND = GOOD.cells


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({}, None),
        ({"coordinator": 0}, "a coordinator exactly with blocks"),
        ({"arrangement": replace(GOOD.arrangement, blocks=1)}, "a coordinator exactly with blocks"),
        ({"arrangement": replace(GOOD.arrangement, servers=1)}, "the servers asked for"),
        ({"arrangement": replace(GOOD.arrangement, group_size=2)}, "every group has the size asked for"),
        ({"arrangement": replace(GOOD.arrangement, folds=1)}, "one cell for every block and fold"),
        ({"cells": (FIRST,)}, "exactly one place"),
        ({"cells": (FIRST, FIRST)}, "exactly one place"),
        ({"cells": (SECOND, FIRST)}, "in order"),
        ({"cells": (FIRST, replace(SECOND, groups=()))}, "equally many groups"),
        ({"cells": (FIRST, replace(SECOND, groups=((7, 8, 9), ())))}, "every group has the size asked for"),
        ({"cells": (FIRST, replace(SECOND, servers=()))}, "the servers asked for"),
        ({"cells": (replace(FIRST, servers=(1, 0)), SECOND)}, "exactly one place, in order"),
        ({"assignments": GOOD.assignments[:-1]}, "exactly one place"),
        (
            {"assignments": (replace(GOOD.assignments[0], shard=1), *GOOD.assignments[1:])},
            "shards of a cell are numbered from 0",
        ),
        (
            {"assignments": (replace(GOOD.assignments[0], role=Role.WORKER), *GOOD.assignments[1:])},
            "the assignments say what the cells say",
        ),
    ],
)
def test_validate_finds_what_is_broken(changes: dict[str, object], promise: str | None) -> None:
    topology = replace(GOOD, **changes)  # type: ignore[arg-type]
    if promise is None:
        topology.validate()
    else:
        with pytest.raises(ConfigurationError, match=promise):
            topology.validate()
