"""Options of ranks: one declaration, from which all that takes them is made."""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields

import pytest

from nnlo_common import ConfigurationError, Downpour, Participant
from nnlo_common.cluster._topology import Arrangement, Roles
from nnlo_common.commands.train._settings import OPTIONS, Settings, settings_of
from nnlo_common.training._all_reduce import ALL_REDUCES, WayName
from nnlo_common.training._plan import TrainingPlan
from nnlo_common.training._rank_options import (
    RANK_OPTIONS,
    RankArguments,
    RankOptions,
    checked_roles,
    rank_options_for,
    roles_taken_from,
)
from nnlo_common.training._session import Session

NAMES = ["servers", "group_size", "all_reduce", "stall_timeout_s", "spares", "heir", "overlap"]


def test_all_that_names_them_has_the_same_names():
    assert [one.name for one in fields(RankOptions)] == list(RANK_OPTIONS) == NAMES
    assert typing.get_type_hints(RankArguments) == typing.get_type_hints(RankOptions)
    assert typing.get_args(WayName) == tuple(ALL_REDUCES)
    for name in NAMES:
        assert name.removesuffix("_s") in OPTIONS


def test_they_travel_whole():
    assert len(inspect.signature(Session.__init__).parameters) == 6
    hints = typing.get_type_hints(TrainingPlan.__init__)
    assert hints["ranks"] is RankOptions
    assert not hints.keys() & set(NAMES)
    assert not typing.get_type_hints(Settings).keys() & {*NAMES, "stall_timeout"}


def test_a_framework_shows_its_own_ways_only():
    def ways(package):
        return typing.get_args(rank_options_for(package)["all_reduce"].type)

    assert ways("nnlo_keras") == ("auto", "mpi", "bfloat16", "shared")
    assert ways("nnlo_torch") == tuple(ALL_REDUCES)


def test_overlap_is_refused_by_name_where_no_framework_says_when_a_gradient_is_made():
    with pytest.raises(ConfigurationError, match=r"^X: overlap=True is possible only with the wrappers of"):
        RankOptions.taken_from({"overlap": True}, "X")
    for framework in ("nnlo_torch", "nnlo_keras"):
        assert "overlap" in rank_options_for(framework)
        assert RankOptions.taken_from({"overlap": True}, "X", framework).overlap


def test_what_is_given_is_what_differs():
    every = RankOptions(servers=3, group_size=2, all_reduce="mpi", stall_timeout_s=7.5)
    assert RankOptions().given() == {"servers": 1}
    assert RankOptions(**every.given()) == every
    assert every.describe() == "servers=3, group_size=2, all_reduce='mpi', stall_timeout_s=7.5"


@pytest.mark.parametrize(
    ("options", "grouped"),
    [({}, False), ({"servers": 0}, True), ({"group_size": 1}, False), ({"group_size": 2}, True)],
)
def test_groups(options, grouped):
    assert RankOptions(**options).grouped is grouped


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("servers", -1, "a whole number of at least 0"),
        ("servers", None, "a whole number of at least 0"),
        ("group_size", 0, "a whole number of at least 1, or None"),
        ("group_size", 1.5, "a whole number of at least 1, or None"),
        ("stall_timeout_s", 0, "above 0, finite, or None"),
    ],
)
def test_impossible_values_are_refused_with_the_name_of_what_was_given_them(name, wrong, said):
    with pytest.raises(ConfigurationError) as raised:
        Participant(Downpour(), [], **{name: wrong})
    assert str(raised.value) == f"Participant: {name}={wrong!r} is not possible: it must be {said}"


def test_a_limit_for_stalled_ranks_is_refused_where_nobody_watches():
    with pytest.raises(ConfigurationError, match=r"^Participant: stall_timeout_s=8 with servers=0 is"):
        Participant(Downpour(), [], servers=0, stall_timeout_s=8)


def test_an_unknown_option_is_refused_as_python_does():
    with pytest.raises(TypeError, match=r"Participant\(\) got an unexpected keyword argument 'server'"):
        Participant(Downpour(), [], server=1)


def test_flags_reach_the_options():
    from nnlo_common.commands.train._option import Given

    given = {"servers": "2", "group_size": "3", "all_reduce": "shared", "stall_timeout": "8"}
    found = settings_of(
        {name: Given(value) for name, value in ({"model": "m.py", "loss": "mse"} | given).items()}
    )
    assert found.ranks == RankOptions(servers=2, group_size=3, all_reduce="shared", stall_timeout_s=8.0)


def test_what_decides_the_roles_of_ranks_is_said_once():
    """A new option of this kind is in `Roles`, and with it in `shard`, `Batches`, `scale_lr` and the like."""
    told = {**typing.get_type_hints(Roles)}
    of_plan = inspect.signature(Arrangement.of_training).parameters.values()
    assert set(told) == {one.name for one in of_plan if one.kind is one.KEYWORD_ONLY}
    assert set(told) - {"sub_servers"} <= RANK_OPTIONS.keys()
    for name in set(told) - {"sub_servers"}:
        assert told[name] == RANK_OPTIONS[name].type
    every = RankOptions(servers=2, group_size=3, stall_timeout_s=8.0).roles(sub_servers="host")
    assert every == {"servers": 2, "group_size": 3, "spares": 0, "sub_servers": "host"}


def test_roles_that_are_none_or_impossible_are_refused_with_the_function_that_was_given_them():
    assert checked_roles("shard()", {"group_size": 2}) == RankOptions(group_size=2).roles()
    with pytest.raises(ConfigurationError, match=r"^shard\(\): servers=-1 is not possible"):
        checked_roles("shard()", {"servers": -1})
    with pytest.raises(TypeError, match=r"^shard\(\) got an unexpected keyword argument 'stall_timeout_s'$"):
        checked_roles("shard()", {"stall_timeout_s": 1.0})
    given = {"batch_size": 5, "servers": 2, "sub_servers": 0}
    assert roles_taken_from(given, "Batches") == RankOptions(servers=2).roles()
    assert given == {"batch_size": 5}
